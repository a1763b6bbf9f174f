"""``kvtier verify`` finds every fault, keeps to its rate and its time, and removes what is damaged."""

import json

import pytest
from tests.cli.place.conftest import PLACE, Run
from tests.cli.place.places import MemoryPlace

from kvtier.cli.place.options import advance, progress_bar
from kvtier.cli.place.verify import Pace, ReadingPlan, announce, measure, plan_reading, read_all
from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit.place import Amount, BlockState

pytestmark = pytest.mark.usefixtures("filled")


def test_a_whole_place_ends_with_status_zero_and_says_first_how_long_it_takes(run: Run) -> None:
    status, shown, said = run("verify", PLACE, "--max-bytes-per-s", "1000")
    assert status == 0
    assert "3 whole" in shown
    assert "3 blocks, 300 B at no more than 1000 B/s: takes about 0 s" in said


@pytest.mark.parametrize("state", [BlockState.DAMAGED, BlockState.MOVED, BlockState.UNREADABLE])
def test_a_fault_is_counted_and_named_and_ends_with_status_one(run: Run, state: BlockState) -> None:
    MemoryPlace.states["b-new"] = state
    status, shown, _ = run("verify", PLACE)
    assert status == 1
    assert f"{state.value}: b-new" in shown
    assert "2 whole" in shown
    assert len(MemoryPlace.blocks_by_address) == 3


@pytest.mark.parametrize("state", [BlockState.OTHER_FORMAT, BlockState.BEING_WRITTEN, BlockState.GONE])
def test_what_living_engines_do_is_no_fault(run: Run, state: BlockState) -> None:
    MemoryPlace.states["b-new"] = state
    status, shown, _ = run("verify", PLACE, "--json")
    found = json.loads(shown)
    assert status == 0
    assert found["states"][state.value] == 1
    assert found["num_faults"] == 0


def test_delete_removes_what_is_damaged_and_nothing_else(run: Run) -> None:
    MemoryPlace.states |= {"a-new": BlockState.DAMAGED, "a-old": BlockState.UNREADABLE}
    status, shown, _ = run("verify", PLACE, "--delete", "--json")
    assert status == 1
    assert json.loads(shown)["removed"] == 1
    assert set(MemoryPlace.blocks_by_address) == {"a-old", "b-new"}
    assert MemoryPlace.num_ended == 1


def test_nothing_is_read_where_nothing_may_be_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPlace, "has_owner", True)
    status, shown, said = run("verify", PLACE, "--delete")
    assert (status, shown) == (2, "")
    assert "belongs to process 1" in said
    assert run("verify", PLACE)[0] == 0


class ManualPace:
    """A clock that moves when something waits."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.waited_s: list[float] = []

    def sleep(self, duration_s: float) -> None:
        self.waited_s.append(duration_s)
        self.clock.advance(duration_s)

    def pace(self, rate_bytes: int) -> Pace:
        return Pace(rate_bytes, self.clock, self.sleep)


def test_no_more_is_read_in_a_second_than_allowed() -> None:
    manual = ManualPace()
    pace = manual.pace(1000)
    for _ in range(10):
        pace.spend(500)
    assert pace.elapsed_s == pytest.approx(5.0)
    manual.clock.advance(60.0)
    pace.spend(500)
    assert pace.elapsed_s == pytest.approx(65.0), "a slow place need not wait as well"


@pytest.mark.parametrize(
    ("ratio", "max_duration_s", "expected"),
    [
        (1.0, None, (1.0, 100.0)),
        (0.01, None, (0.01, 1.0)),
        (1.0, 10.0, (0.1, 10.0)),
        (0.01, 10.0, (0.01, 1.0)),
    ],
)
def test_the_share_that_is_read_fits_into_the_time(
    ratio: float, max_duration_s: float | None, expected: tuple[float, float]
) -> None:
    plan = plan_reading(Amount(10, 1000), ratio, 10, max_duration_s)
    assert (plan.ratio, plan.expected_s) == pytest.approx(expected)


def test_an_empty_place_takes_no_time() -> None:
    assert plan_reading(Amount(), 1.0, 10, 1.0).expected_s == 0


def test_a_sample_is_said_to_be_one() -> None:
    text = announce(Amount(1000, 10**6), ReadingPlan(0.01, 10**6, 600))
    assert "a random 1.00% of 1,000 blocks" in text
    assert "10 min" in text


def test_a_sample_reads_the_blocks_that_are_drawn() -> None:
    place = MemoryPlace("here")
    draws = iter([0.4, 0.5, 0.6])
    plan = plan_reading(measure(place), 0.5, 10**9, None)
    result = read_all(place, plan, None, ManualPace().pace(10**9), lambda: next(draws), is_deleting=False)
    assert result.read_bytes == 100


def test_it_ends_when_its_time_has_ended() -> None:
    place = MemoryPlace("here")
    plan = ReadingPlan(1.0, 100, 3.0)
    result = read_all(place, plan, 1.5, ManualPace().pace(100), lambda: 0.0, is_deleting=False)
    assert result.is_cut
    assert result.read_bytes == 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--sample", "0"], "--sample"),
        (["--sample", "1.5"], "--sample"),
        (["--max-duration", "soon"], "--max-duration"),
        (["--max-duration", "0s"], "--max-duration"),
        (["--max-duration", "9999999w"], "--max-duration"),
        (["--max-bytes-per-s", "0"], "--max-bytes-per-s"),
        (["--max-bytes-per-s", "fast"], "--max-bytes-per-s"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(run: Run, options: list[str], named: str) -> None:
    status, shown, said = run("verify", PLACE, *options)
    assert (status, shown) == (2, "")
    assert len(said.splitlines()) == 1
    assert said.startswith(f"kvtier: {named}=")


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_bar("reading", lambda: 100) as progress:
        assert progress is None
        advance(progress, 10)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar("reading", lambda: 100) as progress:
        assert progress is not None
        advance(progress, 10)
        assert progress.tasks[0].percentage == 10
