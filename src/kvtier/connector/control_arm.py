"""How many seconds a loaded token saves, measured on live requests, by tier and length of the hit.

Requests with a hit are divided at random: most load it, a few compute it (``audit``), so the two kinds differ by chance
alone. Each gives one number, the seconds from its first search to its first token, divided by the tokens of its hit.

Only requests of about the same time are compared, because an engine that is busy delays both kinds. A round ends when
it has a request of each kind, and gives one difference: the mean of those that computed less the mean of those that
loaded. What a loaded token saves is the mean of these differences, with Student's 95 % interval for pairs.

Older rounds count less, by half every ``HALF_LIFE``, so that the answer follows a slow change. n numbers with weights w
count as (sum w)^2 / sum w^2 of them. After a sudden one, which the latest rounds show, those before are forgotten.

Where the whole interval lies below zero, loading is switched off for hits of that tier and length. A share of
``TRIAL_RATIO`` of them goes on being loaded, and when the interval reaches zero again, all are. Where loading has
become slower than computing was, a busy engine explains it as well as a slow disk: the same share is computed then.

Source: Student, The probable error of a mean, Biometrika 6 (1908).
"""

import random
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from math import inf, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.connector.planning import PinnedBlock

BUCKETS = (0, 256, 1024, 4096, 16384, 65536)
"""Tokens at which the classes of length begin. More classes have fewer requests each; fewer mix hits that pay with hits
that do not."""

HALF_LIFE = 8.0
"""Rounds after which one counts half, and in a round requests of one kind. Fewer follow a change sooner and make the
interval wider."""

MIN_ROUNDS = 3
"""Rounds before an interval is given. Two agree by chance too often."""

TRIAL_RATIO = 0.05
"""Share of the hits that are loaded although loading is switched off, or computed while it is suspected. Higher notices
sooner that a place has recovered or has not; lower loses less."""

RECENT_ROUNDS = 6
"""Rounds that tell a sudden change. Fewer miss it among noise, more see it later."""

SURPRISE_T = 6.87
"""Standard errors of their mean from which on the mean of all is another: the 99.95 % quantile of Student's t for five
degrees of freedom. Lower forgets by chance."""

T_975 = (
    12.71,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
"""The 97.5 % quantile of Student's t for 1 to 15 degrees of freedom."""

T_975_LATER = 2.13
"""For more of them it falls to 1.96; the largest is taken, which makes the interval at most a twelfth too wide."""


class Arm(Enum):
    """What is done with the hit of a request, for the sake of measuring it."""

    LOADED = "loaded"
    AUDITED = "audited"
    """It is computed, and its blocks are compared with those held."""

    SKIPPED = "skipped"
    """It is computed, because loads of its length from its tier turned out slower, or to find out whether they are."""

    STOPPED = "stopped"
    """It is computed, because too many blocks were wrong: nothing is loaded."""


@dataclass(slots=True)
class AuditState:
    """The part of the request in the audit.

    Attributes:
        arm: what is done with its hit.
        is_searched: whether the search for its hit is final.
        is_begun: whether the engine has begun it.
        is_watched: whether its first token is waited for.
        tier: where its hit is, "host" or a tier's type.
        num_tokens: tokens of its hit; 0 before that is known, or when there is none.
        time_s: seconds from its first search to its first token; None before that.
        is_counted: whether it is in the trial.
        is_forced: whether it is loaded although loads of its length are switched off.
        blocks: what is pinned and not compared yet.
        stored: the blocks that it has stored itself while the search for its hit went on: they are no hit.
    """

    arm: Arm
    is_searched: bool = False
    is_begun: bool = False
    is_watched: bool = False
    tier: str = ""
    num_tokens: int = 0
    time_s: float | None = None
    is_counted: bool = False
    is_forced: bool = False
    blocks: dict[OffloadKey, PinnedBlock] = field(default_factory=dict)
    stored: set[OffloadKey] = field(default_factory=set)

    @property
    def is_computed(self) -> bool:
        """Whether the request is computed whatever is held of it."""
        return self.arm is Arm.AUDITED or self.arm is Arm.STOPPED

    @property
    def is_open(self) -> bool:
        """Whether the request is computed and the search for its hit goes on."""
        return self.arm is Arm.AUDITED and not self.is_searched


class SavedInterval(NamedTuple):
    """What a loaded token of one class saves.

    Attributes:
        tier: where the hits are, "host" or a tier's type.
        length: tokens at which the class begins.
        mean_s: seconds; below zero loading is slower.
        low_s: lower end of the 95 % interval; minus infinity while there are too few requests.
        high_s: upper end; infinity likewise.
        num_loaded: requests that loaded, since the start.
        num_computed: requests that computed, since the start.
        is_off: whether loading is switched off where ``load_if`` is "faster".
    """

    tier: str
    length: int
    mean_s: float
    low_s: float
    high_s: float
    num_loaded: int
    num_computed: int
    is_off: bool


@dataclass(slots=True)
class DecayingMean:
    """Mean and variance of numbers of which the older count less.

    Attributes:
        half_life: numbers after which one counts half.
        num: numbers so far.
        mean: their weighted mean.
    """

    half_life: float = HALF_LIFE
    num: int = 0
    mean: float = 0.0
    _weight: float = 0.0
    _squared_weight: float = 0.0
    _squares: float = 0.0

    def add(self, number: float) -> None:
        """Add a number, the newest."""
        self.num += 1
        decay = 0.5 ** (1 / self.half_life)
        self._weight = decay * self._weight + 1
        self._squared_weight = decay * decay * self._squared_weight + 1
        difference = number - self.mean
        self.mean += difference / self._weight
        self._squares = decay * self._squares + difference * (number - self.mean)

    @property
    def num_effective(self) -> float:
        """How many numbers of equal weight would say as much."""
        return self._weight**2 / self._squared_weight if self.num else 0.0

    @property
    def variance_of_mean(self) -> float:
        """The variance of the mean; infinite for a single number."""
        if self.num < 2:
            return inf
        variance = self._squares / (self._weight - self._squared_weight / self._weight)
        return max(0.0, variance) / self.num_effective


@dataclass(slots=True)
class TrialClass:
    """Requests with hits of one tier and one class of length.

    Attributes:
        num_loaded: requests that loaded, since the start.
        num_computed: requests that computed, since the start.
        interval: what a loaded token saves, in seconds, and the ends of its 95 % interval.
    """

    num_loaded: int = 0
    num_computed: int = 0
    interval: tuple[float, float, float] = (0.0, -inf, inf)
    # Of this round.
    _loaded: DecayingMean = field(default_factory=DecayingMean)
    _computed: DecayingMean = field(default_factory=DecayingMean)
    # Of the rounds before it: their differences, the latest of them, and how long both kinds took of late.
    _differences: DecayingMean = field(default_factory=DecayingMean)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    _loaded_of_late: DecayingMean = field(default_factory=DecayingMean)
    _computed_of_late: DecayingMean = field(default_factory=DecayingMean)

    @property
    def skip_ratio(self) -> float:
        """The share of the hits to compute, besides those of the audit."""
        if self.interval[2] < 0:
            return 1 - TRIAL_RATIO
        is_known = self._differences.num >= MIN_ROUNDS
        return TRIAL_RATIO if is_known and self._loaded_of_late.mean > self._computed_of_late.mean else 0.0

    def add(self, seconds_per_token: float, *, is_loaded: bool) -> None:
        """Add a request."""
        self.num_loaded += is_loaded
        self.num_computed += not is_loaded
        (self._loaded if is_loaded else self._computed).add(seconds_per_token)
        (self._loaded_of_late if is_loaded else self._computed_of_late).add(seconds_per_token)
        if self._loaded.num and self._computed.num:
            self._end_round(self._computed.mean - self._loaded.mean)
            self._loaded, self._computed = DecayingMean(), DecayingMean()

    def _end_round(self, difference_s: float) -> None:
        recent = self._recent
        recent.append(difference_s)
        self._differences.add(difference_s)
        if len(recent) == RECENT_ROUNDS:
            error_s = stdev(recent) / sqrt(RECENT_ROUNDS)
            if abs(fmean(recent) - self._differences.mean) > SURPRISE_T * error_s:
                self._differences = DecayingMean()
                for each_s in recent:
                    self._differences.add(each_s)
        self.interval = find_interval(self._differences)


def find_interval(differences: DecayingMean) -> tuple[float, float, float]:
    """Return the mean of ``differences`` and the ends of its 95 % interval. Pure."""
    mean = differences.mean
    if differences.num < MIN_ROUNDS:
        return mean, -inf, inf
    freedom = int(differences.num_effective) - 1
    quantile = T_975[max(0, freedom - 1)] if freedom <= len(T_975) else T_975_LATER
    reach = quantile * sqrt(differences.variance_of_mean)
    return mean, mean - reach, mean + reach


class ControlArm:
    """The classes of one scheduler half. Used from its thread; any thread may call ``intervals`` and ``stats``.

    Args:
        rng: draws which hits are loaded although loading is switched off, or computed while it is suspected.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._classes: dict[tuple[str, int], TrialClass] = {}

    def add(self, tier: str, num_tokens: int, time_s: float, arm: Arm) -> None:
        """Add a request that has its first token.

        Args:
            tier: where its hit is.
            num_tokens: tokens of the hit, above zero.
            time_s: seconds from its first search to its first token.
            arm: what was done with the hit.
        """
        label = tier, bucket_of(num_tokens)
        if label not in self._classes:
            self._classes[label] = TrialClass()
        self._classes[label].add(time_s / num_tokens, is_loaded=arm is Arm.LOADED)

    def draws_skip(self, tier: str, num_tokens: int) -> bool | None:
        """Draw whether to compute a hit of this tier and length; None, without a draw, where every hit is loaded."""
        known = self._classes.get((tier, bucket_of(num_tokens)))
        ratio = 0.0 if known is None else known.skip_ratio
        return self._rng.random() < ratio if ratio else None

    def intervals(self) -> list[SavedInterval]:
        """Return what is known of each class, ordered by tier and length."""
        return [
            SavedInterval(
                tier, length, *each.interval, each.num_loaded, each.num_computed, each.interval[2] < 0
            )
            for (tier, length), each in sorted(self._classes.items())
        ]

    def stats(self) -> dict[str, float]:
        """Return the intervals by dotted name: ends that are not known yet are left out."""
        numbers: dict[str, float] = {}
        for found in self.intervals():
            label = f"{found.length}.{found.tier}"
            numbers[f"audit.loaded_requests.{label}"] = float(found.num_loaded)
            numbers[f"audit.computed_requests.{label}"] = float(found.num_computed)
            numbers[f"audit.switched_off.{label}"] = float(found.is_off)
            if found.high_s < inf:
                bounds = {"mean": found.mean_s, "low": found.low_s, "high": found.high_s}
                numbers |= {f"audit.saved_s.{bound}.{label}": each for bound, each in bounds.items()}
        return numbers


def bucket_of(num_tokens: int) -> int:
    """Return where the class of length begins that a hit belongs to, in tokens. Pure."""
    return BUCKETS[bisect_right(BUCKETS, num_tokens) - 1]
