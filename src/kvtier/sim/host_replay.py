"""What clients say with the requests of a replayed trace, where the trace tells how turns ended.

It guesses nothing that a client could not know by the rule that is chosen. A turn goes on the latest one whose whole
prompt begins its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvtier.base import OffloadingManager, OffloadKey, ReqContext
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.errors import ConfigError
from kvtier.sim.trace import BlockKeys, StopReason, Trace, TraceRequest

STOPS = {StopReason.TOOL_USE: "tool_use", StopReason.END_TURN: "end_turn"}


class ClientHints(Enum):
    """What clients know when they send a request."""

    NONE = "none"
    """They say nothing."""

    AS_LAST_TURN = "as_last_turn"
    """They expect this turn to end as their last one did; nothing of a first turn, and nothing of lengths."""

    FORESEEN = "foreseen"
    """They know how this turn will end and how long its answer will be: a bound on what hints can do."""


class Clients:
    """The clients of a trace.

    Args:
        known: what they know.
    """

    def __init__(self, known: ClientHints) -> None:
        self._known = known
        self._stop_after: dict[int, StopReason] = {}

    def hints_of(self, request: TraceRequest) -> dict[str, Any] | None:  # Any: the type of kv_transfer_params
        """Return what is said with a request, None for nothing; requests come in the order of their arrival."""
        if self._known is ClientHints.NONE:
            return None
        if self._known is ClientHints.FORESEEN:
            return _said(request.stop) | {"expected_output_tokens": request.num_output_tokens}
        before = next((each for each in reversed(request.hash_ids) if each in self._stop_after), None)
        hints = _said(StopReason.UNKNOWN if before is None else self._stop_after[before])
        if request.hash_ids:
            self._stop_after[request.hash_ids[-1]] = request.stop
        return hints


def _said(stop: StopReason) -> dict[str, Any]:  # Any: the type of kv_transfer_params
    return {"expected_stop": STOPS[stop]} if stop in STOPS else {}


class TouchOrder(Enum):
    """How the blocks of one request are ranked, the last named being the most recent."""

    TAIL_FIRST = "tail_first"
    """Touches and stores from the tail to the head: the head ends up most recent."""

    STORES_HEAD_FIRST = "stores_head_first"
    """Touches from the tail, stores from the head and above them."""

    HEAD_FIRST = "head_first"
    """Touches and stores from the head: the tail ends up most recent."""


@dataclass(frozen=True, slots=True)
class HostCache:
    """The primary tier that a trace is replayed through.

    Attributes:
        num_blocks: its capacity.
        cache_policy: registered name of the eviction policy.
        touch_order: how the blocks of one request are ranked.
        store_threshold: accesses of a key before it is stored; below 2 every key is.
        max_tracker_size: keys whose accesses the reuse filter counts.
        chunk_blocks: blocks of a prompt that are stored at a time; None for all of them.
        client_hints: what clients say of their requests.
    """

    num_blocks: int
    cache_policy: str = "lru"
    touch_order: TouchOrder = TouchOrder.TAIL_FIRST
    store_threshold: int = 1
    max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE
    chunk_blocks: int | None = None
    client_hints: ClientHints = ClientHints.NONE


@dataclass(frozen=True, slots=True)
class HostReplay:
    """What a replay has found.

    Attributes:
        num_requests: requests replayed.
        num_accesses: blocks they named, repeats included.
        num_unique_blocks: distinct blocks they named.
        num_hits: blocks of held prefixes.
        num_stored: blocks written to the host.
        num_evicted: blocks that left it.
    """

    num_requests: int
    num_accesses: int
    num_unique_blocks: int
    num_hits: int
    num_stored: int
    num_evicted: int

    @property
    def hit_ratio(self) -> float:
        """Blocks of held prefixes over all blocks named, from 0 to 1."""
        return self.num_hits / self.num_accesses if self.num_accesses else 0.0

    @property
    def writes_per_unique_block(self) -> float:
        """How often a block was written on average."""
        return self.num_stored / self.num_unique_blocks if self.num_unique_blocks else 0.0


def blocks_of_share(trace: Trace, share: float) -> int:
    """Return a capacity of ``share`` of the trace's unique blocks, rounded to the nearest block, at least one.

    Raises:
        ConfigError: ``share`` is no finite number above zero.
    """
    if not 0 < share < float("inf"):
        raise ConfigError("share", share, "a capacity is a fraction of the unique blocks above zero")
    return max(1, round(share * trace.num_unique_blocks))


def replay_host(trace: Trace, cache: HostCache, on_request: Callable[[], object] | None = None) -> HostReplay:
    """Replay ``trace`` through ``cache`` by the rules above.

    Args:
        trace: the requests.
        cache: the primary tier; it begins empty.
        on_request: called after each request, for a progress bar.

    Raises:
        ConfigError: the capacity or a chunk is below one block.
        UnknownNameError: there is no such policy.
    """
    if cache.chunk_blocks is not None and cache.chunk_blocks < 1:
        raise ConfigError("chunk_blocks", cache.chunk_blocks, "a chunk has at least one block")
    now_s = 0.0
    manager = CPUOffloadingManager(
        cache.num_blocks,
        cache.cache_policy,
        store_threshold=cache.store_threshold,
        max_tracker_size=cache.max_tracker_size,
        clock=lambda: now_s,
    )
    block_keys, clients = BlockKeys(), Clients(cache.client_hints)
    num_hits = 0
    for number, request in enumerate(trace.requests):
        now_s = request.arrival_s
        context = ReqContext(str(number), clients.hints_of(request))
        num_hits += serve(
            manager, block_keys.of(request.hash_ids), context, cache.touch_order, cache.chunk_blocks
        )
        if on_request is not None:
            on_request()
    stats = manager.stats()
    return HostReplay(
        num_requests=len(trace.requests),
        num_accesses=trace.num_accesses,
        num_unique_blocks=trace.num_unique_blocks,
        num_hits=num_hits,
        num_stored=int(stats["primary.stored"]),
        num_evicted=int(stats["primary.evicted"]),
    )


def serve(
    manager: CPUOffloadingManager,
    keys: list[OffloadKey],
    context: ReqContext,
    order: TouchOrder,
    chunk_blocks: int | None = None,
) -> int:
    """Serve one request by the rules above and return the length of its held prefix."""
    manager.note_request([keys], context)
    answers = [manager.lookup(key, context) for key in keys]
    held = [key for key, is_held in zip(keys, answers, strict=True) if is_held]
    missing = {key for key, is_held in zip(keys, answers, strict=True) if not is_held}
    manager.prepare_load(held, context)
    manager.touch(keys[::-1] if order is TouchOrder.HEAD_FIRST else keys, context)
    size = chunk_blocks or max(1, len(keys))
    for begin in range(0, len(keys) if missing else 0, size):
        stored = prepare_stores(
            manager, [key for key in keys[begin : begin + size] if key in missing], context
        )
        if order is TouchOrder.TAIL_FIRST:
            manager.touch(keys[: begin + size], context)
        manager.complete_store(stored, context)
    manager.complete_load(held, context)
    manager.request_finished(context)
    return answers.index(False) if missing else len(keys)


def prepare_stores(
    manager: OffloadingManager, missing: list[OffloadKey], context: ReqContext
) -> list[OffloadKey]:
    """Reserve slots for ``missing``, head to tail, as far as they fit, and return the keys to write."""
    output = manager.prepare_store(missing, context)
    if output is not None:
        return output.keys_to_store
    stored: list[OffloadKey] = []
    for key in missing:
        output = manager.prepare_store([key], context)
        if output is None:
            break
        stored += output.keys_to_store
    return stored
