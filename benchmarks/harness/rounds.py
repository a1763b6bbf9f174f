"""Contestants run in turns, round by round, each first equally often, until their ratios are precise.

A contestant does its work once per call and returns its measured values.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.precision import is_known

Contestant = Callable[[], Mapping[str, float]]
"""Does its work once; returns its measured values by operation."""

MOST_FACTOR = 4
"""Factor for the number of rounds where a ratio is imprecise. Some stay so, such as those of a server on the same
cores: four times the rounds halve the error, and the suites must end within minutes."""


@dataclass(frozen=True, slots=True)
class RoundCount:
    """The number of measured rounds.

    Attributes:
        least: lower limit, rounded up so that each contestant begins equally often.
        most: upper limit, however imprecise the ratios are.
    """

    least: int
    most: int

    def with_most(self, factor: int) -> "RoundCount":
        """Return a count with ``factor`` times as many rounds at most, for rounds that take milliseconds. Pure."""
        return RoundCount(self.least, self.most if self.most == self.least else factor * self.most)


def fixed(num_rounds: int) -> RoundCount:
    """Return a count that does not depend on the measured values. Pure."""
    return RoundCount(num_rounds, num_rounds)


def run_rounds(
    contestants: Mapping[str, Contestant], num_rounds: RoundCount, *, num_warmups: int = 1
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return the measured values: operation -> contestant -> one value per round.

    Args:
        contestants: by name. Each affects the machine for the next one, so each round begins with another.
        num_rounds: number of measured rounds. After the least of them, more follow until the ratios are precise.
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

    In as many rounds as there are names each begins once. Every second cycle the others follow in the opposite order,
    so that a contestant does not always affect the same next one.
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
    """Return whether the rounds so far, with these values, are enough. Pure."""
    if num_rounds < count.least or num_rounds % num_contestants:
        return False
    return num_rounds + num_contestants > count.most or is_known(measured)
