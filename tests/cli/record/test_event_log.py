"""Of KV events only what is listed is written, hashes as salted ids; what was not heard is counted."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.cli.record.publisher import TOKEN, stored

from kvtier.cli.record.event_log import EventBatch, KVEventLog
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_salt import TraceSalt
from kvtier.sim.formats.registry import read_trace

SALT = TraceSalt(bytes(32))

Event = dict[str, Any] | list[Any]  # Any: msgpack


def batch(sequence: int, *events: Event, time_s: float = 1000.0, rank: int = 0) -> EventBatch:
    return EventBatch(sequence, time_s, rank, events)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def log(path: Path) -> KVEventLog:
    return KVEventLog(TraceFile(path, 10**6), SALT)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_store_is_written_without_tokens_names_and_true_hashes(log: KVEventLog, path: Path) -> None:
    secrets = {
        "extra_keys": [["secret-salt"]],
        "session_id": "secret-session",
        "lora_id": 7777,
        "ownership": "secret-owner",
        "invented_later": "secret",
    }
    log.add(batch(0, stored([11, b"\x0b" * 32], 10, group_idx=0, **secrets)))
    log.close()

    (line,) = read(path)

    (event,) = line["events"]
    assert event.keys() == {"type", "block_hashes", "parent_block_hash", "block_size", "medium", "group_idx"}
    assert "secret" not in path.read_text()
    assert str(TOKEN) not in path.read_text()
    assert not {10, 11, 7777} & {*event["block_hashes"], event["parent_block_hash"]}
    assert len(set(event["block_hashes"])) == 2


def test_the_simulator_reads_the_same_requests_from_the_log_as_from_the_events(
    log: KVEventLog, path: Path, tmp_path: Path
) -> None:
    events = [stored([1, 2]), stored([3], 2), stored([4, 5], 1), {"type": "AllBlocksCleared"}]
    plain = tmp_path / "plain"
    plain.write_text("".join(f"{json.dumps({'ts': 9.0 * n, 'events': [e]})}\n" for n, e in enumerate(events)))
    for number, event in enumerate(events):
        log.add(batch(number, event, time_s=1000 + 9.0 * number))
    log.close()

    salted, expected = read_trace(path), read_trace(plain)

    assert salted == expected  # ids are numbered anew by this format


def test_older_releases_write_events_as_lists(log: KVEventLog, path: Path) -> None:
    log.add(
        batch(0, ["BlockStored", [1, 2], None, [TOKEN] * 8, 4, None, "GPU"], ["BlockRemoved", [1], "GPU"])
    )
    log.add(batch(1, ["AllBlocksCleared"]))
    log.add(batch(2, stored([1, 2])))
    log.close()

    first, cleared, same = read(path)
    assert first["events"][0]["block_hashes"] == same["events"][0]["block_hashes"]
    assert first["events"][1]["block_hashes"] == same["events"][0]["block_hashes"][:1]
    assert cleared["events"] == [{"type": "AllBlocksCleared"}]


def test_times_are_from_the_first_batch(log: KVEventLog, path: Path) -> None:
    for number, time_s in enumerate((1.7e9, 1.7e9 + 2.5, 1.7e9 - 1)):
        log.add(batch(number, stored([number]), time_s=time_s))
    log.close()

    assert [line["ts"] for line in read(path)] == [0.0, 2.5, 0.0]


def test_what_was_not_heard_is_counted(log: KVEventLog) -> None:
    for sequence in (7, 8, 11, 12, 0, 1):
        log.add(batch(sequence, stored([sequence])))

    counts = log.counts
    assert (counts.first_sequence, counts.num_batches) == (7, 6)
    assert (counts.num_missing_batches, counts.num_restarts) == (2, 1)


def test_one_log_is_of_one_replica(log: KVEventLog, path: Path) -> None:
    for sequence, rank in ((0, 1), (0, 0), (1, 1), (1, 0)):
        log.add(batch(sequence, stored([sequence]), rank=rank))
    log.close()

    assert len(read(path)) == 2
    assert (log.counts.rank, log.counts.num_other_rank_batches, log.counts.num_missing_batches) == (1, 2, 0)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "PromptSeen", "block_hashes": [1], "text": "secret"},
        {"type": "BlockStored", "block_hashes": "secret", "block_size": 4},
        {"type": "BlockStored", "block_hashes": ["secret"], "block_size": 4},
        {"type": "BlockStored", "block_hashes": [True], "block_size": 4},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": "secret", "block_size": 4},
        {"type": "BlockStored", "block_hashes": [1], "block_size": "secret"},
        {"type": "BlockStored", "block_hashes": [1], "block_size": 0},
        {"type": "BlockStored", "block_hashes": [1], "block_size": -4},
        ["secret"],
        [],
        "secret",
        None,
    ],
)
def test_what_is_no_known_event_is_left_out_and_counted(log: KVEventLog, path: Path, event: Event) -> None:
    log.add(batch(0, event, stored([1])))
    log.close()

    (line,) = read(path)
    assert len(line["events"]) == 1
    assert log.counts.num_skipped_events == 1
    assert "secret" not in path.read_text()


def test_a_medium_is_a_word_and_nothing_else(log: KVEventLog, path: Path) -> None:
    for number, medium in enumerate((None, "CPU", "fs", "the secret of this prompt", 7)):
        log.add(batch(number, stored([1], medium=medium)))
    log.close()

    assert [line["events"][0]["medium"] for line in read(path)] == [None, "CPU", "fs", "other", "other"]


def test_a_full_log_takes_no_more_and_is_within_its_limit(path: Path) -> None:
    log = KVEventLog(TraceFile(path, 5000), SALT)
    chance = random.Random(0)
    for number in range(100):
        log.add(batch(number, stored([chance.getrandbits(64) for _ in range(5)])))
    log.close()

    assert log.is_full
    assert path.stat().st_size <= 5000
    assert len(read(path)) == log.counts.num_batches
