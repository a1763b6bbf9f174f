"""Every field of the configuration names an engine's blocks, unless it is listed with a reason: both directions."""

import copy
import dataclasses
import enum
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.configs import with_kvtier
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalConfig

from kvtier.engines.vllm.identity import make_model_identity
from kvtier.engines.vllm.named_fields import (
    CONDITIONS,
    EXCLUDED,
    SECRET_KEY,
    UNNAMED_PARTS_OF_HF,
    VALUES_WITHOUT_FIELD,
    canonical,
    list_fields,
    name_fields,
    without_credentials,
)
from scripts.identity_fields import BEGIN, END, PAGE, make_config, render

ONLY_IN_OTHER_RELEASES: frozenset[str] = frozenset(
    {
        "cache_config.enable_mamba_fine_grained_prefix_cache",
        "cache_config.user_specified_mamba_block_size",
        "model_config.enable_return_routed_experts",
    }
)
"""Excluded fields that the newest supported release does not have, and another one has."""

Place = tuple[str, object, str]
"""A leaf of a configuration: its name with dots, the section that has it, and the field's name there."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Return the configuration of an engine with adapters, a draft model and images."""
    return with_kvtier(make_config(tmp_path_factory.mktemp("whole")))


def leaves(config: Any, start: str = "") -> Iterator[Place]:  # noqa: ANN401  # vLLM's own dataclasses
    """Yield every leaf of a configuration, those of excluded sections and of a model's own configuration included."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if is_section and not field.name.startswith("target_"):
            yield from leaves(value, f"{start}{field.name}.")
        else:
            yield f"{start}{field.name}", config, field.name


def changed(value: object) -> object:
    """Return another value of a field, of the same type where that has one."""
    match value:
        case bool():
            return not value
        case enum.Enum():
            return next(one for one in type(value) if one is not value)
        case int() | float():
            return value + 1
        case str():
            return f"{value}-changed"
        case torch.dtype():
            return torch.float64
        case list() | tuple():
            return [*value, "changed"]
        case set() | frozenset():
            return {*value, "changed"}
        case dict():
            return {**value, "changed": 1}
        case _:
            return "changed"


def names_of(config: VllmConfig) -> tuple[str, str]:
    """Return what names the blocks: of the configuration, and of the weights."""
    identity = make_model_identity(config)
    return identity.config_digest, identity.weights


def is_listed(name: str) -> bool:
    """Return whether a leaf, or a section that has it, is excluded."""
    plain = name.replace("speculative_config.draft_model_config.", "model_config.")
    starts = [".".join(one.split(".")[:end]) for one in (name, plain) for end in range(1, one.count(".") + 2)]
    is_unnamed = ".hf_" in name and name.rpartition(".")[2] in UNNAMED_PARTS_OF_HF
    # Excluded only for drafts without a model, and this engine has one.
    return is_unnamed or any(one in EXCLUDED and one != "speculative_config" for one in starts)


def test_each_leaf_changes_the_name_unless_it_is_listed(whole: VllmConfig) -> None:
    before = name_fields(whole)
    missed: list[str] = []
    extra: list[str] = []
    num_kept = 0
    for name, section, field in leaves(whole):
        value = getattr(section, field, None)
        other = changed(value)
        object.__setattr__(section, field, other)
        try:
            after = name_fields(whole)
        finally:
            object.__setattr__(section, field, value)
        num_kept += not is_listed(name)
        if (after == before) != is_listed(name):
            (extra if is_listed(name) else missed).append(name)

    assert (missed, extra) == ([], [])
    assert name_fields(whole) == before
    assert before.unstable == []
    assert num_kept > 150


def test_each_listed_name_is_a_field_of_a_supported_release(whole: VllmConfig) -> None:
    found = {name for name, _, _ in leaves(whole)}
    sections = {".".join(name.split(".")[:end]) for name in found for end in range(1, name.count(".") + 1)}

    assert set(EXCLUDED) - found - sections == ONLY_IN_OTHER_RELEASES
    assert set(EXCLUDED) >= set(CONDITIONS)
    assert all(EXCLUDED.values())


def test_a_field_that_a_release_lacks_is_no_part_of_the_name_where_engines_compute_as_without_it(
    whole: VllmConfig,
) -> None:
    defaults = {field.name: field.value for field in list_fields(whole) if field.name in VALUES_WITHOUT_FIELD}

    assert defaults.items() <= VALUES_WITHOUT_FIELD.items()
    assert not VALUES_WITHOUT_FIELD.keys() & name_fields(whole).words.keys()
    assert not VALUES_WITHOUT_FIELD.keys() & EXCLUDED.keys()


def test_the_page_has_the_fields_of_this_release(whole: VllmConfig) -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    made = render(list(list_fields(whole)))

    assert table.strip() == made.strip(), "run python -m scripts.identity_fields"


NAMES_IN_A_PROCESS = """
import sys
from pathlib import Path
from tests.engines.vllm.configs import with_kvtier
from scripts.identity_fields import make_config
from kvtier.engines.vllm.identity import make_model_identity

config = with_kvtier(make_config(Path(sys.argv[1])))
config.model_config.hf_overrides = {"sets": frozenset("abcdefgh")}
config.additional_config = {"b": {"z", "y", "x"}, "a": Path("/models")}
identity = make_model_identity(config)
print("NAME", identity.weights, identity.config_digest)
"""


def test_processes_with_other_hash_seeds_homes_and_hosts_give_one_name(tmp_path: Path) -> None:
    names = set()
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        others = {"HOME": str(tmp_path / seed), "PYTHONHASHSEED": seed, "HOSTNAME": f"host-{seed}"}
        others |= {"XDG_CACHE_HOME": str(tmp_path / seed / "cache"), "VLLM_HOST_IP": f"127.0.0.{seed}"}
        done = subprocess.run(
            [sys.executable, "-c", NAMES_IN_A_PROCESS, str(tmp_path / seed)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **others, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        names |= {line for line in done.stdout.splitlines() if line.startswith("NAME")} or {done.stderr}

    assert len(names) == 1
    assert names.pop().startswith("NAME random-weights-of-seed:0; draft random-weights-of-seed:0 ")


Change = Callable[[VllmConfig], None]


def set_to(name: str, value: object) -> Change:
    """Return a change that sets a field."""

    def change(config: VllmConfig) -> None:
        *sections, field = name.split(".")
        object.__setattr__(functools.reduce(getattr, sections, config), field, value)

    return change


FOUND_WRONG: dict[str, Change] = {
    "mm_processor_kwargs": set_to(
        "model_config.multimodal_config.mm_processor_kwargs", {"do_normalize": False}
    ),
    "load_format": set_to("load_config.load_format", "pt"),
    "ignore_patterns": set_to("load_config.ignore_patterns", ["consolidated*"]),
    "model_loader_extra_config": set_to("load_config.model_loader_extra_config", {"enable": 1}),
    "quantization_config": set_to("model_config.quantization_config", {"linear": "fp8"}),
    "hf_overrides": set_to("model_config.hf_overrides", {"rope_theta": 5.0}),
    "model_impl": set_to("model_config.model_impl", "transformers"),
    "attention backend": set_to("attention_config.backend", "FLASH_ATTN"),
    "activations of experts in fewer bits": set_to("kernel_config.moe_backend", "marlin"),
    "a field of a later release": set_to("diffusion_config", {"steps": 2}),
}


@pytest.mark.parametrize("change", FOUND_WRONG.values(), ids=FOUND_WRONG)
def test_what_once_led_to_wrong_answers_separates(whole: VllmConfig, change: Change) -> None:
    config = copy.deepcopy(whole)
    change(config)

    # The configuration alone: bytes that a change leaves unread have another name anyway.
    assert names_of(config)[0] != names_of(whole)[0]


ROPES: dict[str, tuple[dict[str, object], bool]] = {
    "plain": ({"rope_type": "default"}, False),
    "linear": ({"rope_type": "linear", "factor": 2.0}, False),
    "longrope": ({"rope_type": "longrope", "factor": 2.0}, True),
    "longrope under its old name": ({"type": "su", "factor": 2.0}, True),
    "dynamic NTK": ({"rope_type": "dynamic", "factor": 2.0}, True),
    "by layer": ({"full_attention": {"rope_type": "longrope"}}, True),
}


@pytest.mark.parametrize(("rope", "counts"), ROPES.values(), ids=ROPES)
def test_the_longest_request_counts_where_it_decides_how_keys_are_rotated(
    whole: VllmConfig, rope: dict[str, object], counts: bool
) -> None:
    short = copy.deepcopy(whole)
    short.model_config.hf_config.rope_parameters = rope
    long = copy.deepcopy(short)
    long.model_config.max_model_len = 2 * short.model_config.max_model_len

    assert (names_of(short) != names_of(long)) is counts


@pytest.mark.parametrize("field", ["max_model_len", "generation_config"])
def test_what_decides_how_llama_4_attends_counts_for_it(whole: VllmConfig, field: str) -> None:
    plain = copy.deepcopy(whole)
    plain.model_config.hf_config.text_config = {"attn_temperature_tuning": True}
    other = copy.deepcopy(plain)
    set_to(f"model_config.{field}", 65536)(other)

    assert names_of(plain) != names_of(other)


def test_activations_quantised_as_they_come_are_no_rope_by_length(whole: VllmConfig) -> None:
    short = copy.deepcopy(whole)
    short.model_config.hf_config.quantization_config = {"activation_scheme": "dynamic", "dynamic": {}}
    long = copy.deepcopy(short)
    long.model_config.max_model_len *= 2

    assert names_of(short) == names_of(long)


@pytest.mark.parametrize(
    ("method", "is_alone"), [("ngram", True), ("ngram_gpu", True), ("suffix", True), ("mtp", False)]
)
def test_drafts_without_weights_are_no_part_of_the_name(
    whole: VllmConfig, method: str, is_alone: bool
) -> None:
    alone, drafting = copy.deepcopy(whole), copy.deepcopy(whole)
    set_to("speculative_config", None)(alone)
    set_to("speculative_config.method", method)(drafting)

    assert (names_of(alone) == names_of(drafting)) is is_alone


def test_the_seed_counts_for_random_weights_alone(whole: VllmConfig) -> None:
    other = copy.deepcopy(whole)
    other.model_config.seed += 1

    assert make_model_identity(other).config_digest == make_model_identity(whole).config_digest
    assert make_model_identity(other).weights != make_model_identity(whole).weights


UNSTABLE: dict[str, object] = {
    "a function": lambda config: config,
    "an object": SimpleNamespace(a=1),
    "within a list": [1, {"a": object()}],
    "keys with one text": {1: "a", "1": "b"},
}


@pytest.mark.parametrize("value", UNSTABLE.values(), ids=UNSTABLE)
def test_a_value_without_a_stable_form_leaves_the_engine_its_own_blocks(
    whole: VllmConfig, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_kvtier(whole, secondary_tiers=[{"type": "fs"}])
    config.model_config.hf_overrides = value
    config.additional_config = value
    first = make_model_identity(config, outlives_engine=True)
    (line,) = caplog.messages
    second = make_model_identity(config, outlives_engine=True)

    assert first.config_digest != second.config_digest
    assert "0x" not in first.config_json
    assert line.startswith("model_config.hf_overrides, additional_config: ")


def test_a_models_own_code_may_fail_to_describe_its_configuration(whole: VllmConfig) -> None:
    class Broken:
        """A configuration of a model's own code."""

        def to_dict(self) -> dict[str, object]:
            """Fail as any code may."""
            raise AttributeError("no")

    config = copy.deepcopy(whole)
    config.model_config.hf_config = Broken()

    assert name_fields(config).unstable == ["model_config.hf_config"]
    assert "model_config.max_model_len" in name_fields(config).words


TOKEN = "hf_TOPSECRET"  # noqa: S105 - made up
URL = f"s3://KEY:{TOKEN}@bucket/model?X-Amz-Signature={TOKEN}"

CREDENTIALS: dict[str, Change] = {
    "hf_token": set_to("model_config.hf_token", TOKEN),
    "the model's URL": set_to("model_config.model_weights", URL),
    "the draft's URL": set_to("speculative_config.model", URL),
    "a loader's settings": set_to(
        "load_config.model_loader_extra_config",
        {
            "s3_access_key_id": TOKEN,
            "s3_secret_access_key": TOKEN,
            "nested": [{"sessionToken": TOKEN}],
            "uri": URL,
        },
    ),
    "a platform's settings": set_to("additional_config", {"token": TOKEN, "of": f"KEY:{TOKEN}@bucket"}),
    "an image processor's": set_to(
        "model_config.multimodal_config.mm_processor_kwargs", {"password": TOKEN, "from": URL}
    ),
    "another connector's": set_to("kv_transfer_config.kv_connector_extra_config", {"tenant_salt": TOKEN}),
}


@pytest.mark.parametrize("change", CREDENTIALS.values(), ids=CREDENTIALS)
def test_credentials_are_nowhere(whole: VllmConfig, change: Change, caplog: pytest.LogCaptureFixture) -> None:
    config = copy.deepcopy(whole)
    change(config)

    assert TOKEN not in repr(make_model_identity(config))
    assert TOKEN not in caplog.text


def test_another_credential_is_the_same_name(whole: VllmConfig) -> None:
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    for config, key in ((first, "a"), (second, "b")):
        config.load_config.model_loader_extra_config = {"s3_access_key_id": key, "concurrency": 4}

    assert names_of(first) == names_of(second) != names_of(whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/model", "s3://bucket/model"),
        ("https://user:pa/ss@host/a?key=b#c", "https://host/a"),
        ("/models/with:colon", "/models/with:colon"),
        ("org/model", "org/model"),
        ("AKIA:SECRET@bucket", "bucket"),
    ],
)
def test_a_url_loses_what_may_be_a_credential_and_nothing_else(text: str, expected: str) -> None:
    assert without_credentials(text) == expected


@pytest.mark.parametrize(
    "key", ["bos_token_id", "image_token", "max_tokens", "tokenizer_class", "num_key_value_heads", "author"]
)
def test_a_models_own_entries_are_no_credentials(key: str) -> None:
    assert not SECRET_KEY.search(key)


def test_what_changes_nothing_in_a_models_configuration_does_not_count_wherever_it_stands(
    whole: VllmConfig,
) -> None:
    configs = [copy.deepcopy(whole) for _ in range(3)]
    for config, release, size in zip(configs, ("5.0", "5.1", "5.1"), (1, 1, 2), strict=True):
        config.model_config.hf_config.text_config = {
            "hidden_size": size,
            "transformers_version": release,
            "_name_or_path": release,
        }

    assert names_of(configs[0]) == names_of(configs[1]) != names_of(configs[2])


def test_a_value_that_is_no_models_configuration_keeps_all_its_entries() -> None:
    assert canonical({"name_or_path": "a"}) == {"name_or_path": "a"}


def test_images_are_a_section_of_its_own(whole: VllmConfig) -> None:
    text = copy.deepcopy(whole)
    text.model_config.multimodal_config = None

    assert names_of(text) != names_of(whole)
    text.model_config.multimodal_config = MultiModalConfig()
    assert names_of(text) == names_of(whole)
