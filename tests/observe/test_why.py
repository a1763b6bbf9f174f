"""The report on many records: sums, the largest causes, patterns, and the command."""

import json
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.connector.common import StopReason
from kvtier.misses import Miss, MissCause, MissedRun, NotStored, RequestRecord, not_stored
from kvtier.observe.remedies import NOT_STORED_REMEDIES, REMEDIES, remedy_of
from kvtier.observe.why import NUM_FINDINGS, explain_records
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_line import TraceEnd, TraceHeader, TraceLine

LATE = Miss(MissCause.LATE, "fs", {"deadline_s": 5.0})
PARTIAL = Miss(MissCause.PARTIAL_BLOCK)


def record(name: str, miss: Miss, num_found: int = 16, num_missed: int = 80) -> RequestRecord:
    found = {"device": num_found} if num_found else {}
    missed = (MissedRun(num_found, num_missed, miss), MissedRun(num_found + num_missed, 4, PARTIAL))
    return RequestRecord(name, 0.0, num_found + num_missed + 4, found, missed)


def test_origins_and_causes_sum_to_the_prompts() -> None:
    report = explain_records([record("a", LATE), record("b", Miss(MissCause.DAMAGED, "fs"))])

    assert sum(report.tokens_by_origin.values()) + report.num_missed_tokens == report.num_prompt_tokens == 200
    assert [(row.cause, row.num_tokens, row.num_requests) for row in report.causes] == [
        (MissCause.LATE, 80, 1),
        (MissCause.DAMAGED, 80, 1),
        (MissCause.PARTIAL_BLOCK, 8, 2),
    ]


def test_every_cause_and_reason_has_its_own_remedy() -> None:
    texts = [remedy_of(Miss(cause)) for cause in MissCause] + [
        remedy_of(not_stored(reason)) for reason in NotStored
    ]

    assert set(REMEDIES) == set(MissCause)
    assert set(NOT_STORED_REMEDIES) == set(NotStored)
    assert len(set(texts)) == len(texts)


def test_the_three_largest_causes_come_with_what_to_do_and_an_example() -> None:
    records = [record(f"r{n}", Miss(cause, "fs"), num_missed=100 + n) for n, cause in enumerate(MissCause)]
    report = explain_records(records)

    named = [found for found in report.findings if found.name in {cause.value for cause in MissCause}]
    assert len(named) == NUM_FINDINGS
    assert all("For example request r" in found.text for found in named)


def test_prefixes_that_end_in_different_blocks_are_no_pattern() -> None:
    records = [record(f"r{n}", Miss(MissCause.NEVER_SEEN), num_found=16 * n) for n in range(10)]

    assert "prefix_ends_early" not in [found.name for found in explain_records(records).findings]


def test_salts_that_requests_share_are_no_pattern() -> None:
    shared = Miss(MissCause.NEVER_SEEN, "", {"cache_salt": "aa"})
    records = [record(f"r{n}", shared, num_found=0) for n in range(10)]

    assert "cache_salt_per_user" not in [found.name for found in explain_records(records).findings]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, 10**6)
    file.write(TraceHeader(16).to_line())
    for number in range(3):
        one = record("", LATE)
        file.write(TraceLine(number, 100, 1, tuple(range(6)), StopReason.UNKNOWN, one).to_line())
    file.write(TraceEnd(3, 0, is_full=False).to_line())
    file.close()
    return path


def test_the_command_prints_the_table_and_what_to_do(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(trace)]) == 0

    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["from", "device", "48", "16.0%"] in rows
    assert ["late", "fs", "240", "80.0%", "3"] in rows
    assert "lookup_deadline_s" in printed
    assert "3 requests of recording trace.jsonl, 300 prompt tokens" in printed


def test_the_command_prints_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(trace), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["origins"] == {"device": 48}
    assert found["causes"][0]["example"] == {"request": "line 2", "deadline_s": 5.0}
    assert found["findings"][0]["name"] == "late"


def test_a_recording_without_records_says_that_nothing_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, 10**6)
    file.write(TraceHeader(16).to_line())
    file.close()

    assert main(["why", str(path)]) == 1
    assert "No request has begun" in capsys.readouterr().out


def test_a_file_that_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text("{}\n")

    assert main(["why", str(tmp_path / "x")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
