"""Everybody works once a round, each begins as often as the others, and rounds that warm do not count."""

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest

from benchmarks.harness.rounds import Contestant, order_of, run_rounds, timed


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

    measured = run_rounds(recorder.contestants, 2, num_warmups=num_warmups)

    counted = (num_warmups + 1.0, num_warmups + 2.0)
    assert Counter(recorder.calls) == {"a": num_warmups + 2, "b": num_warmups + 2}
    assert measured == {
        "put": {"a": counted, "b": counted},
        "get": {name: tuple(-value for value in counted) for name in "ab"},
    }


def test_every_round_has_everybody_once() -> None:
    recorder = Recorder("abc")

    run_rounds(recorder.contestants, 5, num_warmups=1)

    rounds = [recorder.calls[at : at + 3] for at in range(0, 18, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)


@pytest.mark.parametrize("num_warmups", [0, 1, 2])
@pytest.mark.parametrize("num_rounds", [3, 6, 7])
def test_each_begins_as_often_as_the_others_in_rounds_that_count(num_rounds: int, num_warmups: int) -> None:
    recorder = Recorder("abc")

    run_rounds(recorder.contestants, num_rounds, num_warmups=num_warmups)

    began = Counter(recorder.calls[3 * num_warmups :: 3])
    assert began.keys() == {"a", "b", "c"}
    assert max(began.values()) - min(began.values()) == (0 if num_rounds % 3 == 0 else 1)


def test_who_measures_an_operation_alone_is_alone_in_it() -> None:
    def also_scan() -> Mapping[str, float]:
        return {"put": 1.0, "scan": 3.0}

    measured = run_rounds({"a": also_scan, "b": lambda: {"put": 2.0}}, 1)

    assert measured == {"put": {"a": (1.0,), "b": (2.0,)}, "scan": {"a": (3.0,)}}


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
