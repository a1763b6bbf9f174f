"""Evaluates mixes of tiers on a trace, without time (what capacity alone can do) or on simulated time.

Without time there is no device cache and no engine; time passes only from one arrival to the next, for deadlines and
pauses. Each tier is a SimulatedTier over a practically infinite link, behind the production
``TieringOffloadingManager``, which cascades, promotes and writes back. For each request, in the order of arrival:

1. The manager is notified of it. Its prefix is searched as the connector searches it, again after each step, until the
   answer is final: blocks found in a tier are promoted. The hits are the leading run that is then found; the host's
   hits are the leading run that it held before.
2. Blocks in host memory are pinned, all are touched, missing ones are stored head to tail as in ``host_replay``, all
   are touched once more so that the head ends up most recent, the writes complete and the pins end.
3. Steps follow until every cascade has ended.

Where the engine keeps recurrent states they are blocks of a second KV group, one for each that ``sim.states`` says is
kept. A prefix ends where the connector's search over both groups says. States before its end are not computed again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.prefix_search import find_loadable_end, maximal_prefix_lookup, split_by_need
from kvtier.planning.prices import HOST
from kvtier.planning.tier_mix import Mix, MixOutcome
from kvtier.sim.clients import Clients
from kvtier.sim.host_replay import HostCache, prepare_stores, replay_host
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel, KeptStates
from kvtier.sim.request import SimulatedRequest, make_request
from kvtier.sim.results import Simulation
from kvtier.sim.simulate import simulate
from kvtier.sim.spec import ROOM, SimulatedSpec
from kvtier.sim.states import STATE_GROUP, list_kept_blocks, list_pages
from kvtier.sim.timeline import Timeline
from kvtier.sim.trace import BlockKeys, Trace

NO_TIME = LinkSpeed(1e15, 1e15)
"""Speed of the tiers in a replay: a block of one byte takes a femtosecond, so no deadline passes during a transfer."""

OVERLOADS = ".breaker_openings"
"""Suffix of the counters of how often a tier was skipped."""


@dataclass(frozen=True, slots=True)
class ChainReplay:
    """Result of a replay.

    Attributes:
        num_accesses: accessed blocks, repeats included.
        num_unique_blocks: distinct accessed blocks.
        num_hits: blocks of prefixes found in host memory or a tier.
        num_host_hits: blocks of prefixes found in host memory alone.
        num_host_stored: blocks, and states, stored in host memory.
        written_blocks: blocks written to each tier, by its name.
        read_blocks: blocks promoted from each tier, by its name.
    """

    num_accesses: int
    num_unique_blocks: int
    num_hits: int
    num_host_hits: int
    num_host_stored: int
    written_blocks: dict[str, int]
    read_blocks: dict[str, int]

    @property
    def hit_ratio(self) -> float:
        """Blocks of found prefixes over all accessed blocks, from 0 to 1."""
        return self.num_hits / self.num_accesses if self.num_accesses else 0.0

    def writes_per_unique_block(self, tier: str) -> float:
        """Return how often a block was written to ``tier`` on average."""
        return self.written_blocks[tier] / self.num_unique_blocks if self.num_unique_blocks else 0.0


class _Chain:
    """Host memory and the tiers behind it, during a replay.

    Attributes:
        spec: the managers.
        num_hits: blocks of found prefixes so far.
        num_host_hits: those of them that host memory held by itself.
    """

    def __init__(self, trace: Trace, host: HostModel, states: KeptStates | None) -> None:
        self._timeline = Timeline()
        self._is_woken = False
        self._block_tokens = trace.block_tokens
        self._states = states
        engine = EngineModel(trace.block_tokens, block_bytes=1, num_device_blocks=1, states=states)
        num_keys = list_pages(trace, states).num_unique_blocks
        self.spec = SimulatedSpec(engine, host, self._timeline, self._wake, num_keys)
        self._groups = split_by_need(make_group_layouts(self.spec))
        self._manager = self.spec.get_manager()
        self.num_hits = 0
        self.num_host_hits = 0

    def serve(self, keys: list[OffloadKey], context: ReqContext, request: SimulatedRequest) -> None:
        """Serve one request; ``keys`` are those of its blocks."""
        manager, is_ready = self._manager, self._manager.primary_tier.is_ready
        self._timeline.advance_to(request.arrival_s)
        manager.end_step()
        if self._states is None:
            manager.note_request([keys], context)
            self.num_host_hits += sum(1 for _ in takewhile(is_ready, keys))
            self.num_hits += self._search(keys, context)
        else:
            keys = self._serve_states(keys, context, request, self._states)
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

    def _serve_states(
        self, keys: list[OffloadKey], context: ReqContext, request: SimulatedRequest, kept: KeptStates
    ) -> list[OffloadKey]:
        """Find the prefix of a request with states, and return the keys that it uses, each state behind its block."""
        is_ready = self._manager.primary_tier.is_ready
        states = [make_offload_key(block_hash, STATE_GROUP) for block_hash in request.block_hashes]
        self._manager.note_request([keys, states], context)
        num_usable = (request.num_prompt_tokens - 1) // self._block_tokens
        in_host = sum(1 for _ in takewhile(is_ready, keys[:num_usable]))
        self.num_host_hits += max(
            (end for end in range(1, in_host + 1) if is_ready(states[end - 1])), default=0
        )
        max_end_token = num_usable * self._block_tokens
        while (
            found := find_loadable_end(self._groups, self._manager, (keys, states), 0, max_end_token, context)
        ) is None:
            self._step()
        num_found = found.end_token // self._block_tokens
        self.num_hits += num_found
        kept_after = {
            block for block in list_kept_blocks(request, kept, self._block_tokens) if block >= num_found - 1
        }
        used = [
            (key, states[block]) if block in kept_after else (key,)
            for block, key in enumerate(keys[: len(states)])
        ]
        return [key for keys_of_block in used for key in keys_of_block]

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


class MixEvaluator(Protocol):
    """Evaluates a mix on a trace."""

    def evaluate(self, mix: Mix, on_request: Callable[[], object] | None = None) -> MixOutcome:
        """Return the results of ``mix``; ``on_request`` is called after each request."""
        ...


class UntimedEvaluator:
    """Replays the trace with transfers that take no time. Media then differ by capacity alone; equal mixes run once.

    Args:
        trace: the requests.
        cache_policy: registered name of the policy of host memory.
        states: which recurrent states the engine keeps; None: its model has none.
    """

    def __init__(self, trace: Trace, cache_policy: str, states: KeptStates | None = None) -> None:
        self._trace = trace
        self._states = states
        self._num_pages = list_pages(trace, states).num_unique_blocks
        self._cache_policy = cache_policy
        self._known: dict[tuple[int, ...], _Replayed] = {}

    def evaluate(self, mix: Mix, on_request: Callable[[], object] | None = None) -> MixOutcome:
        """Return hits and traffic; times are None. Traffic of host memory costs nothing and is not counted."""
        host = mix.host_model(self._cache_policy)
        if host is None:
            return MixOutcome(0.0, {}, {})
        largest = ROOM * max(1, self._num_pages)  # more capacity changes nothing
        capacities = tuple(min(share.num_blocks, largest) for share in mix.shares)
        if capacities not in self._known:
            self._known[capacities] = self._replay(host, on_request)
        found = self._known[capacities]
        return MixOutcome(
            found.hit_ratio,
            dict(zip(mix.kind, (0, *found.written_blocks), strict=True)),
            dict(zip(mix.kind, (0, *found.read_blocks), strict=True)),
        )

    def _replay(self, host: HostModel, on_request: Callable[[], object] | None) -> "_Replayed":
        if not host.tiers and self._states is None:
            cache = HostCache(host.num_blocks, self._cache_policy)
            return _Replayed(replay_host(self._trace, cache, on_request).hit_ratio, (), ())
        tiers = tuple(replace(tier, speed=NO_TIME) for tier in host.tiers)
        chain = replay_chain(self._trace, replace(host, tiers=tiers), on_request, self._states)
        names = [tier.name for tier in tiers]
        return _Replayed(
            chain.hit_ratio,
            tuple(chain.written_blocks[name] for name in names),
            tuple(chain.read_blocks[name] for name in names),
        )


@dataclass(frozen=True, slots=True)
class TimedEvaluator:
    """Serves the trace on simulated time.

    Attributes:
        trace: the requests.
        engine: the engine that serves them.
        cache_policy: registered name of the policy of host memory.
    """

    trace: Trace
    engine: EngineModel
    cache_policy: str

    def evaluate(self, mix: Mix, on_request: Callable[[], object] | None = None) -> MixOutcome:
        """Return hits, traffic and times."""
        host = mix.host_model(self.cache_policy)
        return outcome_of(simulate(self.trace, self.engine, host, on_request=on_request))


class ScreeningEvaluator:
    """Evaluates a mix on simulated time, unless its capacity alone already misses a goal for hits.

    Hits on simulated time are at most those without time plus those of the device, except for tokens of partial blocks.

    Args:
        timed: evaluates mixes that may reach the goal.
        hit_ratio: the goal.
        device_hit_ratio: hits of the engine without offloading.
    """

    def __init__(self, timed: TimedEvaluator, hit_ratio: float, device_hit_ratio: float) -> None:
        self._timed = timed
        self._timeless = UntimedEvaluator(timed.trace, timed.cache_policy, timed.engine.states)
        self._hit_ratio = hit_ratio
        self._device_hit_ratio = device_hit_ratio
        trace = timed.trace
        num_prompt_tokens = sum(max(1, request.num_prompt_tokens) for request in trace.requests)
        self._fill = max(1.0, trace.num_accesses * trace.block_tokens / max(1, num_prompt_tokens))

    def evaluate(self, mix: Mix, on_request: Callable[[], object] | None = None) -> MixOutcome:
        """Return the results on simulated time, or those without time where they are far below the goal."""
        quick = self._timeless.evaluate(mix)
        if quick.hit_ratio * self._fill + self._device_hit_ratio < self._hit_ratio:
            return quick
        return self._timed.evaluate(mix, on_request)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """Result of a replay; blocks of each tier, in the order of the tiers."""

    hit_ratio: float
    written_blocks: tuple[int, ...]
    read_blocks: tuple[int, ...]


def replay_chain(
    trace: Trace,
    host: HostModel,
    on_request: Callable[[], object] | None = None,
    states: KeptStates | None = None,
) -> ChainReplay:
    """Replay ``trace`` through ``host`` and its tiers by the rules above.

    Args:
        trace: the requests.
        host: host memory and the chain behind it; give the tiers the speed NO_TIME.
        on_request: called after each request, for a progress bar.
        states: which recurrent states the engine keeps; None: its model has none.
    """
    chain = _Chain(trace, host, states)
    block_keys, clients = BlockKeys(), Clients(host.client_hints, trace, host.hint_noise)
    for number, request in enumerate(trace.requests):
        context = ReqContext(str(number), clients.hints_of(request, number))
        served = make_request(number, request, trace.block_tokens)
        chain.serve(block_keys.of(request.hash_ids), context, served)
        if on_request is not None:
            on_request()
    named = list(zip([model.name for model in host.tiers], chain.spec.tiers, strict=True))
    return ChainReplay(
        trace.num_accesses,
        trace.num_unique_blocks,
        chain.num_hits,
        chain.num_host_hits,
        int(chain.spec.get_manager().primary_tier.stats()["primary.stored"]),
        {name: tier.num_written_blocks for name, tier in named},
        {name: tier.num_read_blocks for name, tier in named},
    )


def outcome_of(found: Simulation) -> MixOutcome:
    """Return the results of a mix from those of a simulation. Pure."""
    total = found.total
    names = {tier.name: HOST if number == 0 else tier.name for number, tier in enumerate(found.tiers)}
    hits = sum(total.hit_tokens.values())
    return MixOutcome(
        hits / total.num_prompt_tokens if total.num_prompt_tokens else 0.0,
        {names[tier.name]: tier.num_written_blocks for tier in found.tiers},
        {names[tier.name]: tier.num_read_blocks for tier in found.tiers},
        total.first_token,
        found.num_saved_tokens,
        int(sum(value for name, value in found.counters.items() if name.endswith(OVERLOADS))),
    )
