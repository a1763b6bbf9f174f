"""Replays a trace through host memory and the tiers behind it when transfers take no time: what capacity alone can do.

It has no device cache and no engine; time passes only from one arrival to the next, for deadlines and pauses. Each
tier is a SimulatedTier over a link that is practically infinite, behind the production ``TieringOffloadingManager``,
so cascades, promotions and write-back are its own. For each request, in the order of arrival:

1. The manager is told of it. Its prefix is searched as the connector searches it, again after each step, until the
   answer is known: what a tier has of it is promoted. The hits are the leading run that is then found; the host's are
   the run that it had before.
2. Blocks in host memory are pinned, all are touched, missing ones are stored head to tail as in ``host_replay``, all
   are touched once more so that the head ends up most recent, the writes complete and the pins end.
3. Steps are made until every cascade has ended.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from kvtier.base import OffloadKey, ReqContext
from kvtier.connector.prefix_search import maximal_prefix_lookup
from kvtier.sim.host_replay import prepare_stores
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.spec import SimulatedSpec
from kvtier.sim.timeline import Timeline
from kvtier.sim.trace import BlockKeys, Trace

NO_TIME = LinkSpeed(1e15, 1e15)
"""For the tiers of a replay: a block of one byte takes a femtosecond, so that no deadline passes during a transfer."""


@dataclass(frozen=True, slots=True)
class ChainReplay:
    """What a replay has found.

    Attributes:
        num_accesses: blocks that the requests named, repeats included.
        num_unique_blocks: distinct ones.
        num_hits: blocks of prefixes found in host memory or behind it.
        num_host_hits: blocks of prefixes that host memory had by itself.
        written_blocks: blocks written to each tier, by its name.
        read_blocks: blocks promoted from each tier, by its name.
    """

    num_accesses: int
    num_unique_blocks: int
    num_hits: int
    num_host_hits: int
    written_blocks: dict[str, int]
    read_blocks: dict[str, int]

    @property
    def hit_ratio(self) -> float:
        """Blocks of found prefixes over all blocks named, from 0 to 1."""
        return self.num_hits / self.num_accesses if self.num_accesses else 0.0

    @property
    def host_hit_ratio(self) -> float:
        """The same for what host memory had by itself."""
        return self.num_host_hits / self.num_accesses if self.num_accesses else 0.0

    def writes_per_unique_block(self, tier: str) -> float:
        """Return how often a block was written to ``tier`` on average."""
        return self.written_blocks[tier] / self.num_unique_blocks if self.num_unique_blocks else 0.0


def replay_chain(
    trace: Trace, host: HostModel, on_request: Callable[[], object] | None = None
) -> ChainReplay:
    """Replay ``trace`` through ``host`` and its tiers by the rules above.

    Args:
        trace: the requests.
        host: host memory and the chain behind it; give the tiers the speed NO_TIME.
        on_request: called after each request, for a progress bar.
    """
    chain = _Chain(trace, host)
    block_keys = BlockKeys()
    for number, request in enumerate(trace.requests):
        chain.serve(block_keys.of(request.hash_ids), ReqContext(str(number)), request.arrival_s)
        if on_request is not None:
            on_request()
    named = list(zip([model.name for model in host.tiers], chain.spec.tiers, strict=True))
    return ChainReplay(
        trace.num_accesses,
        trace.num_unique_blocks,
        chain.num_hits,
        chain.num_host_hits,
        {name: tier.num_written_blocks for name, tier in named},
        {name: tier.num_read_blocks for name, tier in named},
    )


class _Chain:
    """Host memory and the tiers behind it, in the middle of a replay.

    Attributes:
        spec: the managers.
        num_hits: blocks of found prefixes so far.
        num_host_hits: those that host memory had by itself.
    """

    def __init__(self, trace: Trace, host: HostModel) -> None:
        self._timeline = Timeline()
        self._is_woken = False
        engine = EngineModel(trace.block_tokens, block_bytes=1, num_device_blocks=1)
        self.spec = SimulatedSpec(engine, host, self._timeline, self._wake, trace.num_unique_blocks)
        self._manager = self.spec.get_manager()
        self.num_hits = 0
        self.num_host_hits = 0

    def serve(self, keys: list[OffloadKey], context: ReqContext, arrival_s: float) -> None:
        """Serve one request."""
        manager, is_ready = self._manager, self._manager.primary.is_ready
        self._timeline.advance_to(arrival_s)
        manager.end_step()
        manager.note_request([keys], context)
        self.num_host_hits += sum(1 for _ in takewhile(is_ready, keys))
        self.num_hits += self._search(keys, context)
        held = [key for key in keys if is_ready(key)]
        missing = [key for key in keys if not is_ready(key)]
        manager.prepare_load(held, context)
        manager.touch(keys, context)
        if missing:
            stored = prepare_stores(manager, missing, context)
            manager.touch(keys, context)
            manager.complete_store(stored, context)
        manager.complete_load(held, context)
        manager.request_finished(context)
        while self._step():
            pass

    def _search(self, keys: list[OffloadKey], context: ReqContext) -> int:
        while (num_found := maximal_prefix_lookup(self._manager, keys, context)) is None:
            self._step()
        return num_found

    def _step(self) -> bool:
        """End a step and let its transfers end; return whether there were any."""
        self._is_woken = False
        self._manager.end_step()
        while self._timeline.next_s is not None:
            self._timeline.advance_to(self._timeline.next_s)
        return self._is_woken

    def _wake(self) -> None:
        self._is_woken = True
