"""One tier after another; what is not installed or does not start is a note, what fails later is a failure."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from tests.benchmarks.fake_suite import FAST, SLOW

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.suite import Options
from benchmarks.tiers import suite
from benchmarks.tiers.suite import Place
from kvtier.errors import TierError


class FakeTier(ModuleType):
    """A tier's module, with a server that is a folder.

    Args:
        name: the tier's.
        found: what it measures; an error is raised instead.
        why_not: why its server does not start, None when it does.
    """

    def __init__(self, name: str, found: Measurement | Exception, why_not: str | None = None) -> None:
        super().__init__(f"benchmarks.tiers.{name}")
        self.found, self.why_not = found, why_not
        self.folders: list[Path] = []
        self.has_ended = False

    @contextmanager
    def open_server(self, folder: Path) -> Iterator[Place]:
        self.folders.append(folder)
        if self.why_not is not None:
            raise TierError(self.__name__, self.why_not)
        try:
            yield {"url": str(folder)}
        finally:
            self.has_ended = True

    def measure(self, options: Options, place: Place) -> Iterator[Measurement]:
        assert Path(place["url"]).is_dir()
        if isinstance(self.found, Exception):
            raise self.found
        yield self.found


@pytest.fixture
def notes() -> list[str]:
    """Return where a suite's notes go."""
    return []


@pytest.fixture
def options(tmp_path: Path, notes: list[str]) -> Options:
    """Return a quick run in a folder of the test's own."""
    return Options(is_quick=True, folder=tmp_path, note=notes.append)


def install(monkeypatch: pytest.MonkeyPatch, **tiers: FakeTier | None) -> None:
    """Let these be the suite's tiers; None cannot be imported."""
    monkeypatch.setattr(suite, "TIERS", tuple(tiers))
    for name, module in tiers.items():
        monkeypatch.setitem(sys.modules, f"benchmarks.tiers.{name}", module)


def test_tiers_follow_one_another_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, options: Options, notes: list[str], tmp_path: Path
) -> None:
    one, two = FakeTier("one", FAST), FakeTier("two", SLOW)
    install(monkeypatch, one=one, two=two)

    assert list(suite.measure(options)) == [FAST, SLOW]

    assert notes == []
    assert one.has_ended
    assert two.has_ended
    assert [folder.parent for folder in one.folders + two.folders] == [tmp_path, tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_a_server_ends_before_the_next_begins(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    one, two = FakeTier("one", FAST), FakeTier("two", SLOW)
    install(monkeypatch, one=one, two=two)

    found = suite.measure(options)

    assert next(found) is FAST
    assert (one.has_ended, two.folders) == (False, [])
    assert next(found) is SLOW
    assert one.has_ended


def test_what_is_missing_is_a_note_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, options: Options, notes: list[str], tmp_path: Path
) -> None:
    install(
        monkeypatch,
        absent=None,
        dead=FakeTier("dead", FAST, "its server did not start: no such program"),
        well=FakeTier("well", SLOW),
    )

    assert list(suite.measure(options)) == [SLOW]

    absent, dead = notes
    assert absent.startswith("absent was not measured: ")
    assert dead.startswith("dead was not measured: ")
    assert dead.endswith("no such program")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [TierError("valkey", "the server is gone"), AssertionError("the tier hangs")]
)
def test_a_failure_while_it_measures_is_not_disguised_as_something_missing(
    monkeypatch: pytest.MonkeyPatch, options: Options, notes: list[str], error: Exception, tmp_path: Path
) -> None:
    broken = FakeTier("broken", error)
    install(monkeypatch, broken=broken)

    with pytest.raises(type(error)):
        list(suite.measure(options))

    assert notes == []
    assert broken.has_ended
    assert list(tmp_path.iterdir()) == []
