"""What kvtier records it reads, whole or cut at any byte, and a damaged recording is refused with its line."""

import gzip
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connector.common import StopReason
from kvtier.errors import TraceError
from kvtier.misses import Miss, MissCause, MissedRun, RequestRecord
from kvtier.recording.recorder import TraceRecorder
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_line import TraceEnd, TraceHeader, TraceLine
from kvtier.recording.trace_salt import TraceSalt
from kvtier.sim.formats.base import PrefixChain
from kvtier.sim.formats.kvtier import read_end, read_records
from kvtier.sim.formats.registry import detect_format, read_trace
from kvtier.sim.trace import TraceRequest

BLOCK_TOKENS = 16

LINES = [
    TraceLine(1.25, 40, 3, (2**63 - 1, 0), StopReason.END_TURN),
    TraceLine(0.5, 16, 9, (7,), StopReason.TOOL_USE),
    TraceLine(2.0, 15, 0, (), StopReason.UNKNOWN),
]
END = TraceEnd(len(LINES), 4, is_full=True)


def record(path: Path, lines: list[TraceLine], end: TraceEnd | None = END) -> Path:
    file = TraceFile(path, 10**6)
    parts: list[TraceHeader | TraceLine | TraceEnd] = [TraceHeader(BLOCK_TOKENS), *lines]
    parts += [] if end is None else [end]
    for line in parts:
        file.write(line.to_line())
    if end is not None:
        file.close()
    return path


def test_where_prompts_came_from_is_read_back_and_older_lines_without_it_are_read_too(tmp_path: Path) -> None:
    missed = (MissedRun(16, 24, Miss(MissCause.EVICTED, "host", {"ago_s": 2.5})),)
    known = replace(LINES[0], record=RequestRecord("a", 0.0, 40, {"fs": 16}, missed, 0.25))
    path = record(tmp_path / "trace", [known, *LINES[1:]])

    assert list(read_records(path)) == [RequestRecord("line 2", 1.25, 40, {"fs": 16}, missed, 0.25)]
    assert read_trace(path).requests == tuple(request_of(LINES[number]) for number in (1, 0, 2))


def test_a_record_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    missed = (MissedRun(16, 23, Miss(MissCause.EVICTED)),)
    path = record(tmp_path / "trace", [replace(LINES[0], record=RequestRecord("a", 0, 40, {}, missed))])

    with pytest.raises(TraceError, match=r"trace:2: .*where the prompt came from"):
        list(read_records(path))


def request_of(line: TraceLine) -> TraceRequest:
    return TraceRequest(
        line.arrival_s, line.num_prompt_tokens, line.num_output_tokens, line.hash_ids, line.stop
    )


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_recording_is_recognised_and_read_in_the_order_of_arrival(tmp_path: Path, name: str) -> None:
    path = record(tmp_path / name, LINES)

    trace = read_trace(path)

    assert detect_format(path) == "kvtier"
    assert trace.block_tokens == BLOCK_TOKENS
    assert trace.requests == tuple(request_of(LINES[number]) for number in (1, 0, 2))
    assert read_end(path) == END


@given(
    st.lists(
        st.builds(
            TraceLine,
            st.integers(0, 10**12).map(lambda us: us / 10**6),
            st.integers(32, 47),
            st.integers(0, 2**40),
            st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
            st.sampled_from(StopReason),
        ),
        min_size=1,
    )
)
def test_whatever_is_recorded_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[TraceLine]
) -> None:
    path = record(tmp_path_factory.mktemp("trace") / "trace", lines)

    read = read_trace(path).requests

    chain = PrefixChain()  # ids that are drawn name no prefixes
    numbered = [(line, chain.number(line.hash_ids)) for line in lines]
    expected = sorted(numbered, key=lambda pair: pair[0].arrival_s)
    assert [(one.num_output_tokens, one.hash_ids, one.stop) for one in read] == [
        (line.num_output_tokens, ids, line.stop) for line, ids in expected
    ]
    assert [one.arrival_s for one in read] == pytest.approx(
        [line.arrival_s for line, _ in expected], abs=1e-6
    )


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.filterwarnings("error")
def test_cut_at_any_byte_the_whole_lines_before_are_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = record(tmp_path / name, LINES).read_bytes()
    cut = tmp_path / f"cut-{name}"
    counts = []
    for num_bytes in range(len(content)):
        cut.write_bytes(content[:num_bytes])
        try:
            requests = read_trace(cut).requests
        except TraceError:
            requests = ()
        assert set(requests) == set(map(request_of, LINES[: len(requests)]))
        counts.append(len(requests))

    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}
    assert (
        "ends within line 2: it is still being written, or its writer was killed; the lines before"
        in caplog.text
    )


def test_a_recording_that_did_not_end_in_order_has_no_end(tmp_path: Path) -> None:
    assert read_end(record(tmp_path / "trace", LINES, end=None)) is None


@pytest.mark.parametrize(
    ("number", "line", "complaint"),
    [
        (0, {"kvtier_trace": 2, "block_tokens": 16}, "damaged:1: 2: this is version 1 of the format"),
        (0, {"kvtier_trace": 1, "block_tokens": 0}, "block_tokens must be at least 1"),
        (0, {"kvtier_trace": 1}, "block_tokens.*missing"),
        (
            1,
            {"timestamp": 1, "input_length": 40, "output_length": 1, "hash_ids": [1], "stop": 0},
            "1 hash_ids",
        ),
        (
            1,
            {"timestamp": 1, "input_length": 16, "output_length": 1, "hash_ids": [1], "stop": 3},
            "stop must be",
        ),
    ],
)
def test_a_damaged_line_is_refused(
    tmp_path: Path, number: int, line: dict[str, object], complaint: str
) -> None:
    texts = record(tmp_path / "trace", LINES).read_text().splitlines()
    texts[number] = json.dumps(line)
    (tmp_path / "damaged").write_text("".join(f"{text}\n" for text in texts))

    with pytest.raises(TraceError, match=complaint):
        read_trace(tmp_path / "damaged", "kvtier")


def test_a_line_that_is_cut_in_the_middle_of_the_file_is_refused(tmp_path: Path) -> None:
    texts = record(tmp_path / "trace", LINES).read_text().splitlines()
    texts[2] = texts[2][:20]
    (tmp_path / "damaged").write_text("".join(f"{text}\n" for text in texts))

    with pytest.raises(TraceError, match=r"damaged:3: .*not JSON"):
        read_trace(tmp_path / "damaged")


def test_a_compressed_recording_that_is_damaged_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(record(tmp_path / "trace", LINES * 99).read_bytes()))
    content[len(content) // 2] ^= 255
    (tmp_path / "damaged").write_bytes(content)

    with pytest.raises(TraceError):
        read_trace(tmp_path / "damaged")


RECORD_FOR_EVER = """
import itertools, sys
from pathlib import Path
from kvtier.recording.recorder import TraceRecorder
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_salt import draw_salt
recorder = TraceRecorder(TraceFile(Path(sys.argv[1]), 10**9), 16, draw_salt())
for number in itertools.count():
    recorder.on_arrival(str(number))
    recorder.on_end(str(number), 16 * 50, number, [bytes([block]) for block in range(50)])
    if recorder.stats()["recorder.requests"] > 300:
        print(flush=True)
"""


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_an_engine_that_is_killed_leaves_what_it_had_recorded(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    command = [sys.executable, "-c", RECORD_FOR_EVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)

    trace = read_trace(path)

    assert len(trace.requests) > 300
    assert {len(request.hash_ids) for request in trace.requests} == {50}
    assert trace.num_unique_blocks == 50
    assert read_end(path) is None


def test_a_recorder_s_own_lines_are_of_this_format(tmp_path: Path) -> None:
    recorder = TraceRecorder(TraceFile(tmp_path / "trace", 10**6), BLOCK_TOKENS, TraceSalt(bytes(32)))
    recorder.on_arrival("a")
    recorder.on_end("a", 20, 1, [b"block"])
    recorder.close()

    assert detect_format(tmp_path / "trace") == "kvtier"
    assert len(read_trace(tmp_path / "trace").requests) == 1
