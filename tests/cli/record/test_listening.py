"""A publisher that speaks as vLLM's does is heard over a real socket, from either side, until told to end."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.cli.record.publisher import TOKEN, free_endpoint, payload_of, publishing

from kvtier.cli.main import main
from kvtier.cli.record.event_log import decode_batch
from kvtier.cli.record.listening import ListenOptions, listen
from kvtier.errors import ConfigError, EventMessageError
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_salt import draw_salt
from kvtier.sim.formats.registry import detect_format, read_trace

GUARD_S = 60.0


def assert_is_a_log(path: Path) -> None:
    trace = read_trace(path)
    assert detect_format(path) == "kv_events"
    assert trace.block_tokens == 16
    assert len(trace.requests) == 1
    assert str(TOKEN) not in path.read_text()
    ids = {
        one
        for line in map(json.loads, path.read_text().splitlines())
        for one in line["events"][0]["block_hashes"]
    }
    assert max(ids) < 2**63  # true hashes are above


def test_a_publisher_is_heard_and_the_log_is_one_that_the_simulator_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "events.jsonl"
    with publishing() as endpoint:
        status = main(["record", str(out), "--kv-events", endpoint, "--batches", "20"])

    printed = capfd.readouterr().err
    assert status == 0
    assert_is_a_log(out)
    assert len(out.read_text().splitlines()) == 20
    assert out.stat().st_mode & 0o777 == 0o600
    assert f"20 batches with 40 stored blocks are in {out}" in printed
    assert "not received" not in printed
    assert f"kvtier simulate {out}" in printed


def test_with_json_stdout_has_the_counts_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "events.jsonl"
    with publishing() as endpoint:
        assert main(["record", str(out), "--kv-events", endpoint, "--batches", "20", "--json"]) == 0

    found = json.loads(capfd.readouterr().out)
    (file,) = found["files"]
    assert found["status"] == 0
    assert (file["path"], file["batches"], file["stored_blocks"]) == (str(out), 20, 40)
    assert (file["is_full"], file["rank"], file["missing_batches"]) == (False, 0, 0)


def test_a_publisher_that_connects_is_heard_by_one_that_listens(tmp_path: Path) -> None:
    out = tmp_path / "events.jsonl"
    endpoint = free_endpoint()
    with publishing(connect_to=endpoint):
        status = main(["record", str(out), "--kv-events", endpoint, "--bind", "--batches", "5"])

    assert status == 0
    assert_is_a_log(out)


def test_messages_of_another_service_are_told_and_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "events.jsonl"
    with publishing(junk=b"\xff\xff junk") as endpoint:
        status = main(["record", str(out), "--kv-events", endpoint, "--batches", "3"])

    assert status == 0
    assert_is_a_log(out)
    assert "not a message of a KV-event publisher" in capfd.readouterr().err


def test_silence_ends_after_the_given_time_with_nothing_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, endpoint = tmp_path / "events", free_endpoint()

    assert main(["record", str(out), "--kv-events", endpoint, "--seconds", "0.2"]) == 1
    assert f"nothing was received from {endpoint}, nothing is recorded" in capfd.readouterr().err
    assert not out.exists(), "the next try would be told to name a new file"


def test_a_batch_beyond_the_limit_is_told_and_leaves_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "events"
    with publishing(num_events=100) as endpoint:
        assert main(["record", str(out), "--kv-events", endpoint, "--max-size", "4096"]) == 1

    assert "nothing is recorded: the first batch is larger than --max-size" in capfd.readouterr().err
    assert not out.exists()


def test_an_endpoint_that_is_none_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "events.jsonl.gz"

    assert main(["record", str(out), "--kv-events", "nonsense"]) == 2
    assert "cannot be connected to" in capfd.readouterr().err
    assert not out.exists(), "the next try would be told to name a new file"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_recording_in_order(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "events.jsonl.gz"
    with publishing() as endpoint:
        command = [sys.executable, "-m", "kvtier.cli.main", "record", str(out), "--kv-events", endpoint]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as recording:
            wait_until(lambda: out.exists() and out.stat().st_size > 1000)
            recording.send_signal(number)
            _, said = recording.communicate(timeout=GUARD_S)

    assert recording.returncode == 0
    assert "interrupted" in said
    assert len(read_trace(out).requests) == 1


class FullDisk(TraceFile):
    """A file on a disk that is full when so many lines are written, or at its end."""

    def __init__(self, path: Path, num_lines: int) -> None:
        super().__init__(path, 10**6)
        self._num_left = num_lines

    def _write_some(self, content: memoryview) -> int:
        self._num_left -= 1
        if self._num_left < 0:
            raise OSError(28, "No space left on device")
        return super()._write_some(content)


@pytest.mark.parametrize("num_lines", [0, 2, 3])
def test_a_disk_that_is_full_is_told_in_one_sentence(tmp_path: Path, num_lines: int) -> None:
    file = FullDisk(tmp_path / "events.gz", num_lines)
    with publishing() as endpoint, pytest.raises(ConfigError, match="cannot be written: No space left"):
        listen(ListenOptions(endpoint, is_bound=False, max_s=None, max_batches=3), file, draw_salt(), print)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Ask over and over; the guard is the test's own time-out."""
    pause = threading.Event()
    while not is_so():
        pause.wait(0.01)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"", b"12345678"],
        [b"", b"1234567", payload_of(0)],
        [b"", b"12345678", b""],
        [b"", b"12345678", msgspec.msgpack.encode({"ts": 1})],
        [b"", b"12345678", msgspec.msgpack.encode([1.0])],
        [b"", b"12345678", msgspec.msgpack.encode(["now", []])],
        [b"", b"12345678", msgspec.msgpack.encode([float("nan"), []])],
        [b"", b"12345678", msgspec.msgpack.encode([-1e300, []])],
        [b"", b"12345678", msgspec.msgpack.encode([True, []])],
        [b"", b"12345678", msgspec.msgpack.encode([1.0, {}])],
        [b"", b"12345678", msgspec.msgpack.encode([1.0, [], "zero"])],
        [b"", b"12345678", b"\x91" * 100_000],
    ],
)
def test_a_message_of_another_shape_is_an_error(parts: list[bytes]) -> None:
    with pytest.raises(EventMessageError):
        decode_batch(parts)


@pytest.mark.parametrize(("rank", "expected"), [(None, 0), (0, 0), (3, 3)])
def test_a_batch_is_decoded(rank: int | None, expected: int) -> None:
    batch = decode_batch([b"topic", (258).to_bytes(8, "big"), payload_of(1, rank)])

    assert (batch.sequence, batch.time_s, batch.rank) == (258, 1.7e9 + 0.1, expected)
    assert batch.events[0]["block_hashes"] == [2 + 2**63, 3 + 2**63]
