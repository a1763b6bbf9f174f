"""``kvtier bench`` lists the benchmarks of the source tree, runs those it is given, and refuses what there is not."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.benchmarks.fake_suite import FAST, install_suite, yielding

from benchmarks import suites
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.suite import Options
from kvtier.cli import bench, main


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two suites that measure nothing be the only ones."""
    monkeypatch.setattr(
        suites,
        "SUITES",
        tuple(
            install_suite(monkeypatch, yielding([FAST], f"note of {name}"), name) for name in ("one", "two")
        ),
    )


def test_without_a_name_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [suite.name for suite in suites.SUITES]
    assert all(line.endswith(suite.summary) for line, suite in zip(lines, suites.SUITES, strict=True))


@pytest.mark.usefixtures("fakes")
def test_those_that_are_named_are_run_in_that_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "two", "one", "--quick", "--out", str(tmp_path / "kept")]) == 0

    shown = capsys.readouterr().out
    assert 0 <= shown.index("two: what two measures") < shown.index("one: what one measures")
    assert {"one.json", "two.json"} <= {path.name for path in (tmp_path / "kept").iterdir()}


@pytest.mark.usefixtures("fakes")
def test_all_of_them_are_run_when_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "all", "--quick"]) == 0

    shown = capsys.readouterr().out
    assert 0 <= shown.index("one: what one measures") < shown.index("two: what two measures")


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("names", [["three"], ["one", "three"]])
def test_a_name_that_is_none_is_one_line_and_nothing_runs(
    names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", *names]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line == "kvtier: NAME='three': no benchmark 'three': choose among one, two"


@pytest.mark.usefixtures("fakes")
def test_two_kept_runs_are_compared_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    for names, folder in ((["one", "two"], first), (["two"], second)):
        assert main.main(["bench", *names, "--out", folder]) == 0
    capsys.readouterr()

    assert main.main(["bench", "--compare", first, second]) == 0

    head, *lines, summary = capsys.readouterr().out.splitlines()
    assert head.split()[-5:] == ["first", "second", "apart", "spread", "rounds"]
    assert [line.split()[-5:-2] for line in lines[:2]] == [["1.00", "1.00", "0%"], ["4.00", "4.00", "0%"]]
    assert lines[2:] == [f"only in the first run: one: put 16, of {other}" for other in ("floor", "peer")]
    assert summary == "2 of 2 ratios are within 15% of each other"


@pytest.mark.usefixtures("fakes")
def test_with_json_stdout_has_the_documents_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "one", "two", "--quick", "--out", str(tmp_path), "--json"]) == 0

    shown = capfd.readouterr()
    runs = json.loads(shown.out)["runs"]
    assert runs == [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")]
    assert shown.err.index("one: what one measures") < shown.err.index("two: what two measures")


def test_with_json_what_a_suite_prints_itself_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measure(options: Options) -> Iterator[Measurement]:
        del options
        print("printed here")
        subprocess.run([sys.executable, "-c", "print('printed by a child')"], check=True)
        yield FAST

    monkeypatch.setattr(suites, "SUITES", (install_suite(monkeypatch, measure, "one"),))

    assert main.main(["bench", "one", "--json"]) == 0

    shown = capfd.readouterr()
    assert [run["suite"] for run in json.loads(shown.out)["runs"]] == ["one"]
    assert {"printed here", "printed by a child"} <= set(shown.err.splitlines())
    print("later")
    assert capfd.readouterr().out == "later\n"


@pytest.mark.usefixtures("fakes")
def test_the_list_and_a_comparison_are_printed_as_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "suites": [{"name": name, "summary": f"what {name} measures"} for name in ("one", "two")]
    }
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    for names, folder in ((["one", "two"], first), (["two"], second)):
        assert main.main(["bench", *names, "--out", folder]) == 0
    capfd.readouterr()

    assert main.main(["bench", "--compare", first, second, "--json"]) == 0

    found = json.loads(capfd.readouterr().out)
    assert [(one["suite"], one["of"], one["apart"], one["is_within"]) for one in found["ratios"]] == [
        ("two", "floor", 0.0, True),
        ("two", "peer", 0.0, True),
    ]
    assert found["only_first"][0] == {"suite": "one", "labels": FAST.labels, "of": "floor"}
    assert found["only_second"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_ended_from_outside_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    seen: list[Path] = []

    def measure(options: Options) -> Iterator[Measurement]:
        with options.new_folder() as folder:
            (folder / "block").write_bytes(b"bytes")
            seen.append(folder)
            yield FAST
            signal.raise_signal(number)

    monkeypatch.setattr(suites, "SUITES", (install_suite(monkeypatch, measure, "one"),))
    before = signal.getsignal(signal.SIGTERM)

    assert main.main(["bench", "one", "--dir", str(tmp_path)]) == 130

    assert [folder.parent for folder in seen] == [tmp_path]
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ["none", "empty"])
def test_a_run_that_kept_nothing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert main.main(["bench", "one", "--out", str(tmp_path / "kept")]) == 0
    capsys.readouterr()

    assert main.main(["bench", "--compare", str(tmp_path / "kept"), str(tmp_path / name)]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert str(tmp_path / name) in line


def test_without_the_source_tree_one_line_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SOURCE_TREE", tmp_path)

    assert main.main(["bench"]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert str(tmp_path) in line
    assert "clone" in line
