"""Two runs agree where their ratios are within 15 % of each other, whichever is larger; what only one has is named."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.benchmarks.fake_suite import FAST, SLOW, install_suite, yielding

from benchmarks.harness.agreement import (
    Agreement,
    Comparison,
    Ratio,
    RatioName,
    compare_folders,
    compare_runs,
    lines_of,
    ratios_of,
)
from benchmarks.harness.measurement import FLOOR, OURS, Measurement
from benchmarks.harness.run import run_suite


def named(
    suite: str = "fs", operation: str = "put", other: str | None = FLOOR, occurrence: int = 0
) -> RatioName:
    """Return the name of a ratio."""
    return RatioName(suite, (("operation", operation), ("blocks", 16384)), other, occurrence)


def line(operation: str = "put", **medians: float) -> dict[str, object]:
    """Return a measurement as JSON has it, as far as it is read."""
    ratios = {
        other: {"median": median, "low": median, "high": 2 * median} for other, median in medians.items()
    }
    return {
        "labels": {"operation": operation, "blocks": 16384},
        "unit": "MiB/s",
        "values": {OURS: [1.0, 2.0, 3.0]},
        "ratios": ratios,
    }


def ratio(median: float) -> Ratio:
    """Return a ratio with the spread and the rounds of ``line``."""
    return Ratio(median, spread=1.0, num_rounds=3)


@pytest.mark.parametrize(
    ("first", "second", "apart", "is_within"),
    [
        pytest.param(0.8, 0.8, 0.0, True, id="the same"),
        pytest.param(1.0, 1.14, 0.14, True, id="a little more"),
        pytest.param(1.14, 1.0, 0.14, True, id="a little less"),
        pytest.param(1.0, 1.16, 0.16, False, id="too much more"),
        pytest.param(1.16, 1.0, 0.16, False, id="too much less"),
        pytest.param(
            1.0, 0.86, 1 / 0.86 - 1, False, id="less by 14 % of the larger is more than 15 % of the smaller"
        ),
        pytest.param(2.0, 4.0, 1.0, False, id="twice"),
    ],
)
def test_two_ratios_agree_when_the_larger_exceeds_the_smaller_by_little(
    first: float, second: float, apart: float, is_within: bool
) -> None:
    agreement = Agreement(named(), Ratio(first, 0.0, 1), Ratio(second, 0.0, 1))

    assert agreement.apart == pytest.approx(apart)
    assert agreement.is_within is is_within


def test_ratios_of_a_document_are_named_after_line_and_contestant() -> None:
    document = {"measurements": [line("put", floor=0.9, peer=2.0), line("get"), line("get", floor=0.7)]}

    assert ratios_of("fs", document) == {
        named(): ratio(0.9),
        named(other="peer"): ratio(2.0),
        named(operation="get"): ratio(0.7),
    }


def test_a_line_that_comes_twice_is_two_ratios() -> None:
    document = {"measurements": [line(floor=0.9), line(floor=0.3)]}

    assert ratios_of("fs", document) == {named(): ratio(0.9), named(occurrence=1): ratio(0.3)}


@pytest.mark.parametrize("unit", ["ratio", "times"])
def test_a_value_that_is_a_ratio_by_itself_is_one(unit: str) -> None:
    alone = line() | {"unit": unit, "values": {OURS: [1.0, 2.0, 6.0, 3.0, 2.0]}}
    compared = line(floor=0.9) | {"unit": unit}

    assert ratios_of("fs", {"measurements": [alone, compared, line()]}) == {
        named(other=None): Ratio(2.0, spread=0.5, num_rounds=5),
        named(): ratio(0.9),
    }


def test_few_rounds_and_a_wide_spread_are_seen() -> None:
    agreement = Agreement(named(), Ratio(0.9, 0.02, 12), Ratio(0.95, 0.4, 2))

    head, found, _ = lines_of(Comparison((agreement,), (), ()))

    assert head.split()[-2:] == ["spread", "rounds"]
    assert found.split()[-2:] == ["40%", "2"], "the worse of both runs"


def test_ratios_are_paired_by_name_and_the_rest_is_told() -> None:
    first = {named(): ratio(1.0), named("obj"): ratio(1.0), named(other="peer"): ratio(3.0)}
    second = {named("obj"): ratio(2.0), named(): ratio(1.1), named(operation="get"): ratio(1.0)}

    comparison = compare_runs(first, second)

    assert comparison == Comparison(
        (
            Agreement(named(), ratio(1.0), ratio(1.1)),
            Agreement(named("obj"), ratio(1.0), ratio(2.0)),
        ),
        (named(other="peer"),),
        (named(operation="get"),),
    )
    assert comparison.num_within == 1


def test_what_two_runs_have_kept_is_compared_ratio_by_ratio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slower = replace(FAST, values={**FAST.values, OURS: (10.0, 10.0, 30.0)})
    keep(monkeypatch, tmp_path / "a", [FAST, SLOW])
    keep(monkeypatch, tmp_path / "b", [slower, SLOW])
    (tmp_path / "a" / "fake.svg").write_text("a picture is no JSON")

    comparison = compare_folders(tmp_path / "a", tmp_path / "b")

    found = [
        (one.name.other, one.first.median, one.second.median, one.is_within) for one in comparison.agreements
    ]
    assert found == [(FLOOR, 1.0, 0.5, False), ("peer", 4.0, 2.0, False), (FLOOR, 1.0, 1.0, True)]
    assert comparison.num_within == 1


def keep(monkeypatch: pytest.MonkeyPatch, folder: Path, measurements: list[Measurement]) -> None:
    """Run a suite that measures nothing and keep its numbers."""
    folder.mkdir()
    suite = install_suite(monkeypatch, yielding(measurements))
    run_suite(suite, json_path=folder / "fake.json", out=io.StringIO())


def test_a_run_without_anything_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: has no JSON file.*--out"):
        compare_folders(tmp_path, tmp_path)
    with pytest.raises(FileNotFoundError):
        compare_folders(tmp_path / "none", tmp_path)


LABELS, SPREAD = {"a": "b"}, {"median": 1.0, "low": 1.0, "high": 1.0}


def as_text(labels: object, spread: object, values: object) -> str:
    """Return a document of one line."""
    found = {"labels": labels, "unit": "s", "values": {OURS: values}, "ratios": {FLOOR: spread}}
    return json.dumps({"measurements": [found]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "3",
        '{"measurements": 3}',
        '{"measurements": [3]}',
        as_text([], SPREAD, [1.0]),
        as_text({"a": []}, SPREAD, [1.0]),
        as_text(LABELS, {}, [1.0]),
        as_text(LABELS, SPREAD | {"median": 0.0}, [1.0]),
        as_text(LABELS, SPREAD | {"median": "fast"}, [1.0]),
        as_text(LABELS, SPREAD, ["fast"]),
        as_text(LABELS, SPREAD, 1.0),
    ],
)
def test_a_file_that_no_benchmark_has_written_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=f"{path}: is not a benchmark's file"):
        compare_folders(tmp_path, tmp_path)


def test_lines_say_how_far_apart_each_is_and_how_many_agree() -> None:
    comparison = Comparison(
        (
            Agreement(named(), ratio(0.9), ratio(0.95)),
            Agreement(named("transfer", "get"), ratio(0.5), ratio(1.0)),
        ),
        (named(other="peer"),),
        (named("obj"),),
    )

    head, near, far, *missing, summary = lines_of(comparison)

    assert head.split()[-5:] == ["first", "second", "apart", "spread", "rounds"]
    assert near.split() == ["fs:", "put", "16,384,", "of", "floor", "0.90", "0.95", "6%", "100%", "3"]
    assert far.split()[-6:] == ["1.00", "100%", "100%", "3", "too", "far"]
    assert len(head) == len(near)
    assert missing == [
        "only in the first run: fs: put 16,384, of peer",
        "only in the second run: obj: put 16,384, of floor",
    ]
    assert summary == "1 of 2 ratios are within 15% of each other"


def test_runs_with_nothing_in_common_have_a_summary_only() -> None:
    assert list(lines_of(Comparison((), (), ()))) == ["0 of 0 ratios are within 15% of each other"]


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "fs.json"
    path.write_text(json.dumps({"suite": "fs", "measurements": [line(floor=0.9)]}))

    (agreement,) = compare_folders(tmp_path, tmp_path).agreements

    assert agreement == Agreement(named(), ratio(0.9), ratio(0.9))
