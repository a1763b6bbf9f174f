"""Each published format becomes the same kind of request, is recognised by its first line, and is refused when bad."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import TraceError, UnknownNameError
from kvtier.sim.formats.registry import TRACE_FORMATS, detect_format, read_trace
from kvtier.sim.trace import StopReason, TraceRequest

MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]}
SHARED = {**MOONCAKE, "stop": 1}
QWEN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.25,
    "input_length": 40,
    "output_length": 7,
    "type": "text",
    "turn": 1,
    "hash_ids": [10, 11, 12],
}
KV_EVENTS: dict[str, object] = {"ts": 9.0, "events": []}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write objects, one a line, and return the file."""

    def write(*lines: object) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return path

    return write


def test_mooncake_s_times_are_milliseconds_and_its_blocks_512_tokens(write: Write) -> None:
    trace = read_trace(write(MOONCAKE))

    assert trace.block_tokens == 512
    assert trace.requests == (TraceRequest(1.5, 600, 5, (3, 4)),)


def test_the_shared_format_says_why_a_turn_ended(write: Write) -> None:
    trace = read_trace(write(SHARED, {**MOONCAKE, "stop": 2}, MOONCAKE))

    assert [one.stop for one in trace.requests] == [
        StopReason.TOOL_USE,
        StopReason.END_TURN,
        StopReason.UNKNOWN,
    ]


def test_qwen_s_times_are_seconds_and_its_blocks_16_tokens(write: Write) -> None:
    trace = read_trace(write(QWEN))

    assert trace.block_tokens == 16
    assert trace.requests == (TraceRequest(61.25, 40, 7, (0, 1, 2)),)


def test_qwen_s_equal_contents_behind_unequal_prefixes_are_other_blocks(write: Write) -> None:
    trace = read_trace(write(QWEN, {**QWEN, "hash_ids": [10, 99, 12]}, {**QWEN, "hash_ids": [10, 11, 12]}))

    assert [one.hash_ids for one in trace.requests] == [(0, 1, 2), (0, 3, 4), (0, 1, 2)]


def test_a_trace_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode() + b"\n\n"))

    assert len(read_trace(path).requests) == 1


def test_each_request_that_was_read_is_reported(write: Write) -> None:
    seen: list[int] = []

    read_trace(write(MOONCAKE, MOONCAKE), on_request=lambda: seen.append(1))

    assert len(seen) == 2


@pytest.mark.parametrize(
    ("line", "name"),
    [(MOONCAKE, "mooncake"), (SHARED, "shared"), (QWEN, "qwen_bailian"), (KV_EVENTS, "kv_events")],
)
def test_the_first_line_tells_the_format(write: Write, line: object, name: str) -> None:
    assert detect_format(write(line)) == name


def test_every_format_is_registered_under_the_name_of_its_file() -> None:
    for name in TRACE_FORMATS.names():
        assert TRACE_FORMATS.resolve(name).__module__.endswith(f".{name}")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("timestamp", -1, "timestamp must be a number from 0"),
        ("timestamp", "now", "timestamp must be a number from 0"),
        ("timestamp", 10**400, "timestamp must be a number from 0 to 1e.16"),
        ("timestamp", 1.1e16, "timestamp must be a number from 0"),
        ("timestamp", True, "timestamp must be a number from 0"),
        ("input_length", 1.5, "input_length must be an integer"),
        ("output_length", 10**400, "output_length must be an integer from 0 to 2"),
        ("output_length", -1, "output_length must be an integer"),
        ("hash_ids", 3, "hash_ids must be a list"),
        ("hash_ids", [3, "4"], "each of hash_ids must be an integer"),
        ("hash_ids", [3, -4], "each of hash_ids must be an integer"),
        ("hash_ids", [3, 2**63], "each of hash_ids must be an integer"),
        ("hash_ids", [3], None),
        ("hash_ids", [], "a prompt of 600 tokens has 1 or 2 ids of 512 tokens"),
        ("hash_ids", [3, 4, 5], "a prompt of 600 tokens has 1 or 2 ids of 512 tokens"),
        ("stop", 3, "stop must be 0"),
        ("stop", None, "stop must be 0"),
    ],
)
def test_a_bad_value_is_refused_with_its_line_and_what_is_expected(
    write: Write, field: str, value: object, message: str | None
) -> None:
    path = write(SHARED, {**SHARED, field: value})

    if message is None:
        assert len(read_trace(path).requests) == 2
        return
    with pytest.raises(TraceError, match=message) as error:
        read_trace(path)
    assert (error.value.path, error.value.line) == (str(path), 2)


def test_a_missing_field_is_named_with_those_that_are_there(write: Write) -> None:
    with pytest.raises(
        TraceError, match=r"trace.jsonl:1: 'input_length': this field is missing, the line has stop"
    ):
        read_trace(write({"stop": 1}), "shared")


def test_an_unknown_format_is_refused(write: Write) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mooncake'"):
        read_trace(write(MOONCAKE), "moon_cake")
    with pytest.raises(
        TraceError, match="the format is not recognised, known are kv_events, kvtier, mooncake"
    ):
        read_trace(write({"a": 1}))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    with pytest.raises(TraceError, match="the trace is empty"):
        read_trace(path)
    with pytest.raises(TraceError, match="the trace is empty"):
        read_trace(path, "mooncake")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[1]", "must be a JSON object"), ("[" * 200_000, "not JSON")]
)
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(MOONCAKE)}\n{text}\n")

    with pytest.raises(TraceError, match=f"trace.jsonl:2: .*{message}"):
        read_trace(path)


def test_what_is_no_regular_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    for path in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(TraceError, match="write the trace to a file first"):
            read_trace(path)


def test_a_missing_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress(b"{}\n" * 1000)[:20])

    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="damaged or truncated"):
        read_trace(damaged)
