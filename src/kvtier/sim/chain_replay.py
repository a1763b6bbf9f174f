"""Replays a trace through host memory and the tiers behind it, without time: what capacity and policies alone can do.

There is no device cache and no engine; time passes only from one arrival to the next, for deadlines and pauses. Each
tier is a SimulatedTier over a practically infinite link, behind the production ``TieringOffloadingManager``, which
cascades, promotes and writes back. For each request, in the order of arrival:

1. The manager is notified of it. Its prefix is searched as the connector searches it, again after each step, until the
   answer is final: blocks found in a tier are promoted. The hits are the leading run that is then found; the host's
   hits are the leading run that it held before.
2. Blocks in host memory are pinned, all are touched, missing ones are stored head to tail as in ``host_replay``, all
   are touched once more so that the head ends up most recent, the writes complete and the pins end.
3. Steps follow until every cascade has ended.
"""

from dataclasses import dataclass
from itertools import takewhile

from kvtier.base import OffloadKey, ReqContext
from kvtier.connector.prefix_search import maximal_prefix_lookup
from kvtier.sim.clients import Clients
from kvtier.sim.host_replay import prepare_stores
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.spec import SimulatedSpec
from kvtier.sim.timeline import Timeline
from kvtier.sim.trace import BlockKeys, Trace

NO_TIME = LinkSpeed(1e15, 1e15)
"""Speed of the tiers in a replay: a block of one byte takes a femtosecond, so no deadline passes during a transfer."""


@dataclass(frozen=True, slots=True)
class ChainReplay:
    """Result of a replay.

    Attributes:
        num_accesses: accessed blocks, repeats included.
        num_unique_blocks: distinct accessed blocks.
        num_hits: blocks of prefixes found in host memory or a tier.
        num_host_hits: blocks of prefixes found in host memory alone.
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
        """Blocks of found prefixes over all accessed blocks, from 0 to 1."""
        return self.num_hits / self.num_accesses if self.num_accesses else 0.0

    def writes_per_unique_block(self, tier: str) -> float:
        """Return how often a block was written to ``tier`` on average."""
        return self.written_blocks[tier] / self.num_unique_blocks if self.num_unique_blocks else 0.0


def replay_chain(trace: Trace, host: HostModel) -> ChainReplay:
    """Replay ``trace`` through ``host`` and its tiers by the rules above.

    Args:
        trace: the requests.
        host: host memory and the chain behind it; give the tiers the speed NO_TIME.
    """
    chain = _Chain(trace, host)
    block_keys, clients = BlockKeys(), Clients(host.client_hints, trace, host.hint_noise)
    for number, request in enumerate(trace.requests):
        context = ReqContext(str(number), clients.hints_of(request, number))
        chain.serve(block_keys.of(request.hash_ids), context, request.arrival_s)
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
    """Host memory and the tiers behind it, during a replay.

    Attributes:
        spec: the managers.
        num_hits: blocks of found prefixes so far.
        num_host_hits: those of them that host memory held by itself.
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
        """Serve the request with the blocks ``keys`` that arrives ``arrival_s`` seconds after the trace's start."""
        manager, is_ready = self._manager, self._manager.primary_tier.is_ready
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
        """End a step and its transfers; return whether there were any."""
        self._is_woken = False
        self._manager.end_step()
        while self._timeline.next_s is not None:
            self._timeline.advance_to(self._timeline.next_s)
        return self._is_woken

    def _wake(self) -> None:
        self._is_woken = True
