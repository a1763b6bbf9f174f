"""A log of what a device cache stored becomes the requests that must have stored it."""

import json
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TraceError
from kvtier.sim.formats.registry import read_trace


def stored(hashes: list[object], parent: object = None, **fields: object) -> dict[str, object]:
    """Return a store of blocks of 16 tokens, as vLLM names its fields."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
    } | fields


def chains(path: Path, *batches: tuple[float, list[object]]) -> list[tuple[float, tuple[int, ...]]]:
    """Return beginning and ids of each request that a log of ``batches`` becomes."""
    path /= "events.jsonl"
    path.write_text("".join(json.dumps({"ts": ts, "events": events}) + "\n" for ts, events in batches))
    return [(request.arrival_s, request.hash_ids) for request in read_trace(path).requests]


def test_stores_that_go_on_in_the_next_step_are_one_request(tmp_path: Path) -> None:
    found = chains(tmp_path, (100.0, [stored([70, 71])]), (100.5, [stored([72], 71)]))

    assert found == [(0.0, (0, 1, 2))]


def test_a_store_behind_an_old_prefix_is_a_request_with_that_prefix(tmp_path: Path) -> None:
    found = chains(tmp_path, (100.0, [stored(["a", "b"])]), (160.0, [stored(["c"], "b"), stored(["d"], "a")]))

    assert found == [(0.0, (0, 1)), (60.0, (0, 1, 2)), (60.0, (0, 3))]


def test_a_clock_that_was_set_back_gives_no_time_before_the_log(tmp_path: Path) -> None:
    assert chains(tmp_path, (100.0, [stored([70])]), (90.0, [stored([71])])) == [(0.0, (0,)), (0.0, (1,))]


def test_blocks_that_are_computed_again_are_a_request_again(tmp_path: Path) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [70], "medium": "GPU"}

    found = chains(tmp_path, (1.0, [stored([70])]), (1.5, [removed]), (1.6, [stored([70])]))

    assert [ids for _, ids in found] == [(0,), (0,)]


def test_a_prefix_from_before_the_log_begins_with_the_log(tmp_path: Path) -> None:
    assert chains(tmp_path, (5.0, [stored([71], 70)])) == [(0.0, (0, 1))]


def test_events_may_be_lists_as_they_are_sent(tmp_path: Path) -> None:
    event = ["BlockStored", [70, 71], None, [], 16, None, "GPU"]

    assert chains(tmp_path, (5.0, [event, ["BlockRemoved", [1]], ["AllBlocksCleared"]])) == [(0.0, (0, 1))]


def test_a_batch_may_be_a_list_as_it_is_sent(tmp_path: Path) -> None:
    event = ["BlockStored", [70, 71], None, [], 16, None, "GPU"]
    path = tmp_path / "events.jsonl"
    lines = ([5.0, [event], 0], [9.0, [["BlockStored", [72], 71, [], 16, None, "GPU"]], 0])
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    assert [one.hash_ids for one in read_trace(path).requests] == [(0, 1), (0, 1, 2)]

    path.write_text("".join(f"{json.dumps(line[:2])}\n" for line in lines))
    assert len(read_trace(path).requests) == 2  # vLLM leaves out a rank that is not set


def test_a_log_of_two_replicas_is_refused_with_the_line_of_the_second(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("[5.0, [], 0]\n[5.1, [], 1]\n")

    with pytest.raises(TraceError, match=r"events.jsonl:2: 1: a replica of another rank has its own cache"):
        read_trace(path)


def test_another_block_size_than_the_log_s_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"ts": 1.0, "events": [stored([70])]}))

    with pytest.raises(ConfigError, match="block_tokens=64: the file says blocks of 16 tokens"):
        read_trace(path, block_tokens=64)


def test_a_list_says_what_an_object_says_of_adapters_and_groups(tmp_path: Path) -> None:
    groups = [0, 1]
    lists = [
        ["BlockStored", [70 + group], None, [], 16, None, "GPU", "adapter", None, group, "newer field"]
        for group in groups
    ]
    objects = [
        stored([70 + group], lora_name="adapter", extra_keys=None, group_idx=group) for group in groups
    ]

    assert chains(tmp_path, (5.0, [*lists])) == chains(tmp_path, (5.0, [*objects])) == [(0.0, (0,))]


def test_stores_of_other_media_and_groups_are_left_out(tmp_path: Path) -> None:
    other = [stored([80], medium="CPU", block_size=0), stored([81], group_idx=1), stored([82], medium=None)]

    assert len(chains(tmp_path, (5.0, list(other)))) == 1


def test_the_block_size_is_the_log_s_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"ts": 1.0, "events": [stored([70, 71], block_size=32)]}))

    trace = read_trace(path)

    assert (trace.block_tokens, trace.requests[0].num_prompt_tokens) == (32, 64)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (3, "events must be a list"),
        ([3], "an event must be an object"),
        ([[]], "an event must be an object"),
        ([stored([70], block_size=0)], "block_size of a store"),
        ([stored([70]), stored([71], block_size=32)], "began with blocks of 16 tokens"),
        ([{**stored([]), "block_hashes": 7}], "block_hashes must be a list"),
        ([stored([[1]])], "a block hash must be an integer or text"),
    ],
)
def test_a_bad_event_is_refused(tmp_path: Path, events: object, message: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"ts": 1.0, "events": events}))

    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_blocks_that_are_their_own_ancestors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"events.jsonl:2: .*form a cycle"):
        chains(tmp_path, (1.0, [stored([70], 71), stored([71], 70)]), (60.0, [stored([72], 70)]))
