"""How fast the engine computes prompts, learned from the steps that do.

It has no clock. A step's time runs from when it was planned to when it was reported, but not from before the step in
front of it was reported: engines plan ahead, and the time between the two is the other step's. So pauses of the engine
do not count, and neither does what it does with no prompt at hand. Steps are told apart by a number that goes to the
workers and comes back, because not every engine reports each step. An engine that knows better says so itself, and is
believed from then on. What counts is the median over the last steps, each weighed by its tokens.
"""

from collections import deque

from kvtier.load_cost import PrefillRate

MAX_SAMPLES = 32
"""Steps that are remembered. Fewer follow every odd step; more take longer to see that the engine has changed."""

MIN_SAMPLES = 3
"""Steps before there is a rate: the first ones of an engine compile and warm up."""

MIN_STEP_TOKENS = 32
"""Prompt tokens below which a step says nothing: its time is that of a step, whatever it computes."""

MAX_OPEN_STEPS = 16
"""Steps whose report is awaited. An engine has a few under way; more have lost theirs."""


class PrefillMeter:
    """The last steps that computed prompts. Used from the scheduler's thread."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)
        self._begun_s: dict[int, tuple[float, int]] = {}
        self._num_steps = 0
        self._reported_s = float("-inf")
        self._is_told = False
        self._rate: PrefillRate | None = None

    def begin_step(self, num_prompt_tokens: int, now_s: float) -> int | None:
        """Note a step that is planned; return the number to report it under, None when nobody has to.

        Args:
            num_prompt_tokens: tokens of prompts that it computes.
            now_s: the clock's reading.
        """
        if self._is_told or num_prompt_tokens < MIN_STEP_TOKENS:
            return None
        self._num_steps += 1
        self._begun_s[self._num_steps] = (now_s, num_prompt_tokens)
        if len(self._begun_s) > MAX_OPEN_STEPS:
            del self._begun_s[next(iter(self._begun_s))]
        return self._num_steps

    def end_step(self, step: int | None, now_s: float) -> None:
        """Learn from a report.

        Args:
            step: its number; None when the step has none.
            now_s: the clock's reading.
        """
        begun = None if step is None else self._begun_s.pop(step, None)
        if begun is not None:
            begun_s, num_tokens = begun
            self._add(num_tokens, now_s - max(begun_s, self._reported_s))
        self._reported_s = now_s

    def tell(self, num_tokens: int, time_s: float) -> None:
        """Take the word of an engine that knows how long it has computed.

        Args:
            num_tokens: prompt tokens.
            time_s: seconds for them alone.
        """
        if not self._is_told:
            self._is_told = True
            self._begun_s.clear()
            self._samples.clear()
            self._rate = None
        if num_tokens >= MIN_STEP_TOKENS:
            self._add(num_tokens, time_s)

    def rate(self) -> PrefillRate | None:
        """Return how fast prompts are computed, None before MIN_SAMPLES steps."""
        if self._rate is None and len(self._samples) >= MIN_SAMPLES:
            self._rate = PrefillRate(weighted_median(sorted(self._samples)))
        return self._rate

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
