"""How many seconds a loaded token saves, measured on live requests, by tier and length of the hit.

Requests with a hit are divided at random: most load it, a few compute it (``audit``), so the two kinds differ by chance
alone. Each gives one number, the seconds from its first search to its first token, divided by the tokens of its hit.
What a loaded token saves is the difference of the two means. Its 95 % interval is Welch's: the means' variances add,
and Student's t has the degrees of freedom of Welch and Satterthwaite.

Older requests count less, by half every ``HALF_LIFE`` of their kind, so that the answer follows a place that slows down
or recovers. n numbers with weights w count as (sum w)^2 / sum w^2 of them.

Where the whole interval lies below zero, loading is switched off for hits of that tier and length. One in
``1 / TREATMENT_RATIO`` of them goes on being loaded, and when the interval reaches zero again, all are.

Source: B. L. Welch, The generalization of "Student's" problem, Biometrika 34 (1947).
"""

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

from kvtier.connector.request_state import Arm

BUCKETS = (0, 256, 1024, 4096, 16384, 65536)
"""Tokens at which the classes of length begin. More classes have fewer requests each; fewer mix hits that pay with hits
that do not."""

HALF_LIFE = 16
"""Requests of one kind after which one counts half. Fewer follow a change sooner and make the interval wider."""

DECAY = 0.5 ** (1 / HALF_LIFE)

MIN_REQUESTS = 3
"""Requests of each kind before an interval is given. Two agree by chance too often."""

TREATMENT_RATIO = 0.05
"""Share of the hits that are loaded although loading is switched off. Higher notices sooner that a place has recovered;
lower loses less while it has not."""

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
        num: numbers so far.
        mean: their weighted mean.
    """

    num: int = 0
    mean: float = 0.0
    _weight: float = 0.0
    _squared_weight: float = 0.0
    _squares: float = 0.0

    def add(self, number: float) -> None:
        """Add a number, the newest."""
        self.num += 1
        self._weight = DECAY * self._weight + 1
        self._squared_weight = DECAY * DECAY * self._squared_weight + 1
        difference = number - self.mean
        self.mean += difference / self._weight
        self._squares = DECAY * self._squares + difference * (number - self.mean)

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
        loaded: seconds to the first token, per token of the hit, of those that load.
        computed: the same of those that compute.
        interval: what a loaded token saves.
    """

    loaded: DecayingMean = field(default_factory=DecayingMean)
    computed: DecayingMean = field(default_factory=DecayingMean)
    interval: tuple[float, float, float] = (0.0, -inf, inf)

    def add(self, seconds_per_token: float, *, is_loaded: bool) -> None:
        """Add a request."""
        (self.loaded if is_loaded else self.computed).add(seconds_per_token)
        self.interval = find_interval(self.loaded, self.computed)


def find_interval(loaded: DecayingMean, computed: DecayingMean) -> tuple[float, float, float]:
    """Return how much ``computed`` is above ``loaded``, with the ends of the 95 % interval (Welch). Pure."""
    if min(loaded.num, computed.num) < MIN_REQUESTS:
        return computed.mean - loaded.mean if loaded.num and computed.num else 0.0, -inf, inf
    difference = computed.mean - loaded.mean
    of_loaded, of_computed = loaded.variance_of_mean, computed.variance_of_mean
    variance = of_loaded + of_computed
    parts = ((of_loaded, loaded.num_effective), (of_computed, computed.num_effective))
    denominator = sum(part**2 / (num - 1) for part, num in parts)
    freedom = variance**2 / denominator if denominator else inf
    quantile = T_975[max(0, int(freedom) - 1)] if freedom < len(T_975) + 1 else T_975_LATER
    reach = quantile * sqrt(variance)
    return difference, difference - reach, difference + reach


class ControlArm:
    """The classes of one scheduler half. Used from its thread; any thread may call ``intervals`` and ``stats``.

    Args:
        rng: draws which hits are loaded although loading is switched off.
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

    def is_off(self, tier: str, num_tokens: int) -> bool:
        """Return whether hits of this tier and length are slower to load than to compute. Pure."""
        known = self._classes.get((tier, bucket_of(num_tokens)))
        return known is not None and known.interval[2] < 0

    def draws_treatment(self) -> bool:
        """Draw whether a hit is loaded although loading is switched off."""
        return self._rng.random() < TREATMENT_RATIO

    def intervals(self) -> list[SavedInterval]:
        """Return what is known of each class, ordered by tier and length."""
        return [
            SavedInterval(
                tier, length, *each.interval, each.loaded.num, each.computed.num, each.interval[2] < 0
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
