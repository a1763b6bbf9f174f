"""Each way of running kvtier is paired, in every round, with an engine that has none of it."""

from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from benchmarks.engine import no_hit
from benchmarks.engine.models import make_model
from benchmarks.harness.measurement import OURS
from benchmarks.harness.rounds import order_of
from benchmarks.harness.suite import Options


@pytest.mark.slow
def test_every_case_has_its_pairs_and_the_rest_of_the_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_hit, "make_model", lambda: make_model(1, 64))
    monkeypatch.setattr(no_hit, "PROMPT_TOKENS", 32)
    monkeypatch.setattr(no_hit, "NUM_QUICK_PAIRS", 6)
    monkeypatch.setattr(no_hit, "NUM_WARMUPS", 1)
    notes: list[str] = []

    lines = list(no_hit.measure(Options(True, None, notes.append)))

    assert [line.labels["time with / without"] for line in lines] == [
        name for name in ("none: the control", "host", "host and fs") for _ in range(3)
    ]
    assert {line.labels["pairs"] for line in lines} == {8}, "whole turns of four engines"
    assert all(line.values[OURS][0] > 0 for line in lines)
    assert [line.bar and line.bar.value for line in lines] == [
        *(None, None, None),
        *(None, None, 1.02),
        *(None, None, 1.04),
    ]
    assert [note.partition(":")[0] for note in notes] == ["host", "host and fs"]


def test_there_are_at_least_a_hundred_pairs_and_no_engine_is_always_after_another() -> None:
    assert no_hit.NUM_PAIRS >= 100
    names = list(no_hit.settings_of(Path("folder")))
    orders = [order_of(names, number) for number in range(2 * len(names))]

    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
    before = {order[order.index(no_hit.PLAIN) - 1] for order in orders if order[0] != no_hit.PLAIN}
    assert len(before) > 1


def test_an_answer_that_found_something_ends_the_run() -> None:
    engine = no_hit.open_engine(make_model(1, 64), None)
    with engine:
        no_hit.answer_next(engine, count(3))
        with pytest.raises(SystemExit):
            no_hit.answer_next(engine, count(3))
