"""A look sees every change that torch counts, and none that a model's own passes make."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.transformers.conftest import make_llama
from tests.engines.transformers.tiny_models import build_tiny_model, list_model_types
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers.config import EngineConfig
from kvtier.engines.transformers.identity import ModelNamer
from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.engines.transformers.model_checks import require_shareable_prefixes
from kvtier.engines.transformers.model_facts import (
    find_departures,
    read_facts,
    read_usual_facts,
)
from kvtier.engines.transformers.model_watch import ModelLook, TensorLook
from kvtier.errors import ModelError

ORIGINAL_LENGTH = 16

ROPES: dict[str, dict[str, object]] = {
    "longrope": {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 2.0},
}

CHANGES_ITSELF = {"big_bird"}
"""Architectures whose first short pass replaces their attention for good."""

FEW = ["bloom", "gemma3_text", "gpt2", "mamba2", "mixtral", "opt"]


def test_a_tensor_whose_memory_is_another_s_is_seen_though_it_lies_at_the_same_address() -> None:
    weight = torch.nn.Parameter(torch.randn(1000))
    look = TensorLook(weight)
    address = weight.untyped_storage()._cdata
    for _ in range(8):  # until the allocator returns to the address, if ever
        weight.data = weight.data.half()
        weight.data = weight.data.float()
        assert not look.is_same(weight)
        if weight.untyped_storage()._cdata == address:
            break


def test_a_tensor_that_took_the_object_of_another_is_seen() -> None:
    module = torch.nn.Linear(8, 8)
    look = TensorLook(module.weight)
    for _ in range(8):
        module.weight = torch.nn.Parameter(torch.zeros(8, 8))
        assert not look.is_same(module.weight)


def test_a_look_keeps_no_weight_alive() -> None:
    model = make_llama()
    look = TensorLook(model.lm_head.weight)
    watched = ModelLook(model)
    del model.lm_head
    assert not look.is_unchanged()
    assert watched.has_changed()


def test_a_tensor_of_inference_mode_is_looked_at_by_its_object(llama: LlamaForCausalLM) -> None:
    model = copy.deepcopy(llama)
    with torch.inference_mode():
        model.lm_head.weight = torch.nn.Parameter(torch.ones(97, 48), requires_grad=False)
    look = ModelLook(model)
    assert not look.has_changed()
    model.lm_head.weight = torch.nn.Parameter(torch.ones(97, 48))
    assert look.has_changed()


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_a_rope_changes_with_the_length_are_not_changes_of_the_model(rope: str) -> None:
    parameters = ROPES[rope] | {"rope_type": rope, "rope_theta": 100.0}
    model = make_llama(rope_parameters=parameters, max_position_embeddings=ORIGINAL_LENGTH)
    adapter = ModelAdapter(model)
    look, namer = ModelLook(model), ModelNamer(adapter, EngineConfig(8))
    name = namer.name()
    for length in (4, 40, 60, 4):
        with torch.no_grad():
            model(torch.ones(1, length, dtype=torch.long))
        assert namer.name() == name
    assert name == ModelNamer(ModelAdapter(copy.deepcopy(model)), EngineConfig(8)).name()
    assert look.changed_names() == frozenset()


class Counting(torch.nn.Module):
    """Counts its passes in an attribute and in a buffer, and keeps what it has computed."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.num_passes = 0
        self.register_buffer("seen", torch.zeros(1))
        self.latest: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute what the inner module does."""
        self.num_passes += 1
        self.get_buffer("seen").add_(hidden.shape[1])
        result: torch.Tensor = self.inner(hidden)
        self.latest = result
        return result


def test_what_a_model_s_own_passes_change_is_neither_named_nor_a_change(
    prompt: list[int],
    make_engine: Any,  # noqa: ANN401 - the fixture's type is another module's
    tmp_path: Path,
) -> None:
    model: Any = make_llama()
    model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": "2MiB", "secondary_tiers": [tier]}
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, 1)
    assert engine.run(prompt, 1).sources == {"device": 72, "computed": 3}
    engine.shutdown()
    # The next engine's model has counted more passes.
    assert make_engine(model, extra_config=settings).run(prompt, 1).sources == {"fs": 72, "computed": 3}


class Growing(torch.nn.Module):
    """Keeps a table as long as the longest sequence, as rotary modules of some checkpoints do."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.num_cached = 16
        self.table = torch.zeros(16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute what the inner module does."""
        if hidden.shape[1] > self.num_cached:
            self.num_cached = 2 * hidden.shape[1]
            self.table = torch.zeros(self.num_cached)
            self.register_buffer("mask", self.table + 1, persistent=False)
        result: torch.Tensor = self.inner(hidden)
        return result


def test_a_table_that_grows_with_the_longest_prompt_is_no_change_and_a_weight_then_is_one(
    prompt: list[int],
    make_engine: Any,  # noqa: ANN401 - the fixture's type is another module's
) -> None:
    model: Any = make_llama()
    model.model.layers[0].mlp = Growing(model.model.layers[0].mlp)
    engine = make_engine(model, extra_config={"cpu_bytes_to_use": "2MiB"}, prefill_chunk_tokens=512)
    engine.run(prompt[:20], 1)
    engine.run(prompt, 1)
    assert engine.run(prompt, 1).sources == {"device": 72, "computed": 3}
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert engine.run(prompt, 1).sources == {"computed": 75}


def assert_as_made(model_type: str) -> None:
    """Assert that a model departs from its class in nothing, and that its passes change nothing."""
    model: PreTrainedModel = build_tiny_model(model_type)
    adapter = ModelAdapter(model)
    look = ModelLook(model)
    require_shareable_prefixes(adapter)
    unread = look.changed_names()
    found = read_facts(model, unread)
    assert not found.nameless, model_type
    assert not found.own_code, model_type
    if model_type not in CHANGES_ITSELF:
        assert not find_departures(found.facts, read_usual_facts(model, unread)), model_type


@pytest.mark.parametrize("model_type", FEW)
def test_a_model_of_a_common_class_departs_from_it_in_nothing(model_type: str) -> None:
    assert_as_made(model_type)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_any_class_departs_from_it_in_nothing() -> None:
    tried = []
    for model_type in list_model_types():
        try:
            assert_as_made(model_type)
        except ModelError:
            continue  # not served
        tried.append(model_type)
    assert len(tried) > 80
