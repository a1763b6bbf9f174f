"""Tiny models whose answer depends on every block, and plain transformers to compare with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from tests.tiering.patience import be_patient
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers import EngineConfig, GenerationResult, KVTierEngine
from kvtier.misses import Miss, MissCause, RequestRecord

VOCABULARY = 97
"""Small, so that a wrong block changes the most likely token soon."""

INITIALIZER_RANGE = 0.2
"""Ten times transformers' own: with that, attention is nearly uniform and one block hardly matters."""

Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
MakeEngine = Callable[..., KVTierEngine]


def make_llama(seed: int = 0, **settings: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**cast("Any", sizes | settings)))


@dataclass(frozen=True)
class Tiny:
    """Builders of the models of these tests."""

    llama: Callable[..., LlamaForCausalLM] = make_llama

    def gpt2(self) -> GPT2LMHeadModel:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=512,
            initializer_range=INITIALIZER_RANGE,
            bos_token_id=None,
            eos_token_id=None,
        )
        return GPT2LMHeadModel(config)


def misses_of(engine: KVTierEngine) -> list[Miss]:
    """Return why blocks of the last request were computed, those of its end aside."""
    assert engine._halves is not None
    last: RequestRecord = engine._halves.scheduler.records.latest[-1]
    last.check()
    return [run.miss for run in last.missed if run.miss.cause is not MissCause.PARTIAL_BLOCK]


@pytest.fixture(autouse=True)
def patient_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long as the guards against hangs wherever a tier on a disk waits."""
    be_patient(monkeypatch.setattr)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread, and lose much when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture
def prompt() -> list[int]:
    """75 tokens: nine full blocks of eight, and three tokens more."""
    return make_prompt(0, 75)


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="session")
def prompt_of() -> Callable[[int, int], list[int]]:
    return make_prompt


@pytest.fixture(scope="session")
def plain() -> Plain:
    """Tokens and logits of ``model.generate`` without kvtier."""

    def generate(model: PreTrainedModel, token_ids: list[int], num_tokens: int) -> Expected:
        model.train(mode=False)
        output = cast("Any", model).generate(  # Any: the annotations of transformers do not fit its models
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences[0, len(token_ids) :].tolist(), torch.cat(output.logits)

    return generate


TOLERANCE = 1e-4
"""Largest difference of a float32 logit, against a spread of the logits of about 1.4. Measured: 3e-6."""


def logit_difference(result: GenerationResult, expected: Expected) -> float:
    """Return the largest difference, in tolerances."""
    assert result.logits is not None
    return float((result.logits - expected[1]).abs().max()) / TOLERANCE


@pytest.fixture(scope="session")
def difference() -> Callable[[GenerationResult, Expected], float]:
    return logit_difference


@pytest.fixture(scope="session")
def assert_same() -> Callable[[GenerationResult, Expected], None]:
    """Compares tokens exactly and logits within the tolerance."""

    def compare(result: GenerationResult, expected: Expected) -> None:
        assert result.tokens == expected[0]
        assert logit_difference(result, expected) < 1

    return compare


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Builds engines with eight-token blocks and shuts them down after the test."""
    engines: list[KVTierEngine] = []

    def make(model: PreTrainedModel, num_device_blocks: int = 32, **settings: object) -> KVTierEngine:
        options: dict[str, Any] = {"block_size_tokens": 8, "prefill_chunk_tokens": 32}
        parts = ("make_spec", "pause", "clock")
        more: dict[str, Any] = {name: settings.pop(name) for name in parts if name in settings}
        config = EngineConfig(num_device_blocks=num_device_blocks, **(options | settings))
        engine = KVTierEngine(model, config, **more)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()
