"""Each published format becomes the same kind of request, is recognised by its first line, and is refused when bad."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, MissingExtraError, TraceError, UnknownNameError
from kvtier.sim.formats import lines
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


def test_a_line_may_say_why_a_turn_ended(write: Write) -> None:
    trace = read_trace(write(SHARED, {**MOONCAKE, "stop": 2}, MOONCAKE))

    assert [one.stop for one in trace.requests] == [
        StopReason.TOOL_USE,
        StopReason.END_TURN,
        StopReason.UNKNOWN,
    ]


def test_qwen_s_times_are_seconds_and_its_blocks_16_tokens(write: Write) -> None:
    trace = read_trace(write(QWEN))

    assert trace.block_tokens == 16
    assert trace.requests == (TraceRequest(61.25, 40, 7, (10, 11, 12)),)


def test_qwen_s_equal_contents_behind_unequal_prefixes_are_other_blocks(write: Write) -> None:
    trace = read_trace(write(QWEN, {**QWEN, "hash_ids": [10, 99, 12]}, {**QWEN, "hash_ids": [10, 11, 12]}))

    first, second, third = (one.hash_ids for one in trace.requests)
    assert first == third == (10, 11, 12)
    assert second[:2] == (10, 99)
    assert second[2] not in (10, 11, 12, 99)


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
    [(MOONCAKE, "mooncake"), (SHARED, "mooncake"), (QWEN, "qwen_bailian"), (KV_EVENTS, "kv_events")],
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
        ("hash_ids", [3, None], "each of hash_ids must be an integer of 64 bits or text"),
        ("hash_ids", [3, True], "each of hash_ids must be an integer of 64 bits or text"),
        ("hash_ids", [3, 4.5], "each of hash_ids must be an integer of 64 bits or text"),
        ("hash_ids", [3, 2**64], "each of hash_ids must be an integer of 64 bits or text"),
        ("hash_ids", [3, -(2**63) - 1], "each of hash_ids must be an integer of 64 bits or text"),
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
        read_trace(write({"stop": 1}), "mooncake")


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


def test_ids_by_content_hit_only_behind_the_same_prefix(write: Write) -> None:
    prompts = ([1, 2, 3], [4, 5, 6], [1, 5, 6])
    path = write(*({**MOONCAKE, "input_length": 1536, "hash_ids": ids} for ids in prompts))

    first, second, third = (one.hash_ids for one in read_trace(path).requests)

    assert (first, second) == ((1, 2, 3), (4, 5, 6))
    assert third[0] == 1
    assert not set(third[1:]) & {1, 2, 3, 4, 5, 6}  # 512 tokens of this prompt can be found, not 1,536


def test_ids_of_prefixes_stay_as_they_are(write: Write) -> None:
    # The example in AIPerf's documentation of trace replay.
    lengths = ((0, 655, 52), (10535, 672, 26), (27482, 655, 52))
    path = write(
        *(
            {"timestamp": at_ms, "input_length": prompt, "output_length": answer, "hash_ids": [46, 47]}
            for at_ms, prompt, answer in lengths
        )
    )

    assert [one.hash_ids for one in read_trace(path).requests] == [(46, 47)] * 3


def test_an_id_in_two_places_of_a_prompt_is_two_prefixes(write: Write) -> None:
    (request,) = read_trace(write({**MOONCAKE, "hash_ids": [7, 7]})).requests

    assert len(set(request.hash_ids)) == 2


def test_ids_may_have_64_bits_a_sign_or_be_text(write: Write) -> None:
    ids = ([2**64 - 1, -(2**63)], [2**63, -1], ["9f2c", "03"], ["9f2c", "04"], [2**64 - 1, 5])
    trace = read_trace(write(*({**MOONCAKE, "hash_ids": each} for each in ids)))

    found = [one.hash_ids for one in trace.requests]
    assert found[2][0] == found[3][0]
    assert found[0][0] == found[4][0]
    assert trace.num_unique_blocks == 8
    assert all(0 <= number < 2**64 for numbers in found for number in numbers)


def test_more_fields_than_the_format_has_are_ignored(write: Write) -> None:
    line = {**MOONCAKE, "session_id": "a", "priority": 2, "delay": 0.5}

    assert read_trace(write(line)).requests == read_trace(write(MOONCAKE)).requests


def test_blocks_may_have_any_size_that_is_named(write: Write) -> None:
    path = write({**MOONCAKE, "input_length": 250, "hash_ids": [1, 2, 3, 4]})

    trace = read_trace(path, block_tokens=64)

    assert (trace.block_tokens, trace.requests[0].hash_ids) == (64, (1, 2, 3, 4))
    with pytest.raises(
        TraceError, match=r"jsonl:1: .*Blocks from 51 to 83 tokens would fit: .*--block-tokens"
    ):
        read_trace(path)
    with pytest.raises(ConfigError, match="block_tokens=0"):
        read_trace(path, block_tokens=0)


@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 250, 256])
@pytest.mark.parametrize("num_ids", [1, 2, 4])
def test_a_size_that_is_said_to_fit_is_accepted(write: Write, prompt: int, num_ids: int) -> None:
    path = write({**MOONCAKE, "input_length": prompt, "hash_ids": list(range(num_ids))})
    fitting, refused = [], ""
    for size in range(1, 400):
        try:
            read_trace(path, block_tokens=size)
            fitting.append(size)
        except TraceError as error:
            refused = error.remedy
    if len(fitting) < 2 or not refused:
        return
    assert f"from {fitting[0]} to " in refused


@pytest.mark.parametrize(
    ("times", "line"), [([0, 0.5, 1.25, 3.5], 2), (list(range(0, 40, 2)), 20)], ids=["fractions", "whole"]
)
def test_seconds_are_not_read_as_milliseconds(write: Write, times: list[float], line: int) -> None:
    path = write(
        *({**MOONCAKE, "timestamp": at, "input_length": 2048, "hash_ids": [1, 2, 3, 4]} for at in times)
    )

    with pytest.raises(TraceError, match="give --time-unit s if they are seconds") as error:
        read_trace(path)

    assert error.value.line == line
    assert read_trace(path, time_unit="s").duration_s == times[-1]
    assert read_trace(path, time_unit="ms").duration_s == pytest.approx(times[-1] / 1000)


def test_milliseconds_with_fractions_and_bursts_are_read(write: Write) -> None:
    slow = write(MOONCAKE, {**MOONCAKE, "timestamp": 2700.125})
    assert len(read_trace(slow).requests) == 2
    assert len(read_trace(write(*[MOONCAKE] * 50)).requests) == 50


def test_a_unit_of_time_is_a_known_one_and_of_a_format_that_leaves_it_open(write: Write) -> None:
    with pytest.raises(ConfigError, match="time_unit='h': must be s or ms"):
        read_trace(write(MOONCAKE), time_unit="h")
    with pytest.raises(ConfigError, match="this format has one unit of time"):
        read_trace(write(KV_EVENTS), time_unit="s")


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_may_be_one_array(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([MOONCAKE, {**MOONCAKE, "hash_ids": [3, 5]}], indent=indent))

    assert [one.hash_ids for one in read_trace(path).requests] == [(3, 4), (3, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[\n{},\n3]", "json:3: 3: must be a JSON object"),
        ("[\n\n{},\n{", "json:4: '{': not JSON"),
        ("[{}", "json:1: '': not JSON"),
        ("[{}]\n{}", "'{}': follows the array"),
        ("[]", "the trace is empty"),
    ],
)
def test_a_bad_array_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text.replace("{}", json.dumps(MOONCAKE), 1))

    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_an_array_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_ARRAY_CHARS", 100)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([MOONCAKE] * 3, indent=1))

    with pytest.raises(TraceError, match="over 100 characters: write one object per line"):
        read_trace(path)


def test_a_mark_of_the_byte_order_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE), encoding="utf-8-sig")

    assert len(read_trace(path).requests) == 1


def test_a_trace_may_be_compressed_with_zstd(tmp_path: Path) -> None:
    zstd = pytest.importorskip(lines.ZSTD_NAME, reason="needs zstd: pip install 'kvtier[zstd]'")
    path, cut = tmp_path / "trace.zst", tmp_path / "cut.zst"
    frame = zstd.compress(json.dumps(MOONCAKE).encode() + b"\n")
    path.write_bytes(frame * 2)
    cut.write_bytes(frame[:-3])

    assert len(read_trace(path).requests) == 2
    with pytest.raises(TraceError, match="damaged or truncated"):
        read_trace(cut)


def test_without_the_library_for_zstd_the_line_that_installs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "zstd", None)
    path = tmp_path / "trace.zst"
    path.write_bytes(lines.ZSTD_MAGIC)

    with pytest.raises(MissingExtraError, match=r"pip install '.\[zstd\]'"):
        read_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        # BurstGPT, Azure's LLM inference traces, lengths as JSON, texts of ShareGPT.
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
        '{"timestamp": 0, "input_length": 655, "output_length": 52}\n',
        '[{"id": "x", "conversations": [{"from": "human", "value": "hi"}]}]',
    ],
    ids=["BurstGPT", "Azure", "lengths", "ShareGPT"],
)
def test_why_a_file_without_ids_cannot_be_replayed_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)

    with pytest.raises(TraceError, match="which prompts begin alike decides what a cache finds") as error:
        read_trace(path)
    assert error.value.line == 1
