"""Whichever system call of a disk tier fails once, or is the process's last one: every block is whole or a miss."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.tiering.fs.each_call import NUM_BLOCKS, NUM_SLOTS, Ending, Fate

pytestmark = pytest.mark.slow

GUARD_S = 1800.0
LEAST_CALLS = 200
KINDS = {
    "open",
    "flock",
    "fstat",
    "fallocate",
    "preadv",
    "pwritev",
    "write",
    "pread",
    "rename",
    "unlink",
    "mkdir",
    "scandir",
    "close",
}
"""Some that must be among the calls, or the test looks at nothing."""


@pytest.fixture(scope="module", params=["none", "fdatasync"])
def endings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Ending]:
    """Every life of a tier with this durability."""
    command = [
        sys.executable,
        "-m",
        "tests.tiering.fs.each_call",
        str(tmp_path_factory.mktemp("calls")),
        request.param,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=GUARD_S, check=False, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr
    return [Ending(**json.loads(line)) for line in done.stdout.splitlines()]


def test_every_kind_of_call_was_tried_both_ways(endings: list[Ending]) -> None:
    calm, *others = endings
    assert calm.stored == calm.found == list(range(NUM_BLOCKS))
    assert not calm.refused
    for fate in (Fate.FAILS, Fate.LAST):
        tried = Counter(each.call.split()[1] for each in others if each.fate == fate.value)
        assert tried.total() >= LEAST_CALLS
        assert set(tried) >= KINDS
    num_killed = sum(each.is_killed for each in others)
    # Threads take turns, so a life may end before the planned call comes.
    assert num_killed >= 0.9 * len(others) / 2


def test_no_block_is_wrong_and_none_is_found_that_cannot_be_loaded(endings: list[Ending]) -> None:
    assert not [each for each in endings if each.wrong or each.unreadable]


def test_an_engine_meets_no_error_and_the_next_one_starts(endings: list[Ending]) -> None:
    assert not [each for each in endings if each.raised]
    assert not [each for each in endings if len(each.refused) > (each.fate == Fate.FAILS.value)]
    assert not [each for each in endings if each.num_open]


def test_what_was_reported_is_found_whatever_call_was_the_last_one(endings: list[Ending]) -> None:
    assert not [
        each for each in endings if each.fate == Fate.LAST.value and not set(each.stored) <= set(each.found)
    ]


def test_a_call_that_fails_costs_a_few_of_the_oldest_blocks_at_most(endings: list[Ending]) -> None:
    """Where a pack cannot be made, as on a full disk, blocks are evicted until it is tried again."""
    for each in endings:
        lost = set(each.stored) - set(each.found)
        assert len(lost) <= (NUM_SLOTS if each.fate == Fate.FAILS.value else 0), each
