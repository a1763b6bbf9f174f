"""The cost of loading and of computing a prefix, and estimators that learn both from live steps.

Loading is faster from a certain length on: a load has a fixed delay and a bandwidth, computing has a cost per token and
one that grows with the position.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from kvtier.errors import ConfigError

MAX_TOKENS = 2**40
"""Longer break-even lengths count as "never": no context is as long, and up to here a float counts tokens exactly."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The speed of a link for one load, net of its other traffic.

    Attributes:
        bytes_per_s: bandwidth of one load after the latency, all streams of the link together.
        latency_s: seconds before the first byte, once per load of any size; 0 when blocks follow without a pause.

    Raises:
        ConfigError: the rate is not a finite number above zero, or the latency not one from zero.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ConfigError("bytes_per_s", self.bytes_per_s, "a rate is a finite number above zero")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError("latency_s", self.latency_s, "a latency is a finite number from zero")

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds of a load of ``num_bytes``; 0 for 0 bytes. Pure."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """The time to compute a token of a prompt.

    Attributes:
        token_s: seconds for the token itself: 1 / (tokens per second).
        attended_token_s: additional seconds for each token that it attends to, itself included; 0: unknown.

    Raises:
        ConfigError: one of them is not a finite number from zero, or both are zero.
    """

    token_s: float
    attended_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("token_s", "attended_token_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "a time is a finite number from zero")
        if self.token_s == self.attended_token_s == 0:
            raise ConfigError("token_s", self.token_s, "computing takes time: give a number above zero")


def load_s(num_bytes: float, links: Sequence[LinkRate]) -> float:
    """Return the seconds to move ``num_bytes`` over ``links``, one after the other. Pure.

    The links do not overlap: a promotion has ended before the load to the device begins.

    Args:
        num_bytes: bytes of keys and values; 0 takes no time.
        links: from the tier to the device, for example (disk, PCIe).
    """
    return sum(link.time_s(num_bytes) for link in links)


def compute_s(first_token: int, end_token: int, rate: PrefillRate) -> float:
    """Return the seconds to compute the tokens from ``first_token`` up to ``end_token``. Pure.

    Args:
        first_token: position of the first; the tokens before it exist and are attended to.
        end_token: position behind the last; nothing is computed if it is not above ``first_token``.
        rate: the engine's rate.
    """
    if end_token <= first_token:
        return 0.0
    attended = (end_token * (end_token + 1) - first_token * (first_token + 1)) // 2
    return (end_token - first_token) * rate.token_s + attended * rate.attended_token_s


def break_even_tokens(
    bytes_per_token: float, links: Sequence[LinkRate], rate: PrefillRate, *, first_token: int = 0
) -> int | None:
    """Return the length beyond which a prefix is faster to load than to compute. Pure.

    Args:
        bytes_per_token: bytes of keys and values of a token, all layers and workers together.
        links: the links it is loaded over.
        rate: the rate of computing it.
        first_token: tokens before it that the device has.

    Returns:
        Loading more tokens than this is faster, loading as many or fewer is not. 0: loading is faster at any length.
        None: at no length.

    Raises:
        ConfigError: a token has no bytes, or the position is negative.
    """
    if not 0 < bytes_per_token < math.inf:
        raise ConfigError(
            "bytes_per_token", bytes_per_token, "a token has a finite number of bytes above zero"
        )
    if first_token < 0:
        raise ConfigError("first_token", first_token, "a position counts from zero")

    def is_load_faster(num_tokens: int) -> bool:
        loading_s = load_s(num_tokens * bytes_per_token, links)
        return loading_s < compute_s(first_token, first_token + num_tokens, rate)

    # Once faster, always faster: the difference is convex and not above zero at the start.
    slower, faster = 0, 1
    while not is_load_faster(faster):
        if faster >= MAX_TOKENS:
            return None
        slower, faster = faster, faster * 2
    while faster - slower > 1:
        middle = (slower + faster) // 2
        slower, faster = (slower, middle) if is_load_faster(middle) else (middle, faster)
    return slower


MAX_PREFILL_SAMPLES = 32
"""Remembered steps. Fewer react to single outliers; more take longer to follow a change of the engine."""

MIN_PREFILL_SAMPLES = 3
"""Steps before there is a rate: the first ones of an engine compile and warm up."""

MIN_STEP_TOKENS = 32
"""Steps with fewer prompt tokens are ignored: their time does not depend on what they compute."""

MAX_OPEN_STEPS = 16
"""Steps with an outstanding report. An engine has a few in flight; older ones count as lost."""


class PrefillEstimator:
    """Estimates the time per token from the last steps that computed prompts. Scheduler's thread only."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=MAX_PREFILL_SAMPLES)
        self._begun_s: dict[int, tuple[float, int]] = {}
        self._num_steps = 0
        self._reported_s = float("-inf")
        self._is_engine_timed = False
        self._rate: PrefillRate | None = None

    def begin_step(self, num_prompt_tokens: int, now_s: float) -> int | None:
        """Register a planned step and return its number for ``end_step``; None when the step is not measured.

        Args:
            num_prompt_tokens: prompt tokens that it computes.
            now_s: the clock's reading.
        """
        if self._is_engine_timed or num_prompt_tokens < MIN_STEP_TOKENS:
            return None
        self._num_steps += 1
        self._begun_s[self._num_steps] = (now_s, num_prompt_tokens)
        if len(self._begun_s) > MAX_OPEN_STEPS:
            del self._begun_s[next(iter(self._begun_s))]
        return self._num_steps

    def end_step(self, step: int | None, now_s: float) -> None:
        """Learn from a report.

        Args:
            step: its number; None: not measured.
            now_s: the clock's reading.
        """
        begun = None if step is None else self._begun_s.pop(step, None)
        if begun is not None:
            begun_s, num_tokens = begun
            self._add(num_tokens, now_s - max(begun_s, self._reported_s))
        self._reported_s = now_s

    def observe(self, num_tokens: int, time_s: float) -> None:
        """Learn from a prefill time that the engine has measured; steps are not timed from then on.

        Args:
            num_tokens: prompt tokens.
            time_s: seconds for them alone.
        """
        if not self._is_engine_timed:
            self._is_engine_timed = True
            self._begun_s.clear()
            self._samples.clear()
            self._rate = None
        if num_tokens >= MIN_STEP_TOKENS:
            self._add(num_tokens, time_s)

    def rate(self) -> PrefillRate | None:
        """Return the rate of computing prompts, None before MIN_PREFILL_SAMPLES steps."""
        if self._rate is None and len(self._samples) >= MIN_PREFILL_SAMPLES:
            self._rate = PrefillRate(weighted_median(sorted(self._samples)))
        return self._rate

    def present_rate(self) -> PrefillRate | None:
        """Return what ``rate`` would, and change nothing. Thread: any."""
        rate, samples = self._rate, list(self._samples)
        if rate is None and len(samples) >= MIN_PREFILL_SAMPLES:
            rate = PrefillRate(weighted_median(sorted(samples)))
        return rate

    def _add(self, num_tokens: int, time_s: float) -> None:
        if time_s > 0:
            self._samples.append((time_s / num_tokens, num_tokens))
            self._rate = None

    def __len__(self) -> int:
        return len(self._begun_s)


def weighted_median(samples: list[tuple[float, int]]) -> float:
    """Return the value below which half of the weight lies. Pure.

    Args:
        samples: at least one (value, weight), smallest value first.
    """
    half = sum(weight for _, weight in samples) / 2
    passed = 0
    for value, weight in samples:
        passed += weight
        if passed >= half:
            return value
    return samples[-1][0]


MAX_LOAD_SAMPLES = 9
"""Remembered loads. Fewer react to single outliers; more take longer to learn, and a fit costs the square."""

SURPRISE_RATIO = 2.0
"""Ratio of measured to predicted time, or its inverse, from which on the link has changed. Closer to 1, noise discards
what was learned; larger, a link that lost half of its speed is learned sample by sample."""

MIN_SIZE_RATIO = 1.5
"""Ratio of two sizes from which on the difference of their times is used to compute the rate."""


class BandwidthEstimator:
    """Estimates latency and bandwidth from the last loads over one link."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_LOAD_SAMPLES)
        self._was_slow = False
        self._rate: LinkRate | None = None

    def observe(self, num_bytes: float, time_s: float) -> None:
        """Learn from one load; loads without bytes or without time are ignored.

        Args:
            num_bytes: bytes that it moved.
            time_s: seconds in which the link was busy with it.
        """
        if not num_bytes > 0 or not time_s > 0:
            return
        self._note_surprise(num_bytes, time_s)
        self._samples.append((num_bytes, time_s))
        self._rate = None

    def rate(self) -> LinkRate | None:
        """Return the rate of the link, None before the first load."""
        if self._rate is None and self._samples:
            self._rate = fit_rate(list(self._samples))
        return self._rate

    def present_rate(self) -> LinkRate | None:
        """Return what ``rate`` would, and change nothing. Thread: any."""
        rate, samples = self._rate, list(self._samples)
        return fit_rate(samples) if rate is None and samples else rate

    def _note_surprise(self, num_bytes: float, time_s: float) -> None:
        """Discard the samples that the present one contradicts."""
        expected = self.rate()
        if expected is None:
            return
        expected_s = expected.time_s(num_bytes)
        is_slow = time_s > SURPRISE_RATIO * expected_s
        if is_slow and self._was_slow:
            latest = self._samples[-1]
            self._samples.clear()
            self._samples.append(latest)
            is_slow = False
        elif time_s * SURPRISE_RATIO < expected_s:
            self._samples.clear()
        self._was_slow = is_slow

    def __len__(self) -> int:
        return len(self._samples)


def fit_rate(samples: list[tuple[float, float]]) -> LinkRate:
    """Fit the rate of a link to its loads. Pure.

    Args:
        samples: at least one (bytes, seconds), all above zero.
    """
    slopes = [
        (one_s - other_s) / (one - other)
        for (one, one_s), (other, other_s) in combinations(samples, 2)
        if max(one, other) >= MIN_SIZE_RATIO * min(one, other)
    ]
    if not slopes:
        # Sizes are alike: latency and rate cannot be separated, and need not be.
        return LinkRate(1 / median(time_s / num_bytes for num_bytes, time_s in samples))
    slope = median(slopes)
    if slope <= 0:
        # Larger loads were no slower: latency dominates, and the rate is at least the best measured one.
        slope = min(time_s / num_bytes for num_bytes, time_s in samples)
    return LinkRate(1 / slope, max(0.0, median(time_s - num_bytes * slope for num_bytes, time_s in samples)))
