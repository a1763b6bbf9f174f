"""Contestants take turns, round by round, each as often first as the others, until their ratios are known.

It measures nothing itself: a contestant does its work once and returns what it measured of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.precision import is_known

Contestant = Callable[[], Mapping[str, float]]
"""Does its work once; returns what it measured, by operation."""

MOST_FACTOR = 4
"""How many times as many rounds there are at most where a ratio is hard to know. Some never are: what goes through a
server on the same cores; four times the rounds halve what is not known, and the suites must end within minutes."""


@dataclass(frozen=True, slots=True)
class RoundCount:
    """How many rounds count.

    Attributes:
        least: at least so many, and as many more as make each contestant begin equally often.
        most: after so many there are no others, however little is known.
    """

    least: int
    most: int

    def with_most(self, factor: int) -> "RoundCount":
        """Return a count that goes on up to ``factor`` times as long, for rounds that take milliseconds. Pure."""
        return RoundCount(self.least, self.most if self.most == self.least else factor * self.most)


def fixed(num_rounds: int) -> RoundCount:
    """Return a count for which it does not matter what is measured. Pure."""
    return RoundCount(num_rounds, num_rounds)


def run_rounds(
    contestants: Mapping[str, Contestant], num_rounds: RoundCount, *, num_warmups: int = 1
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return what each contestant measured: operation -> contestant -> one value a round.

    Args:
        contestants: by name. What one leaves to the machine falls on the next, so each round begins with another.
        num_rounds: that count. After the least of them more follow until the ratios of ours to the others are known.
        num_warmups: rounds before them, which warm memory, files and threads.
    """
    measured: dict[str, dict[str, list[float]]] = {}
    names = list(contestants)
    number = 0
    while not _is_enough(number - num_warmups, num_rounds, len(names), measured):
        for name in order_of(names, number):
            for operation, value in contestants[name]().items():
                if number >= num_warmups:
                    measured.setdefault(operation, {}).setdefault(name, []).append(value)
        number += 1
    return {
        operation: {name: tuple(of_name[name]) for name in names if name in of_name}
        for operation, of_name in measured.items()
    }


def order_of(names: Sequence[str], number: int) -> Sequence[str]:
    """Return ``names`` in the order of round ``number``. Pure.

    In as many rounds as there are names each begins once. Every second time through the others follow in the opposite
    order: what one leaves to the machine must not always fall on the same next one.
    """
    time_through, first = divmod(number, len(names))
    begins, *others = [*names[first:], *names[:first]]
    return [begins, *(others[::-1] if time_through % 2 else others)]


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that ``action`` takes."""
    begun_s = clock()
    action()
    return clock() - begun_s


def _is_enough(
    num_rounds: int,
    count: RoundCount,
    num_contestants: int,
    measured: Mapping[str, Mapping[str, Sequence[float]]],
) -> bool:
    """Return whether so many rounds, in which that was measured, will do. Pure."""
    if num_rounds < count.least or num_rounds % num_contestants:
        return False
    return num_rounds + num_contestants > count.most or is_known(measured)
