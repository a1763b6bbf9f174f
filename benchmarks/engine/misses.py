"""What it costs to know why tokens are missing: the record that a request begins with, as a share of its search.

A prompt of 512 blocks is searched for and begun, by new requests of the same prompt. Of its blocks host memory has all,
the first half, or none; the others were evicted from it, or never seen. The record says where each token comes from,
whether one is missing or not.
"""

import time
from collections.abc import Iterator, Sequence

from benchmarks.engine.steps import BLOCK_TOKENS, BenchBlocks, BenchRequest, BenchSpec, make_config
from benchmarks.harness.measurement import OURS, Bar, Better, Measurement
from benchmarks.harness.suite import Options
from kvtier.base import OffloadingManager, OffloadKey, ReqContext, make_offload_key
from kvtier.connector.request_records import RequestRecords
from kvtier.connector.request_state import RequestState
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager

PROMPT_BLOCKS = 512
NUM_REQUESTS = 200
NUM_ROUNDS, NUM_QUICK_ROUNDS = 50, 5
BAR_PERCENT = 1.0


class TimedRecords(RequestRecords):
    """Records that take the time of their part in the begin of a request. No load is begun.

    Attributes:
        num_found_tokens: tokens that a request would load.
        taken_s: seconds so far, the reading of the clock not counted.
    """

    num_found_tokens = 0
    taken_s = 0.0

    def on_begun(self, state: RequestState, num_external_tokens: int) -> None:
        """Record the begin of a request that loads what was found, and take the time."""
        clock = time.perf_counter
        begun_s = clock()
        super().on_begun(state, num_external_tokens or self.num_found_tokens)
        ended_s = clock()
        self.taken_s += (ended_s - begun_s) - (clock() - ended_s)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield the share of the record by what host memory has of the prompt."""
    for has, num_held, is_evicted in (
        ("all", PROMPT_BLOCKS, False),
        ("half, the rest was evicted", PROMPT_BLOCKS // 2, True),
        ("half, the rest was never seen", PROMPT_BLOCKS // 2, False),
        ("none, all was evicted", 0, True),
    ):
        manager = make_manager(num_held, is_evicted=is_evicted)
        half = OffloadingConnectorScheduler(BenchSpec(make_config(), manager))
        records = half.records = TimedRecords(half.layouts, manager)
        num_rounds = NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS
        records.num_found_tokens = num_held * BLOCK_TOKENS
        serve(half, num_held)
        shares, times_us = [], []
        for _ in range(num_rounds):
            records.taken_s = 0.0
            search_s = serve(half, num_held)
            shares.append(100 * records.taken_s / search_s)
            times_us.append(1e6 * records.taken_s / NUM_REQUESTS)
        labels: dict[str, str | int] = {"host memory has": has}
        yield Measurement(labels | {"record": "time"}, "us", Better.LOWER, {OURS: tuple(times_us)})
        share = {OURS: tuple(shares)}
        labels |= {"record": "share of the search"}
        yield Measurement(labels, "%", Better.LOWER, share, Bar(None, BAR_PERCENT))


def make_manager(num_held: int, *, is_evicted: bool) -> OffloadingManager:
    """Return host memory with the first blocks of the prompt, from which the others were evicted or never came."""
    held, others = keys_of(0)[:num_held], keys_of(0)[num_held:]
    manager = CPUOffloadingManager(PROMPT_BLOCKS)
    if is_evicted:
        store(manager, others)
    store(manager, held)
    store(manager, keys_of(1)[: PROMPT_BLOCKS - len(held)])
    return manager


def store(manager: OffloadingManager, keys: Sequence[OffloadKey]) -> None:
    """Store blocks."""
    context = ReqContext("before")
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)


def keys_of(prompt: int) -> list[OffloadKey]:
    """Return the keys of a prompt."""
    return [make_offload_key(block_hash, 0) for block_hash in hashes_of(prompt)]


def hashes_of(prompt: int) -> list[bytes]:
    """Return the content hashes of a prompt's blocks."""
    return [prompt.to_bytes(16, "big") + block.to_bytes(16, "big") for block in range(PROMPT_BLOCKS)]


def serve(half: OffloadingConnectorScheduler, num_held: int) -> float:
    """Search for, begin and abort requests of the first prompt; return the seconds of their searches."""
    search_s, hashes, blocks = 0.0, hashes_of(0), BenchBlocks([])
    for number in range(NUM_REQUESTS):
        request = BenchRequest(f"request-{number}", PROMPT_BLOCKS * BLOCK_TOKENS + 1, hashes)
        begun_s = time.perf_counter()
        num_found, _ = half.get_num_new_matched_tokens(request, 0)
        search_s += time.perf_counter() - begun_s
        if num_found != num_held * BLOCK_TOKENS:
            raise RuntimeError(f"{num_found} tokens were found, not {num_held * BLOCK_TOKENS}")
        half.update_state_after_alloc(request, blocks, 0)
        half.request_finished(request)
    return search_s
