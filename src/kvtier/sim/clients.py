"""The clients of a replayed trace: what they know of the future, what they say of it, and how wrong they are.

A request is *continued* when a later one begins with at least half of its blocks; its *return time* is the time from
its arrival to that request's. Hints are made from that, with the errors of ``HintNoise``. Equal seeds give equal hints.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import exp, log
from statistics import NormalDist
from typing import Any

from kvtier.errors import ConfigError
from kvtier.sim.trace import StopReason, Trace, TraceRequest

STOPS = {StopReason.TOOL_USE: "tool_use", StopReason.END_TURN: "end_turn"}

RANDOM_RETURNS_S = (30.0, 60.0, 120.0, 240.0, 480.0, 960.0, None)
"""What a client that knows nothing says, each as often; None: that nothing follows."""

HOSTILE_RETURN_S = 30.0
"""What a hostile client says of a prompt that never comes back: the hint that would make it worth most."""

NUM_TENANTS = 20
"""Tenants of simulated clients; each session belongs to one of them."""

NORMAL = NormalDist()

Params = dict[str, Any]  # Any: the type of kv_transfer_params


class ClientHints(Enum):
    """What clients know and send as hints with a request."""

    NONE = "none"
    """Nothing."""

    AS_LAST_TURN = "as_last_turn"
    """That this turn ends as their last one did. No hint for a first turn, and none about lengths."""

    FORESEEN = "foreseen"
    """How this turn will end and how long its answer will be: an upper bound for the use of such hints."""

    CONTINUES = "continues"
    """Whether a later request will go on from this one: ``continues``."""

    RETURNS = "returns"
    """When it will, or that none will: ``returns_in_s``, or ``continues`` false."""


class Honesty(Enum):
    """How clients turn what they know into hints."""

    HONEST = "honest"
    """As they know it, with the errors of HintNoise."""

    RANDOM = "random"
    """Any hint, each as likely."""

    HOSTILE = "hostile"
    """The opposite: what returns is said to end, what ends is said to return soon."""


@dataclass(frozen=True, slots=True)
class HintNoise:
    """How wrong hints are.

    Attributes:
        wrong_share: share of the requests whose hint says the opposite of what happens.
        silent_share: share of the sessions that give no hints.
        time_factor: return times are off by a log-normal factor; this is its standard deviation, 1 for none.
        honesty: what liars do with what they know.
        liar_share: share of the tenants that are liars, if ``honesty`` is not HONEST; the others are honest.
        names_clients: whether clients name their sessions and tenants.
        seed: of the errors.

    Raises:
        ConfigError: a share is not from 0 to 1, or the factor is not from 1 to 1000.
    """

    wrong_share: float = 0.0
    silent_share: float = 0.0
    time_factor: float = 1.0
    honesty: Honesty = Honesty.HONEST
    liar_share: float = 1.0
    names_clients: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("wrong_share", "silent_share", "liar_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "must be a share from 0 to 1")
        if not 1 <= self.time_factor <= 1000:
            raise ConfigError(
                "time_factor", self.time_factor, "must be a number from 1, for no error, to 1000"
            )


EXACT = HintNoise()


@dataclass(frozen=True, slots=True)
class Future:
    """What happens after a request.

    Attributes:
        session: number of the conversation that it belongs to.
        returns_in_s: seconds until the next request that begins with half of its blocks; None: there is none.
    """

    session: int
    returns_in_s: float | None


def foresee(trace: Trace) -> list[Future]:
    """Return the future of each request, in their order. Pure."""
    requests = trace.requests
    next_s: dict[int, float] = {}
    returns: list[float | None] = [None] * len(requests)
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        if request.hash_ids:
            when_s = next_s.get(_half_of(request))
            returns[number] = None if when_s is None else when_s - request.arrival_s
        for hash_id in request.hash_ids:
            next_s[hash_id] = request.arrival_s
    sessions = _sessions_of(requests)
    return [Future(session, returned) for session, returned in zip(sessions, returns, strict=True)]


class Clients:
    """The clients of a trace.

    Args:
        known: what they know.
        trace: the requests; needed where they know the future.
        noise: how wrong they are about it.
    """

    def __init__(self, known: ClientHints, trace: Trace | None = None, noise: HintNoise = EXACT) -> None:
        self._known = known
        self._stop_after: dict[int, StopReason] = {}
        self._hints: list[Params | None] = []
        if trace is not None and known in {ClientHints.CONTINUES, ClientHints.RETURNS}:
            self._hints = make_hints(foresee(trace), known, noise)

    def hints_of(self, request: TraceRequest, number: int = 0) -> Params | None:
        """Return the hints of a request, None without any; requests come in the order of their arrival.

        Args:
            request: the request.
            number: its place in the trace.
        """
        if self._known is ClientHints.NONE:
            return None
        if self._hints:
            return self._hints[number]
        if self._known is ClientHints.FORESEEN:
            return _stop_hint(request.stop) | {"expected_output_tokens": request.num_output_tokens}
        before = next((each for each in reversed(request.hash_ids) if each in self._stop_after), None)
        hints = _stop_hint(StopReason.UNKNOWN if before is None else self._stop_after[before])
        if request.hash_ids:
            self._stop_after[request.hash_ids[-1]] = request.stop
        return hints


def make_hints(futures: Sequence[Future], known: ClientHints, noise: HintNoise) -> list[Params | None]:
    """Return what clients say with each request, None where they are silent. Pure."""
    rng = random.Random(noise.seed)  # noqa: S311 - errors of simulated clients, not a secret
    silent: dict[int, bool] = {}
    times = [future.returns_in_s for future in futures if future.returns_in_s is not None]
    hints: list[Params | None] = []
    for future in futures:
        if silent.setdefault(future.session, rng.random() < noise.silent_share):
            hints.append(None)
            continue
        tenant = future.session % NUM_TENANTS
        if noise.honesty is not Honesty.HONEST and tenant < noise.liar_share * NUM_TENANTS:
            said_s = _lie(future.returns_in_s, known, noise, rng)
        else:
            said_s = _say(future.returns_in_s, times, noise, rng)
        names = {"session": f"s{future.session}", "tenant": f"t{tenant}"}
        hint: Params = dict(names) if noise.names_clients else {}
        hint["continues"] = said_s is not None
        if known is ClientHints.RETURNS and said_s is not None:
            hint["returns_in_s"] = said_s
        hints.append(hint)
    return hints


def _say(
    actual_s: float | None, times: Sequence[float], noise: HintNoise, rng: random.Random
) -> float | None:
    """Return the return time that an honest client says; None: that nothing follows."""
    said_s = actual_s
    if rng.random() < noise.wrong_share:
        # Who is wrong about the end says a time that others really take.
        said_s = None if actual_s is not None or not times else times[int(len(times) * rng.random())]
    if said_s is not None and noise.time_factor > 1:
        chance = min(max(rng.random(), 1e-9), 1 - 1e-9)
        said_s *= exp(log(noise.time_factor) * NORMAL.inv_cdf(chance))
    return said_s


def _lie(actual_s: float | None, known: ClientHints, noise: HintNoise, rng: random.Random) -> float | None:
    """Return the return time that a liar says; None: that nothing follows."""
    if noise.honesty is Honesty.HOSTILE:
        return HOSTILE_RETURN_S if actual_s is None else None
    if known is ClientHints.CONTINUES:
        return HOSTILE_RETURN_S if rng.random() < 0.5 else None
    return RANDOM_RETURNS_S[int(len(RANDOM_RETURNS_S) * rng.random())]


def _half_of(request: TraceRequest) -> int:
    """Return the id of the last block of the first half of a prompt. Pure."""
    return request.hash_ids[(len(request.hash_ids) + 1) // 2 - 1]


def _sessions_of(requests: Sequence[TraceRequest]) -> list[int]:
    """Return a number for each request; one that continues another has that one's.

    It continues the one of which it repeats most; what all prompts begin with makes no session, so a request is
    continued by one other only.
    """
    half_of: dict[int, int] = {}
    sessions: list[int] = []
    for number, request in enumerate(requests):
        before = next((each for each in reversed(request.hash_ids) if each in half_of), None)
        session = number if before is None else half_of.pop(before)
        sessions.append(session)
        if request.hash_ids:
            half_of[_half_of(request)] = session
    return sessions


def _stop_hint(stop: StopReason) -> Params:
    return {"expected_stop": STOPS[stop]} if stop in STOPS else {}
