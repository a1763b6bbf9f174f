"""Replays a trace through the primary tier alone, without time: which prefixes would have been found.

There is no device cache and no transfer; the clock shows the requests' arrival times. Each request finds the host as
the last one left it, and cold starts count. ``CPUOffloadingManager`` and its registered policy are driven with the
calls of the connector, except after a refusal: the connector halves what it offers and retries in the next step, the
replay continues block by block. For each request, in the order of arrival:

0. The manager is notified of the request, for policies that learn from requests, with its hints (``client_hints``; by
   default none).
1. Each block of the request is looked up. The hits are p, the length of the leading run that is held.
2. Held blocks are pinned, also those behind the first miss, and all blocks are touched.
3. Missing blocks are stored from head to tail: in one call, and when the manager has no room for all of them block by
   block until the first refusal. Then the writes complete and the pins end. With ``chunk_blocks`` this is done for so
   many blocks of the prompt at a time, like an engine that computes a long prompt in steps.

The prefix hit ratio is the sum of p over the number of all accessed blocks. A capacity given as a fraction of the
unique blocks is rounded to the nearest block, half to even. Of one request the tail leaves first: a touch makes its
first key the most recent, but stores rank in the order of the call, so the request's keys are touched once more after
its stores, as the connector does. That is before the writes complete: for policies that count uses, a touch of a write
in flight is still the first use.
"""

from dataclasses import dataclass

from kvtier.base import OffloadingManager, OffloadKey, ReqContext
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.errors import ConfigError
from kvtier.sim.clients import EXACT, ClientHints, Clients, HintNoise
from kvtier.sim.trace import BlockKeys, Trace


@dataclass(frozen=True, slots=True)
class HostCache:
    """The primary tier of a replay.

    Attributes:
        num_blocks: its capacity.
        cache_policy: registered name of the eviction policy.
        store_threshold: accesses of a key before it is stored; below 2 every key is.
        max_tracker_size: keys whose accesses the reuse filter counts.
        chunk_blocks: blocks of a prompt that are stored at a time; None: all.
        client_hints: which hints clients send.
        hint_noise: how wrong they are.
    """

    num_blocks: int
    cache_policy: str = "lru"
    store_threshold: int = 1
    max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE
    chunk_blocks: int | None = None
    client_hints: ClientHints = ClientHints.NONE
    hint_noise: HintNoise = EXACT


@dataclass(frozen=True, slots=True)
class HostReplay:
    """Result of a replay.

    Attributes:
        num_requests: replayed requests.
        num_accesses: accessed blocks, repeats included.
        num_unique_blocks: distinct accessed blocks.
        num_hits: blocks of held prefixes.
        num_stored: blocks written to the host.
        num_evicted: blocks evicted from it.
    """

    num_requests: int
    num_accesses: int
    num_unique_blocks: int
    num_hits: int
    num_stored: int
    num_evicted: int

    @property
    def hit_ratio(self) -> float:
        """Blocks of held prefixes over all accessed blocks, from 0 to 1."""
        return self.num_hits / self.num_accesses if self.num_accesses else 0.0

    @property
    def writes_per_unique_block(self) -> float:
        """How often a block was written on average."""
        return self.num_stored / self.num_unique_blocks if self.num_unique_blocks else 0.0


def blocks_of_share(trace: Trace, share: float) -> int:
    """Return a capacity of ``share`` of the trace's unique blocks, rounded to the nearest block, at least one.

    Raises:
        ConfigError: ``share`` is not a finite number above zero.
    """
    if not 0 < share < float("inf"):
        raise ConfigError(
            "share", share, "must be a finite number above zero, as a share of the unique blocks"
        )
    return max(1, round(share * trace.num_unique_blocks))


def replay_host(trace: Trace, cache: HostCache) -> HostReplay:
    """Replay ``trace`` through ``cache`` by the rules above.

    Args:
        trace: the requests.
        cache: the primary tier; it starts empty.

    Raises:
        ConfigError: the capacity or a chunk is below one block.
        UnknownNameError: the policy does not exist.
    """
    if cache.chunk_blocks is not None and cache.chunk_blocks < 1:
        raise ConfigError("chunk_blocks", cache.chunk_blocks, "must be at least 1")
    now_s = 0.0
    manager = CPUOffloadingManager(
        cache.num_blocks,
        cache.cache_policy,
        store_threshold=cache.store_threshold,
        max_tracker_size=cache.max_tracker_size,
        clock=lambda: now_s,
    )
    block_keys, clients = BlockKeys(), Clients(cache.client_hints, trace, cache.hint_noise)
    num_hits = 0
    for number, request in enumerate(trace.requests):
        now_s = request.arrival_s
        context = ReqContext(str(number), clients.hints_of(request, number))
        num_hits += serve(manager, block_keys.of(request.hash_ids), context, cache.chunk_blocks)
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
    chunk_blocks: int | None = None,
) -> int:
    """Serve one request by the rules above and return the length of its held prefix."""
    manager.note_request([keys], context)
    answers = [manager.lookup(key, context) for key in keys]
    held = [key for key, is_held in zip(keys, answers, strict=True) if is_held]
    missing = {key for key, is_held in zip(keys, answers, strict=True) if not is_held}
    manager.prepare_load(held, context)
    manager.touch(keys, context)
    size = chunk_blocks or max(1, len(keys))
    for begin in range(0, len(keys) if missing else 0, size):
        stored = prepare_stores(
            manager, [key for key in keys[begin : begin + size] if key in missing], context
        )
        manager.touch(keys[: begin + size], context)
        manager.complete_store(stored, context)
    manager.complete_load(held, context)
    manager.request_finished(context)
    return answers.index(False) if missing else len(keys)


def prepare_stores(
    manager: OffloadingManager, missing: list[OffloadKey], context: ReqContext
) -> list[OffloadKey]:
    """Reserve slots for ``missing``, head to tail, as many as fit, and return the keys to write."""
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
