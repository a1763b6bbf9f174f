"""Everybody works once a round, each begins as often as the others, and rounds end when the ratios are known."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.harness.measurement import FLOOR, OURS
from benchmarks.harness.rounds import Contestant, RoundCount, fixed, order_of, run_rounds, timed


class Recorder:
    """Contestants that write down when they are called, and return how often they have been."""

    def __init__(self, names: str) -> None:
        self.calls: list[str] = []
        self.contestants: dict[str, Contestant] = {name: self._make(name) for name in names}

    def _make(self, name: str) -> Contestant:
        def work() -> Mapping[str, float]:
            self.calls.append(name)
            return {"put": self.calls.count(name), "get": -self.calls.count(name)}

        return work


@pytest.mark.parametrize("num_warmups", [0, 1, 2])
def test_what_warms_is_done_and_not_counted(num_warmups: int) -> None:
    recorder = Recorder("ab")

    measured = run_rounds(recorder.contestants, fixed(2), num_warmups=num_warmups)

    counted = (num_warmups + 1.0, num_warmups + 2.0)
    assert Counter(recorder.calls) == {"a": num_warmups + 2, "b": num_warmups + 2}
    assert measured == {
        "put": {"a": counted, "b": counted},
        "get": {name: tuple(-value for value in counted) for name in "ab"},
    }


def test_every_round_has_everybody_once() -> None:
    recorder = Recorder("abc")

    run_rounds(recorder.contestants, fixed(6), num_warmups=1)

    rounds = [recorder.calls[at : at + 3] for at in range(0, 21, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)


@pytest.mark.parametrize("num_warmups", [0, 1, 2])
@pytest.mark.parametrize(
    ("names", "least", "expected"),
    [
        ("abc", 9, 9),
        ("abcd", 9, 12),
        ("abcde", 9, 10),
        ("ab", 9, 10),
        ("a", 1, 1),
        ("abcd", 1, 4),
        ("abcd", 12, 12),
    ],
)
def test_rounds_are_enough_and_each_begins_equally_often(
    names: str, least: int, expected: int, num_warmups: int
) -> None:
    recorder = Recorder(names)

    measured = run_rounds(recorder.contestants, fixed(least), num_warmups=num_warmups)

    began = Counter(recorder.calls[num_warmups * len(names) :: len(names)])
    assert began == dict.fromkeys(names, expected // len(names))
    assert {len(values) for values in measured["put"].values()} == {expected}


class Noisy:
    """A contestant whose values are these, over and over."""

    def __init__(self, *values: float) -> None:
        self._values: Iterator[float] = itertools.cycle(values)

    def __call__(self) -> Mapping[str, float]:
        """Return the next."""
        return {"put": next(self._values)}


STEADY = Noisy(100.0)


def num_rounds_of(contestants: Mapping[str, Contestant], count: RoundCount) -> int:
    """Return how many rounds counted."""
    return {len(values) for values in run_rounds(contestants, count)["put"].values()}.pop()


def test_no_round_follows_when_the_ratios_are_known() -> None:
    assert num_rounds_of({OURS: Noisy(100.0, 103.0), FLOOR: STEADY}, RoundCount(8, 32)) == 8


def test_rounds_go_on_until_the_ratios_are_known() -> None:
    # Every eighth value is far off: with more rounds the median's interval leaves it out.
    often_off = Noisy(100.0, 101.0, 160.0, 99.0, 100.0, 60.0, 102.0, 98.0, 100.0, 101.0)

    num_rounds = num_rounds_of({OURS: often_off, FLOOR: STEADY}, RoundCount(4, 64))

    assert 4 < num_rounds < 64
    assert num_rounds % 2 == 0


@pytest.mark.parametrize(("most", "expected"), [(4, 4), (21, 20), (24, 24)])
def test_what_is_never_known_ends_with_the_most_rounds_in_which_each_begins_equally_often(
    most: int, expected: int
) -> None:
    contestants: Mapping[str, Contestant] = {
        OURS: Noisy(1.0, 2.0, 2.0, 1.0),
        FLOOR: STEADY,
        "peer": STEADY,
        "b": STEADY,
    }

    assert num_rounds_of(contestants, RoundCount(3, most)) == expected


def test_one_unknown_ratio_of_one_peer_is_enough_to_go_on() -> None:
    contestants: Mapping[str, Contestant] = {
        OURS: STEADY,
        FLOOR: STEADY,
        "peer": Noisy(1.0, 2.0, 2.0, 1.0, 1.0, 2.0),
    }

    assert num_rounds_of(contestants, RoundCount(3, 12)) == 12


def test_who_measures_an_operation_alone_is_alone_in_it() -> None:
    def also_scan() -> Mapping[str, float]:
        return {"put": 1.0, "scan": 3.0}

    measured = run_rounds({"a": also_scan, "b": lambda: {"put": 2.0}}, fixed(2))

    assert measured == {"put": {"a": (1.0, 1.0), "b": (2.0, 2.0)}, "scan": {"a": (3.0, 3.0)}}


def test_every_second_time_through_the_others_follow_in_the_opposite_order() -> None:
    assert [order_of("abc", number) for number in range(7)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "c", "b"],
        ["b", "a", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_nobody_follows_one_of_the_others_much_more_often_than_another(names: str) -> None:
    orders = [order for number in range(2 * len(names)) for order in order_of(names, number)]
    follows = Counter(pair for pair in itertools.pairwise(orders) if pair[0] != pair[1])
    for name in names:
        counts = [follows[before, name] for before in names if before != name]
        assert max(counts) - min(counts) <= 2


def test_a_time_is_what_the_clock_says_before_and_after() -> None:
    now_s = [10.0]

    def work() -> None:
        now_s[0] += 2.5

    assert timed(work, lambda: now_s[0]) == 2.5
