"""What an engine answered, and when two answers count as the same.

Greedy tokens of a random model are decided by margins that are often small, so equal tokens alone prove little and
unequal ones may be rounding. The log-probabilities of the answer tell: with the same cache they agree to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LOGPROB_TOLERANCE = 2e-3
"""Largest difference of a log-probability that rounding explains: float32, other batch sizes and chunks. Seen without
kvtier between concurrency 1 and 8: below 2e-4. A block that is zeroed or swapped moves some by more than 0.02."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt.

    Attributes:
        tokens: what was generated.
        logprobs: the log-probability of each of them.
        num_cached_tokens: prompt tokens that were not computed, from the device or from kvtier.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int


def largest_difference(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Return the largest difference of log-probabilities; infinite where tokens differ."""
    assert len(answers) == len(others)
    worst = 0.0
    for answer, other in zip(answers, others, strict=True):
        if answer.tokens != other.tokens:
            return float("inf")
        pairs = zip(answer.logprobs, other.logprobs, strict=True)
        worst = max(worst, *(abs(one - two) for one, two in pairs))
    return worst


def assert_same(answers: Sequence[Answer], others: Sequence[Answer]) -> None:
    """Fail unless tokens are equal and log-probabilities agree."""
    for position, (answer, other) in enumerate(zip(answers, others, strict=True)):
        assert answer.tokens == other.tokens, f"answer {position} has other tokens"
    difference = largest_difference(answers, others)
    assert difference <= LOGPROB_TOLERANCE, f"log-probabilities differ by {difference}"


def assert_clearly_other(answers: Sequence[Answer], others: Sequence[Answer]) -> None:
    """Fail unless the answers differ by ten times what rounding explains."""
    assert largest_difference(answers, others) > 10 * LOGPROB_TOLERANCE
