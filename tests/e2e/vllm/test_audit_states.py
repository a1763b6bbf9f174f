"""The audit of a real vLLM engine compares recurrent states: wrong ones are found, and none is kept pinned."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm.checkpoints import save_qwen3_next
from tests.e2e.vllm.engine_pool import EnginePool
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.recurrent import BLOCK_TOKENS, FOUND, GREEDY, PROMPTS, options_with

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)

STATE_GROUPS = (0, 1, 2)
"""Each has one layer."""

ATTENTION_GROUP = 3
CONVOLUTION_BYTES = 3_072
HIGH_BYTE = 4_000 * 4 + 3
"""A byte of sign and exponent of one number in a state, behind its convolution."""

NUM_STATES = sum(found > 0 for found in FOUND) * len(STATE_GROUPS)
NUM_BLOCKS = sum(FOUND) // BLOCK_TOKENS
"""What is held of the prompts: states, and blocks of attention."""

AUDITED = {"cpu_bytes_to_use": "256MiB", "audit_ratio": 1.0, "audit_limit": 10**9}
SAMPLED = {**AUDITED, "audit_ratio": 0.25, "audit_seed": 1}
MAX_HITS = 60
ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}
HELD = PROMPTS[:3]
"""The prompts whose states are made wrong, those of different lengths."""

ENDS = FOUND[:3]


def audit_of(engine: EngineProcess, before: dict[str, float] | None = None) -> dict[str, int]:
    """Return what came of the compared blocks since ``before``."""
    stats: dict[str, float] = engine.call("stats")
    names = ("requests", "equal_blocks", "close_blocks", "wrong_blocks", "lost_blocks")
    return {name: int(stats[f"audit.{name}"] - (before or {}).get(f"audit.{name}", 0)) for name in names}


def num_pinned(engine: EngineProcess) -> int:
    """Return how many blocks of host memory can neither be evicted nor are free."""
    stats = engine.call("stats")
    num_slots, _ = engine.call("host_rows")
    return int(num_slots - stats["primary.evictable_blocks"] - stats["primary.free_blocks"])


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_every_state_of_a_hit_is_compared_in_batches_and_chunks(
    qwen3_next: str, engines: EnginePool, *, is_asynchronous: bool
) -> None:
    options = options_with(qwen3_next, AUDITED, is_asynchronous=is_asynchronous)
    with engines.borrow(options) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
        for _ in range(2):
            engine.call("forget_device")
            engine.call("generate", PROMPTS, GREEDY)
            engine.call("settle")
        engine.call("check")
        audited = audit_of(engine)
        pinned = num_pinned(engine)

    assert audited["requests"] == 2 * sum(found > 0 for found in FOUND)
    assert audited["equal_blocks"] + audited["close_blocks"] == 2 * (NUM_STATES + NUM_BLOCKS)
    assert audited["wrong_blocks"] == audited["lost_blocks"] == pinned == 0


@pytest.fixture(scope="module")
def sampling_engine(qwen3_next: str) -> Iterator[EngineProcess]:
    """Return an engine that audits one hit in four."""
    with EngineProcess(options_with(qwen3_next, SAMPLED)) as engine:
        yield engine


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Return an engine with other weights, that holds the prompts."""
    model = save_qwen3_next(Path(tmp_path_factory.mktemp("other")), seed=8)
    with EngineProcess(options_with(str(model), {"cpu_bytes_to_use": "64MiB"})) as engine:
        engine.call("generate_in_turn", HELD, ONE_TOKEN)
        engine.call("settle")
        yield engine


def of_other_prompts(engine: EngineProcess, prompt: list[int], end: int, group: int) -> None:
    other = (HELD.index(prompt) + 1) % len(HELD)
    row = engine.call("held_bytes", HELD[other], ENDS[other] - 1, group)
    engine.call("plant_bytes", prompt, end - 1, row, group)


def with_layers_swapped(engine: EngineProcess, prompt: list[int], end: int, group: int) -> None:
    row = engine.call("held_bytes", prompt, end - 1, (group + 1) % len(STATE_GROUPS))
    engine.call("plant_bytes", prompt, end - 1, row, group)


def with_a_high_bit_flipped(engine: EngineProcess, prompt: list[int], end: int, group: int) -> None:
    engine.call("flip_held_byte", prompt, group, end - 1, HIGH_BYTE)


def with_a_high_bit_of_the_convolution_flipped(
    engine: EngineProcess, prompt: list[int], end: int, group: int
) -> None:
    engine.call("flip_held_byte", prompt, group, end - 1, 2 * 700 + 1)


def with_the_convolution_of_another_layer(
    engine: EngineProcess, prompt: list[int], end: int, group: int
) -> None:
    row = engine.call("held_bytes", prompt, end - 1, group)
    other = engine.call("held_bytes", prompt, end - 1, (group + 1) % len(STATE_GROUPS))
    engine.call("plant_bytes", prompt, end - 1, other[:CONVOLUTION_BYTES] + row[CONVOLUTION_BYTES:], group)


def zeroed(engine: EngineProcess, prompt: list[int], end: int, group: int) -> None:
    engine.call("zero_held_block", prompt, group, end - 1)


FAULTS = [
    of_other_prompts,
    with_layers_swapped,
    with_a_high_bit_flipped,
    with_a_high_bit_of_the_convolution_flipped,
    with_the_convolution_of_another_layer,
    zeroed,
]


def store(engine: EngineProcess) -> None:
    assert engine.call("reset")
    engine.call("generate", HELD, ONE_TOKEN)
    engine.call("settle")


def num_hits_until_found(engine: EngineProcess) -> int:
    """Ask for what is held until the audit finds a wrong block; return how many requests that took."""
    before = engine.call("stats")
    for num_hits in range(0, MAX_HITS, len(HELD)):
        if audit_of(engine, before)["wrong_blocks"]:
            return num_hits
        engine.call("forget_device")
        engine.call("generate", HELD, ONE_TOKEN)
        engine.call("settle")
    raise AssertionError(f"not found within {MAX_HITS} hits")


@pytest.mark.parametrize("group", STATE_GROUPS)
@pytest.mark.parametrize("plant", FAULTS)
def test_a_wrong_state_is_found_within_a_few_hits(
    sampling_engine: EngineProcess, plant: Callable[..., None], group: int
) -> None:
    store(sampling_engine)
    for prompt, end in zip(HELD, ENDS, strict=True):
        plant(sampling_engine, prompt, end, group)

    assert num_hits_until_found(sampling_engine) < MAX_HITS


def test_states_of_other_weights_are_found(
    sampling_engine: EngineProcess, other_engine: EngineProcess
) -> None:
    store(sampling_engine)
    for prompt, end in zip(HELD, ENDS, strict=True):
        row = other_engine.call("held_bytes", prompt, end - 1, STATE_GROUPS[0])
        sampling_engine.call("plant_bytes", prompt, end - 1, row, STATE_GROUPS[0])

    assert num_hits_until_found(sampling_engine) < MAX_HITS


def test_a_state_that_vllm_does_not_keep_is_counted_as_lost_and_unpinned(
    qwen3_next: str, engines: EnginePool
) -> None:
    """A longer prompt passes the end of the held one, where vLLM keeps no state of it."""
    with engines.borrow(options_with(qwen3_next, AUDITED)) as engine:
        engine.call("generate", PROMPTS[4:5], GREEDY)
        engine.call("settle")
        engine.call("forget_device")
        engine.call("generate", [PROMPTS[4][: FOUND[4]] + make_prompt(5, 900)], GREEDY)
        engine.call("settle")
        engine.call("check")
        audited = audit_of(engine)
        pinned = num_pinned(engine)

    assert audited["lost_blocks"] == len(STATE_GROUPS)
    assert audited["equal_blocks"] + audited["close_blocks"] == FOUND[4] // BLOCK_TOKENS
    assert pinned == 0


def test_an_abort_a_reset_and_pre_emptions_leave_no_state_pinned(qwen3_next: str) -> None:
    prompts = [make_prompt(300 + seed, 1010) for seed in range(6)]
    tight = options_with(qwen3_next, AUDITED, num_device_blocks=46)
    with EngineProcess(tight) as engine:
        engine.call("generate_in_turn", prompts, ONE_TOKEN)
        engine.call("settle")
        engine.call("forget_device")
        engine.call("generate", prompts, {"temperature": 0.0, "max_tokens": 40})
        engine.call("settle")
        num_preemptions = engine.call("num_preemptions")
        audited, after_preemption = audit_of(engine), num_pinned(engine)
        engine.call("forget_device")
        engine.call("abort_while_computing", prompts[0])
        after_abort = num_pinned(engine)
        engine.call("reset")
        engine.call("check")
        after_reset = num_pinned(engine)

    assert num_preemptions > 0
    assert audited["requests"] == len(prompts)
    assert audited["wrong_blocks"] == 0
    assert [after_preemption, after_abort, after_reset] == [0, 0, 0]
