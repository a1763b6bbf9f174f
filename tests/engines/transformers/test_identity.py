"""A model's name changes with what decides its keys and values, and with nothing else."""

import copy
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.engines.transformers import adapters
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import hub

from kvtier.config import ModelIdentity
from kvtier.engines.transformers import EngineConfig, model_facts
from kvtier.engines.transformers.identity import ModelNamer, make_offloading_config
from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.engines.transformers.model_facts import EXCLUDED_ATTRIBUTES, EXCLUDED_SETTINGS, own_attributes
from kvtier.errors import ModelError
from kvtier.namespace import make_namespace

Value = Any  # Any: a setting or an attribute of any kind


def name_of(model: PreTrainedModel, model_revision: str | None = None) -> ModelIdentity:
    return ModelNamer(ModelAdapter(model), EngineConfig(8, model_revision=model_revision)).name()


def digest_of(
    model: PreTrainedModel, model_name: str | None = None, model_revision: str | None = None
) -> bytes:
    config = EngineConfig(8, model_name=model_name, model_revision=model_revision)
    return make_namespace(make_offloading_config(ModelAdapter(model), config, {}), 4096).digest


@pytest.fixture
def model(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model with two adapters, of which the first is active."""
    model = copy.deepcopy(llama)
    for name, seed in (("a", 1), ("b", 2)):
        adapters.add_adapter(model, name, seed)
    return model


def test_equal_models_have_equal_names(model: LlamaForCausalLM) -> None:
    assert name_of(copy.deepcopy(model)) == name_of(model)
    assert digest_of(copy.deepcopy(model)) == digest_of(model)


@pytest.mark.slow
def test_the_last_bit_of_any_parameter_or_buffer_counts(model: LlamaForCausalLM) -> None:
    namer = ModelNamer(ModelAdapter(model), EngineConfig(8))
    seen = {namer.name().weights}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        with torch.no_grad():
            numbers = tensor.view(-1)
            numbers[-1] = torch.nextafter(numbers[-1], torch.tensor(torch.inf))
        found = namer.name()
        assert found.weights not in seen, name
        seen.add(found.weights)
        assert found.weights == name_of(copy.deepcopy(model)).weights, (
            "what is read anew is what a new engine reads"
        )
    assert any("rotary" in name for name in tensors), "buffers that no checkpoint keeps are among them"


def test_a_tensor_that_is_neither_parameter_nor_buffer_counts(model: LlamaForCausalLM) -> None:
    extra: Value = model.model.layers[0]
    extra.offsets = [torch.zeros(3)]
    expected = name_of(model).weights
    extra.offsets[0][2] = 1
    assert name_of(model).weights != expected


def test_the_same_numbers_in_another_dtype_differ(llama: LlamaForCausalLM) -> None:
    halves = copy.deepcopy(llama)
    torch.nn.Module.to(halves, torch.bfloat16)
    expected = digest_of(halves)
    torch.nn.Module.to(halves, torch.float32)
    assert digest_of(halves) != expected


def other(value: Value) -> Value:
    """Return another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 + 1
        case str():
            return f"{value}x"
        case list():
            return [*value, "x"]
        case dict():
            return value | {"x": 1}
    return "x" if value is None else None


def leaves(settings: dict[str, Value]) -> Iterator[tuple[dict[str, Value], str]]:
    for name, value in list(settings.items()):
        yield settings, name
        if isinstance(value, dict) and name not in EXCLUDED_SETTINGS:
            yield from leaves(value)


def test_each_setting_counts_unless_it_is_excluded_with_a_reason(llama: LlamaForCausalLM) -> None:
    model = copy.deepcopy(llama)
    namer = ModelNamer(ModelAdapter(model), EngineConfig(8))
    usual = namer.name()
    tried = set()
    for settings, name in leaves(vars(model.config)):
        value = settings[name]
        settings[name] = other(value)
        found = namer.name()
        settings[name] = value
        assert (found == usual) is (name in EXCLUDED_SETTINGS), name
        tried.add(name)
    assert namer.name() == usual
    assert {"rope_theta", "_attn_implementation_internal", "use_cache", "_name_or_path"} <= tried


@pytest.mark.slow
def test_each_attribute_of_each_module_counts_unless_it_is_excluded_with_a_reason(
    model: LlamaForCausalLM,
) -> None:
    namer = ModelNamer(ModelAdapter(model), EngineConfig(8))
    usual = namer.name()
    tried = set()
    # One layer stands for all.
    modules = [
        (path, each) for path, each in model.named_modules() if ".1." not in path and ".2." not in path
    ]
    for path, module in modules:
        for name in (*own_attributes(module), *(EXCLUDED_ATTRIBUTES.keys() - {"config"} if not path else ())):
            had, value = name in vars(module), vars(module).get(name)
            vars(module)[name] = other(value)
            found = namer.name()
            if had:
                vars(module)[name] = value
            else:
                del vars(module)[name]
            assert (found == usual) is (name in EXCLUDED_ATTRIBUTES), (path, name)
            tried.add(name)
    assert {"scaling", "_active_adapter", "_disable_adapters", "merged_adapters", "layer_idx"} <= tried


def test_each_excluded_name_exists_in_a_library() -> None:
    parts = (
        "modeling_utils",
        "configuration_utils",
        "generation.utils",
        "integrations.peft",
        "integrations.accelerate",
    )
    code = "".join(inspect.getsource(importlib.import_module(f"transformers.{part}")) for part in parts)
    code += inspect.getsource(torch.nn.Module)
    unknown = [name for name in (*EXCLUDED_ATTRIBUTES, *EXCLUDED_SETTINGS) if name not in code]
    # accelerate's, which is not installed everywhere.
    assert set(unknown) <= {"_old_forward", "name_or_path"}
    assert all(reason for reason in (*EXCLUDED_ATTRIBUTES.values(), *EXCLUDED_SETTINGS.values()))


def test_name_and_folder_of_weights_that_were_read_do_not_count(
    llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    digests = {digest_of(llama)}
    for folder in (tmp_path / "one", tmp_path / "deep" / "other"):
        llama.save_pretrained(folder)
        kind: Value = LlamaForCausalLM
        loaded = kind.from_pretrained(folder, cache_dir=tmp_path / folder.name)
        digests |= {digest_of(loaded), digest_of(loaded, model_name="mine")}
    assert len(digests) == 1


def test_name_and_revision_of_weights_that_were_not_read_count(llama: LlamaForCausalLM) -> None:
    named = [("one", "r1"), ("one", "r2"), ("two", "r1")]
    digests = {digest_of(llama, model_name=name, model_revision=revision) for name, revision in named}
    assert len(digests | {digest_of(llama)}) == 4
    assert name_of(llama, "r1").weights == ""


def make_odd_model(make: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """Return a model with an adapter, a hook and attributes whose order differs between processes."""
    model = make()
    adapters.add_adapter(model, "a", 1)
    odd: Value = model.model
    odd.kinds = {"b", "a", "c", frozenset({"d", "e"})}
    odd.choose = adapters.set_scale
    return model


IN_ANOTHER_PROCESS = """
from tests.engines.transformers.conftest import make_llama
from tests.engines.transformers.test_identity import make_odd_model, name_of
name = name_of(make_odd_model(make_llama))
print(name.weights, name.config_digest)
"""


@pytest.mark.slow
def test_another_process_with_another_home_and_hash_seed_gives_the_same_name(
    tmp_path: Path,
    tiny: Any,  # noqa: ANN401 - the fixture's type is another module's
) -> None:
    name = name_of(make_odd_model(tiny.llama))
    environment = os.environ | {
        "PYTHONHASHSEED": "7",
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [name.weights, name.config_digest]


def test_a_value_without_a_form_that_another_process_finds_is_named_once_and_its_blocks_are_its_own(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd: Value = model.model.layers[0].mlp
    odd.guard = threading.Lock()
    namer = ModelNamer(ModelAdapter(model), EngineConfig(8))
    name = namer.name()
    assert namer.name() == name
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "model.layers.0.mlp:guard" in caplog.text
    monkeypatch.setattr(model_facts, "PROCESS_ID", "another")
    assert name_of(model) != name


def test_code_that_is_in_no_file_is_named_and_its_blocks_are_its_own(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    typed: dict[str, Value] = {"__name__": "typed_in", "torch": torch}
    exec("class Twice(torch.nn.Module):\n    def forward(self, x):\n        return 2 * x", typed)  # noqa: S102
    model = copy.deepcopy(llama)
    mlp: Value = model.model.layers[0].mlp
    mlp.act_fn = typed["Twice"]()
    name = name_of(model)
    assert "model.layers.0.mlp.act_fn:" in caplog.text
    monkeypatch.setattr(model_facts, "PROCESS_ID", "another")
    assert name_of(model) != name


def test_weights_that_are_not_in_memory_are_refused(llama: LlamaForCausalLM) -> None:
    hollow = copy.deepcopy(llama)
    namer = ModelNamer(ModelAdapter(hollow), EngineConfig(8))
    torch.nn.Module.to(hollow.lm_head, "meta")
    with pytest.raises(ModelError, match=r"lm_head\.weight are not in memory.*model_revision"):
        namer.name()


REMOTE_CODE = """
from transformers import LlamaForCausalLM
from .parts import SCALE
class OwnLlama(LlamaForCausalLM):
    pass
"""


def test_code_that_came_with_the_model_counts(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name_of(llama)]
    for name, scale in (("one", 1), ("other", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "modeling.py").write_text(REMOTE_CODE)
        (folder / "parts.py").write_text(f"SCALE = {scale}")
        own_class = load_remote_class(name, folder, monkeypatch)
        own = own_class(llama.config)
        own.load_state_dict(llama.state_dict())
        names.append(name_of(own))

    assert len({json.loads(name.config_json).get("own_code") for name in names}) == 3
    assert len({name.config_digest for name in names}) == 3


def load_remote_class(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LlamaForCausalLM]:
    """Import a model's class from its folder under the name that transformers gives such code."""
    top = hub.TRANSFORMERS_DYNAMIC_MODULE_NAME
    package = f"{top}.{name}"
    for module_name, path in ((top, folder.parent), (package, folder)):
        module = ModuleType(module_name)
        module.__path__ = [str(path)]
        monkeypatch.setitem(sys.modules, module_name, module)
    own_class: Callable[..., LlamaForCausalLM] = importlib.import_module(f"{package}.modeling").OwnLlama
    return own_class


def test_another_way_to_compute_attention_is_another_configuration(llama: LlamaForCausalLM) -> None:
    other_way = copy.deepcopy(llama)
    llama.set_attn_implementation("sdpa")
    other_way.set_attn_implementation("eager")
    assert digest_of(other_way) != digest_of(llama)


def test_the_configuration_in_words_names_rope_window_and_adapters(model: LlamaForCausalLM) -> None:
    words = json.loads(name_of(model).config_json)
    assert words["hidden_size"] == model.config.hidden_size
    assert words["rope_parameters"]["rope_theta"] == 10000.0
    assert words["attn_implementation"] == "sdpa"
    assert words["departures"]["values"]["_active_adapter"] == ['["a"]']
    assert not {"_name_or_path", "name_or_path"} & words.keys()


def test_a_model_as_its_class_makes_it_departs_in_nothing(llama: LlamaForCausalLM) -> None:
    assert json.loads(name_of(llama).config_json)["departures"] == {}
