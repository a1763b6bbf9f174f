"""The traced path has what a store and a load must run, and its numbers follow from its calls."""

import re

import pytest

from scripts.trace_path import Call, Section, TracedPath, main, num_calls_of_a_key, summary, tree

LOOKUP = Call(1, "tiering/manager.py", "TieringOffloadingManager.lookup")
ASK = Call(2, "tiering/guard.py", "GuardedTier.lookup")
END = Call(0, "connector/scheduler.py", "end")


def miss(*calls: Call) -> Section:
    return Section(TracedPath.MISS, "search", {"MainThread": list(calls)})


def test_the_summary_has_numbers_for_the_miss_the_store_and_the_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--summary"]) == 0

    lines = capsys.readouterr().out.splitlines()
    found = [
        re.fullmatch(
            r"(\w+): (\d+) (functions, (\d+) files|calls for a key, the poll of the step among them)", line
        )
        for line in lines
    ]
    assert [match and match[1] for match in found] == ["MISS", "MISS", "STORE", "LOAD"]
    assert all(match is not None and int(match[2]) > 0 for match in found)


def test_the_trees_show_both_directions_and_the_threads_of_the_tier(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0

    printed = capsys.readouterr().out
    for function in ("TierTransfers.cascade", "TierTransfers.prepare_promotion", "BlockTable.pin_ready"):
        assert f":{function}" in printed
    assert "-- thread kvtier-fs-io" in printed


def test_repeated_calls_are_one_line_of_a_tree() -> None:
    lines = tree(miss(LOOKUP, ASK, ASK, ASK))

    assert lines[2:] == [
        "  tiering/manager.py:TieringOffloadingManager.lookup",
        "    tiering/guard.py:GuardedTier.lookup   x3",
    ]


def test_calls_of_a_key_are_those_of_the_last_lookup() -> None:
    assert num_calls_of_a_key([miss(LOOKUP, ASK, ASK, LOOKUP, ASK, END, ASK)]) == 2
    assert num_calls_of_a_key([miss(END)]) == 0


def test_a_function_that_runs_in_two_sections_counts_once() -> None:
    lines = summary([miss(LOOKUP, ASK), miss(ASK, END)])

    assert lines[0] == "MISS: 3 functions, 3 files"
    assert lines[2] == "STORE: 0 functions, 0 files"
