"""Tries a mix of tiers on a trace: without time, which is quick, or on simulated time, which knows first tokens.

It has no rule of its own: the first is ``replay_host`` or ``replay_chain``, the second ``simulate``. Without time a hit
is a block of a found prefix, and there is no device cache; on simulated time it is a token that was not computed, and
the device's cache counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from kvtier.sim.chain_replay import NO_TIME, replay_chain
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.mix import Mix, Outcome
from kvtier.sim.model import EngineModel
from kvtier.sim.prices import HOST
from kvtier.sim.results import Simulation
from kvtier.sim.simulate import simulate
from kvtier.sim.trace import Trace

OVERLOADS = ".breaker_openings"
"""How counters end that tell how often a tier was left out."""


class MixJudge(Protocol):
    """Tells what a mix does with a trace."""

    def judge(self, mix: Mix, on_request: Callable[[], object] | None = None) -> Outcome:
        """Return what ``mix`` has done; ``on_request`` is called after each request."""
        ...


@dataclass(frozen=True, slots=True)
class TimelessJudge:
    """Replays the trace when transfers take no time.

    Attributes:
        trace: the requests.
        cache_policy: registered name of the policy of host memory.
    """

    trace: Trace
    cache_policy: str

    def judge(self, mix: Mix, on_request: Callable[[], object] | None = None) -> Outcome:
        """Return hits and traffic; times are None."""
        host = mix.host_model(self.cache_policy)
        if host is None:
            return Outcome(0.0, {}, {})
        if not host.tiers:
            found = replay_host(self.trace, HostCache(host.num_blocks, self.cache_policy), on_request)
            return Outcome(found.hit_ratio, {HOST: found.num_stored}, {HOST: found.num_hits})
        tiers = tuple(replace(tier, speed=NO_TIME) for tier in host.tiers)
        chain = replay_chain(self.trace, replace(host, tiers=tiers), on_request)
        # Host memory costs nothing by the block, so what was written to it is not counted.
        return Outcome(
            chain.hit_ratio, {HOST: 0, **chain.written_blocks}, {HOST: chain.num_hits, **chain.read_blocks}
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
