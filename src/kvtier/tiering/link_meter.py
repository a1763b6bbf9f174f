"""How fast a link is, learned from the last few loads over it.

It times nothing: whoever sees a load end says how many bytes it moved and how long that took. Few samples are kept, so
that a link that has changed is believed soon, and the fit is made of medians, so that one load that stuttered says
little. The slope between samples of different size is the rate, what is left is the latency (Theil and Sen). Two rules
make it quick where the whole window has become wrong: a load twice as fast as foretold counts alone from then on,
because a link that was given up must be taken up again at once; two in a row twice as slow count alone as well.

Source: Theil, "A rank-invariant method of linear and polynomial regression analysis" (1950); Sen (1968).
"""

from collections import deque
from itertools import combinations
from statistics import median

from kvtier.load_cost import LinkRate

MAX_SAMPLES = 9
"""Loads that are remembered. Fewer follow every stutter; more take longer to learn, and a fit costs the square."""

SURPRISE_RATIO = 2.0
"""How far from what was foretold a load has to be to say that the link has changed. Closer to 1, noise throws away
what was learned; larger, a link that has lost half of its speed is learned sample by sample."""

MIN_SIZE_RATIO = 1.5
"""How far apart two sizes have to be for the difference of their times to say something of the rate."""


class LinkMeter:
    """The last loads over one link."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._was_slow = False
        self._rate: LinkRate | None = None

    def add(self, num_bytes: float, time_s: float) -> None:
        """Learn from one load; one without bytes, or without time, says nothing.

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
        """Return how fast the link is, None before the first load."""
        if self._rate is None and self._samples:
            self._rate = fit_rate(list(self._samples))
        return self._rate

    def _note_surprise(self, num_bytes: float, time_s: float) -> None:
        """Forget what the present sample shows to be of another time."""
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
    """Return the rate of a link whose loads moved so many bytes in so many seconds. Pure.

    Args:
        samples: at least one (bytes, seconds), all above zero.
    """
    slopes = [
        (one_s - other_s) / (one - other)
        for (one, one_s), (other, other_s) in combinations(samples, 2)
        if max(one, other) >= MIN_SIZE_RATIO * min(one, other)
    ]
    if not slopes:
        # Sizes are alike: there is no telling latency from rate, and no need to.
        return LinkRate(1 / median(time_s / num_bytes for num_bytes, time_s in samples))
    slope = median(slopes)
    if slope <= 0:
        # Larger loads were no slower: the latency is nearly all, and the rate is at least the best that was seen.
        slope = min(time_s / num_bytes for num_bytes, time_s in samples)
    return LinkRate(1 / slope, max(0.0, median(time_s - num_bytes * slope for num_bytes, time_s in samples)))
