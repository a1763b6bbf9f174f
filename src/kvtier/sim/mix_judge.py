"""Tries a mix of tiers on a trace: without time, which is quick, or on simulated time, which knows the truth.

It has no rule of its own: the first is ``replay_host`` or ``replay_chain``, the second ``simulate``. Without time a hit
is a block of a found prefix, and there is no device cache; on simulated time it is a token that was not computed, and
the device's cache counts. Capacity is not enough: a tier that cannot take what is written to it finds little. So what
reaches a goal does so on simulated time, and the quick way only tells what need not be simulated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from kvtier.sim.chain_replay import NO_TIME, replay_chain
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.mix import Mix, Outcome
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.prices import HOST
from kvtier.sim.results import Simulation
from kvtier.sim.simulate import simulate
from kvtier.sim.spec import ROOM
from kvtier.sim.trace import Trace

OVERLOADS = ".breaker_openings"
"""How counters end that tell how often a tier was left out."""


class MixJudge(Protocol):
    """Tells what a mix does with a trace."""

    def judge(self, mix: Mix, on_request: Callable[[], object] | None = None) -> Outcome:
        """Return what ``mix`` has done; ``on_request`` is called after each request."""
        ...


class TimelessJudge:
    """Replays the trace when transfers take no time. Then media differ by capacity alone, so equal ones are tried once.

    Args:
        trace: the requests.
        cache_policy: registered name of the policy of host memory.
    """

    def __init__(self, trace: Trace, cache_policy: str) -> None:
        self._trace = trace
        self._cache_policy = cache_policy
        self._known: dict[tuple[int, ...], _Replayed] = {}

    def judge(self, mix: Mix, on_request: Callable[[], object] | None = None) -> Outcome:
        """Return hits and traffic; times are None. Host memory costs nothing by the block: its traffic is left out."""
        host = mix.host_model(self._cache_policy)
        if host is None:
            return Outcome(0.0, {}, {})
        largest = ROOM * max(1, self._trace.num_unique_blocks)  # in more nothing changes
        capacities = tuple(min(share.num_blocks, largest) for share in mix.shares)
        if capacities not in self._known:
            self._known[capacities] = self._replay(host, on_request)
        found = self._known[capacities]
        return Outcome(
            found.hit_ratio,
            dict(zip(mix.kind, (0, *found.written_blocks), strict=True)),
            dict(zip(mix.kind, (0, *found.read_blocks), strict=True)),
        )

    def _replay(self, host: HostModel, on_request: Callable[[], object] | None) -> "_Replayed":
        if not host.tiers:
            cache = HostCache(host.num_blocks, self._cache_policy)
            return _Replayed(replay_host(self._trace, cache, on_request).hit_ratio, (), ())
        tiers = tuple(replace(tier, speed=NO_TIME) for tier in host.tiers)
        chain = replay_chain(self._trace, replace(host, tiers=tiers), on_request)
        names = [tier.name for tier in tiers]
        return _Replayed(
            chain.hit_ratio,
            tuple(chain.written_blocks[name] for name in names),
            tuple(chain.read_blocks[name] for name in names),
        )


@dataclass(frozen=True, slots=True)
class TimedJudge:
    """Serves the trace on simulated time.

    Attributes:
        trace: the requests.
        engine: what serves them.
        cache_policy: registered name of the policy of host memory.
    """

    trace: Trace
    engine: EngineModel
    cache_policy: str

    def judge(self, mix: Mix, on_request: Callable[[], object] | None = None) -> Outcome:
        """Return hits, traffic and times."""
        host = mix.host_model(self.cache_policy)
        return outcome_of(simulate(self.trace, self.engine, host, on_request=on_request))


class QuickJudge:
    """Serves a mix on simulated time unless its capacity alone rules out a goal of hits.

    Hits on simulated time are at most those without time, a token that fills no block aside, and those of the device.

    Args:
        timed: serves what may reach the goal.
        hit_ratio: the goal.
        device_hit_ratio: what the engine finds without offloading.
    """

    def __init__(self, timed: TimedJudge, hit_ratio: float, device_hit_ratio: float) -> None:
        self._timed = timed
        self._timeless = TimelessJudge(timed.trace, timed.cache_policy)
        self._hit_ratio = hit_ratio
        self._device_hit_ratio = device_hit_ratio
        trace = timed.trace
        num_prompt_tokens = sum(max(1, request.num_prompt_tokens) for request in trace.requests)
        self._fill = max(1.0, trace.num_accesses * trace.block_tokens / max(1, num_prompt_tokens))

    def judge(self, mix: Mix, on_request: Callable[[], object] | None = None) -> Outcome:
        """Return what ``mix`` does on simulated time, or without time where that is far below the goal."""
        quick = self._timeless.judge(mix)
        if quick.hit_ratio * self._fill + self._device_hit_ratio < self._hit_ratio:
            return quick
        return self._timed.judge(mix, on_request)


def outcome_of(found: Simulation) -> Outcome:
    """Return what a simulation says of a mix. Pure."""
    total = found.total
    names = {tier.name: HOST if number == 0 else tier.name for number, tier in enumerate(found.tiers)}
    hits = sum(total.hit_tokens.values())
    return Outcome(
        hits / total.num_prompt_tokens if total.num_prompt_tokens else 0.0,
        {names[tier.name]: tier.num_written_blocks for tier in found.tiers},
        {names[tier.name]: tier.num_read_blocks for tier in found.tiers},
        total.first_token,
        found.num_saved_tokens,
        int(sum(value for name, value in found.counters.items() if name.endswith(OVERLOADS))),
    )


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What a replay has found; the blocks of each tier, in their order."""

    hit_ratio: float
    written_blocks: tuple[int, ...]
    read_blocks: tuple[int, ...]
