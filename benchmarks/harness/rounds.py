"""Contestants take turns, round by round, each as often first as the others.

It measures nothing itself: a contestant does its work once and returns what it measured of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence

Contestant = Callable[[], Mapping[str, float]]
"""Does its work once; returns what it measured, by operation."""


def run_rounds(
    contestants: Mapping[str, Contestant], num_rounds: int, *, num_warmups: int = 1
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return what each contestant measured: operation -> contestant -> one value a round.

    Args:
        contestants: by name. What one leaves to the machine falls on the next, so each round begins with another.
        num_rounds: rounds that count; each contestant is first equally often when it is a multiple of their number.
        num_warmups: rounds before them, which warm memory, files and threads.
    """
    measured: dict[str, dict[str, list[float]]] = {}
    names = list(contestants)
    for number in range(num_warmups + num_rounds):
        for name in order_of(names, number):
            for operation, value in contestants[name]().items():
                if number >= num_warmups:
                    measured.setdefault(operation, {}).setdefault(name, []).append(value)
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
