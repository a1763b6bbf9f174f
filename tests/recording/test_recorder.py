"""The recorder writes what came and how long it was, never what was said, and never makes the scheduler wait."""

import json
import threading
from pathlib import Path

import pytest
from tests.connector.fakes import HASH_TOKENS, FakeBlocks, FakeRequest, FakeSpec, make_config, make_first_step

from kvtier.connector.common import ConnectorRole, StopReason
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.step import StepOutput
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.misses import MissCause
from kvtier.recording.recorder import TraceRecorder, open_recorder
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_line import TraceEnd
from kvtier.recording.trace_salt import TraceSalt
from kvtier.sim.formats.kvtier import read_end, read_records
from kvtier.sim.formats.registry import read_trace
from kvtier.testing.clock import ManualClock

SALT = TraceSalt(bytes(32))
TEXT = [ord(letter) for letter in "My password is Rumpelstilzchen, keep it."]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def make_recorder(path: Path, clock: ManualClock, max_bytes: int = 10**6) -> TraceRecorder:
    return TraceRecorder(TraceFile(path, max_bytes), HASH_TOKENS, SALT, clock)


def make_half(recorder: TraceRecorder) -> OffloadingConnectorScheduler:
    return OffloadingConnectorScheduler(FakeSpec(make_config()), recorder)


def serve(half: OffloadingConnectorScheduler, request: FakeRequest, num_output_tokens: int = 0) -> None:
    """Take a request through its life."""
    half.get_num_new_matched_tokens(request, 0)
    request.tokens = [*request.tokens, *range(num_output_tokens)]
    half.request_finished(request, StopReason.END_TURN)


def test_a_request_s_arrival_lengths_shared_blocks_and_end_are_recorded(
    path: Path, clock: ManualClock
) -> None:
    half = make_half(make_recorder(path, clock))
    clock.advance(1.5)
    serve(half, FakeRequest("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]), num_output_tokens=7)
    clock.advance(2.0)
    serve(half, FakeRequest("b", [1, 2, 3, 4, 0, 0, 0, 0]))
    half.shutdown()

    trace = read_trace(path)

    first, second = trace.requests
    assert trace.block_tokens == HASH_TOKENS
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (1.5, 9, 7)
    assert (second.arrival_s, second.num_prompt_tokens, second.num_output_tokens) == (3.5, 8, 0)
    assert (len(first.hash_ids), len(second.hash_ids)) == (2, 2)
    assert first.hash_ids[0] == second.hash_ids[0]
    assert first.hash_ids[1] != second.hash_ids[1]
    assert first.stop is StopReason.END_TURN


def test_where_the_prompt_of_a_request_that_was_computed_came_from_is_recorded(
    path: Path, clock: ManualClock
) -> None:
    half = make_half(make_recorder(path, clock))
    computed = FakeRequest("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    half.get_num_new_matched_tokens(computed, 4)
    half.update_state_after_alloc(computed, FakeBlocks(([0, 1, 2],)), 0)
    half.request_finished(computed)
    serve(half, FakeRequest("aborted", [1, 2, 3, 4]))
    half.shutdown()

    (found,) = read_records(path)
    assert found.tokens_by_origin == {"device": 4}
    assert found.missed_by_cause() == {(MissCause.NEVER_SEEN, ""): 4, (MissCause.PARTIAL_BLOCK, ""): 1}
    assert len(read_trace(path).requests) == 2


def test_neither_tokens_nor_names_of_requests_or_blocks_are_in_the_file(
    path: Path, clock: ManualClock
) -> None:
    half = make_half(make_recorder(path, clock))
    request = FakeRequest("chat-of-alice-17", TEXT)
    half.get_num_new_matched_tokens(request, 0)
    half.request_finished(request)
    half.shutdown()

    written = path.read_text()

    _, line, _ = map(json.loads, written.splitlines())
    assert line.keys() == {"timestamp", "input_length", "output_length", "hash_ids", "stop"}
    assert "alice" not in written
    for block_hash in request.block_hashes:
        unsalted = [
            int.from_bytes(block_hash[i : i + 8], order) for i in (0, 8) for order in ("big", "little")
        ]
        assert not set(line["hash_ids"]) & {value >> shift for value in unsalted for shift in (0, 1)}
        assert not set(line["hash_ids"]) & {value & (2**63 - 1) for value in unsalted}
        assert block_hash.hex() not in written


def test_who_knows_model_and_text_does_not_find_the_prompt_in_another_s_recording(tmp_path: Path) -> None:
    config = make_config()
    ids = []
    for name in ("theirs", "mine"):
        recorder = open_recorder(config, {"KVTIER_RECORD_TRACE": str(tmp_path / name)})
        assert recorder is not None
        half = make_half(recorder)
        serve(half, FakeRequest("a", TEXT))
        half.shutdown()
        ids.append(set(read_trace(tmp_path / name).requests[0].hash_ids))

    assert len(ids[0]) == len(ids[1]) == len(TEXT) // HASH_TOKENS
    assert not ids[0] & ids[1]


def test_requests_of_adapters_share_no_block_with_those_of_others(path: Path, clock: ManualClock) -> None:
    half = make_half(make_recorder(path, clock))
    for name, key_salt in (("a", b""), ("b", b"adapter"), ("c", b"adapter")):
        request = FakeRequest(name, TEXT)
        half.get_num_new_matched_tokens(request, 0, key_salt)
        half.request_finished(request)
    half.shutdown()

    plain, adapted, again = (set(request.hash_ids) for request in read_trace(path).requests)
    assert not plain & adapted
    assert adapted == again


def test_an_engine_that_knows_when_a_request_came_is_believed(path: Path, clock: ManualClock) -> None:
    recorder = make_recorder(path, clock)
    half = make_half(recorder)
    recorder.on_arrival("a")
    clock.advance(3.0)
    serve(half, FakeRequest("a", TEXT))
    half.shutdown()

    assert read_trace(path).requests[0].arrival_s == 0.0


def test_what_has_not_ended_is_recorded_at_shutdown_as_far_as_it_got(path: Path, clock: ManualClock) -> None:
    half = make_half(make_recorder(path, clock))
    request = FakeRequest("a", TEXT)
    half.get_num_new_matched_tokens(request, 0)
    request.tokens = [*TEXT, 1, 2]
    half.shutdown()
    half.shutdown()

    (recorded,) = read_trace(path).requests
    assert (recorded.num_prompt_tokens, recorded.num_output_tokens) == (len(TEXT), 2)


def test_an_aborted_request_is_recorded_and_one_that_was_never_searched_is_not(
    path: Path, clock: ManualClock
) -> None:
    recorder = make_recorder(path, clock)
    half = make_half(recorder)
    aborted, unseen = FakeRequest("a", TEXT), FakeRequest("b", TEXT)
    half.get_num_new_matched_tokens(aborted, 0)
    half.request_finished(aborted)
    recorder.on_arrival("b")
    half.request_finished(unseen)
    half.shutdown()

    assert len(read_trace(path).requests) == 1


def test_an_engine_s_own_requests_are_not_recorded(path: Path, clock: ManualClock) -> None:
    half = make_half(make_recorder(path, clock))
    for name, is_traffic in (("a", False), ("b", True)):
        request = FakeRequest(name, TEXT)
        half.get_num_new_matched_tokens(request, 0)
        half.request_finished(request, is_traffic=is_traffic)
    half.shutdown()

    assert len(read_trace(path).requests) == 1


def test_a_pre_empted_request_is_recorded_once_with_its_own_prompt(path: Path, clock: ManualClock) -> None:
    half = make_half(make_recorder(path, clock))
    request = FakeRequest("a", TEXT)
    half.get_num_new_matched_tokens(request, 0)
    step = make_first_step("a", ([*range(10)],), len(TEXT))
    half.build_connector_meta(step)
    request.tokens = [*TEXT, *range(9)]
    half.build_connector_meta(StepOutput(preempted_req_ids={"a"}))
    clock.advance(5.0)
    half.get_num_new_matched_tokens(request, 0)
    half.request_finished(request)
    half.shutdown()

    (recorded,) = read_trace(path).requests
    assert (recorded.arrival_s, recorded.num_prompt_tokens, recorded.num_output_tokens) == (0.0, len(TEXT), 9)
    assert len(recorded.hash_ids) == len(TEXT) // HASH_TOKENS


class StuckFile(TraceFile):
    """A file on a disk that hangs behind the first line, until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 10**6)
        self.is_free = threading.Event()
        self._has_header = False

    def write(self, line: bytes) -> None:
        if self._has_header:
            self.is_free.wait()
        self._has_header = True
        super().write(line)


def test_behind_a_disk_that_hangs_requests_are_dropped_and_counted_and_memory_is_bounded(path: Path) -> None:
    file = StuckFile(path)
    recorder = TraceRecorder(file, HASH_TOKENS, SALT, max_queued_keys=20)
    keys = [bytes([number]) for number in range(9)]
    for number in range(50):
        recorder.on_arrival(str(number))
        recorder.on_end(str(number), 9 * HASH_TOKENS, 0, keys)

    # Each weighs ten: more than two are never waiting beside the one under way and the one that filled the queue.
    assert 46 <= recorder.stats()["recorder.dropped_requests"] <= 47
    file.is_free.set()
    recorder.close()
    num_kept = len(read_trace(path).requests)
    end = read_end(path)
    assert end is not None
    assert (end.num_requests, end.num_dropped) == (num_kept, 50 - num_kept)
    assert recorder.stats()["recorder.requests"] == num_kept


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_full_recording_ends_says_so_and_is_read(tmp_path: Path, name: str) -> None:
    max_bytes = 4096
    recorder = make_recorder(tmp_path / name, ManualClock(), max_bytes)
    half = make_half(recorder)
    for number in range(200):
        serve(half, FakeRequest(str(number), [number, *TEXT]))
    half.shutdown()

    end = read_end(tmp_path / name)
    num_kept = len(read_trace(tmp_path / name).requests)
    assert (tmp_path / name).stat().st_size <= max_bytes
    assert end is not None
    assert end.is_full
    assert 0 < end.num_requests == num_kept < 200
    assert recorder.stats()["recorder.dropped_requests"] == 200 - num_kept


def test_the_last_line_has_room_at_any_limit(tmp_path: Path) -> None:
    for max_bytes in range(4096, 4496, 8):
        path = tmp_path / str(max_bytes)
        recorder = make_recorder(path, ManualClock(), max_bytes)
        for number in range(30):
            recorder.on_arrival(str(number))
            recorder.on_end(str(number), 20 * HASH_TOKENS, 0, [bytes([block]) for block in range(20)])
        recorder.close()

        assert path.stat().st_size <= max_bytes
        assert read_end(path) is not None


class FailingFile(TraceFile):
    """A file on a disk that is full in the middle of the fourth line, and has room again behind it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 10**6)
        self.num_lines = 0

    def write(self, line: bytes) -> None:
        self.num_lines += 1
        if self.num_lines == 4:
            super().write(line[:10])
            raise OSError(28, "No space left on device")
        super().write(line)


def test_a_disk_that_is_full_ends_the_recording_and_not_the_engine(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = make_half(TraceRecorder(FailingFile(path), HASH_TOKENS, SALT))
    for number in range(9):
        serve(half, FakeRequest(str(number), TEXT))
    half.shutdown()

    assert len(read_trace(path).requests) == 2
    assert half.stats()["recorder.dropped_requests"] == 7
    assert caplog.text.count("the recording ends, its file cannot be written (No space left on device)") == 1


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    assert open_recorder(make_config(), {}) is None


def test_the_setting_has_precedence_over_the_environment(tmp_path: Path) -> None:
    config = make_config(record_trace=str(tmp_path / "set"), record_max_bytes="5 KiB")
    environment = {"KVTIER_RECORD_TRACE": str(tmp_path / "variable"), "KVTIER_RECORD_MAX_BYTES": "nonsense"}

    recorder = open_recorder(config, environment)

    assert recorder is not None
    recorder.close()
    assert [file.name for file in tmp_path.iterdir()] == ["set"]


def test_the_environment_can_say_everything_that_settings_can(tmp_path: Path) -> None:
    (tmp_path / "salt").write_bytes(bytes(32))
    (tmp_path / "salt").chmod(0o600)
    traces = []
    for name in ("one", "other"):
        recorder = open_recorder(
            make_config(),
            {
                "KVTIER_RECORD_TRACE": str(tmp_path / name),
                "KVTIER_RECORD_SALT_FILE": str(tmp_path / "salt"),
                "KVTIER_RECORD_MAX_BYTES": "1MiB",
            },
        )
        assert recorder is not None
        half = make_half(recorder)
        serve(half, FakeRequest("a", TEXT))
        half.shutdown()
        traces.append(read_trace(tmp_path / name).requests[0].hash_ids)

    assert traces[0] == traces[1]


@pytest.mark.parametrize("limit", ["100", "no size"])
def test_a_limit_that_holds_nothing_is_refused_and_no_file_made(tmp_path: Path, limit: str) -> None:
    environment = {"KVTIER_RECORD_TRACE": str(tmp_path / "trace"), "KVTIER_RECORD_MAX_BYTES": limit}

    with pytest.raises(ConfigError, match=limit):
        open_recorder(make_config(), environment)
    assert not list(tmp_path.iterdir())


def test_blocks_are_those_that_are_offloaded(tmp_path: Path) -> None:
    config = make_config(record_trace=str(tmp_path / "trace"), block_size=2 * HASH_TOKENS)
    half = OffloadingConnectorScheduler(FakeSpec(config), open_recorder(config))
    serve(half, FakeRequest("a", TEXT))
    half.shutdown()

    trace = read_trace(tmp_path / "trace")

    assert trace.block_tokens == 2 * HASH_TOKENS
    assert len(trace.requests[0].hash_ids) == len(TEXT) // (2 * HASH_TOKENS)


def test_the_scheduler_half_of_a_connector_records_and_a_worker_half_does_not(tmp_path: Path) -> None:
    config = make_config(cpu_bytes_to_use="1MiB", record_trace=str(tmp_path / "trace"))
    scheduler = OffloadingConnector(config, ConnectorRole.SCHEDULER, open_recorder(config))
    worker = OffloadingConnector(config, ConnectorRole.WORKER)
    assert scheduler.connector_scheduler is not None
    serve(scheduler.connector_scheduler, FakeRequest("a", TEXT))
    for half in (scheduler, worker):
        half.shutdown()

    assert [file.name for file in tmp_path.iterdir()] == ["trace"]
    assert len(read_trace(tmp_path / "trace").requests) == 1


def test_a_connector_that_cannot_be_built_ends_its_recording(tmp_path: Path) -> None:
    config = make_config(
        cpu_bytes_to_use="1MiB", eviction_policy="none", record_trace=str(tmp_path / "trace")
    )

    with pytest.raises(UnknownNameError, match="eviction policy"):
        OffloadingConnector(config, ConnectorRole.SCHEDULER, open_recorder(config))

    assert read_end(tmp_path / "trace") == TraceEnd(0, 0, is_full=False)


def test_a_request_whose_blocks_have_no_names_yet_is_dropped_and_the_others_are_read(path: Path) -> None:
    recorder = TraceRecorder(TraceFile(path, 10**6), HASH_TOKENS, SALT)
    for req_id, num_keys in (("whole", 3), ("short", 2), ("again", 3)):
        recorder.on_arrival(req_id)
        recorder.on_end(req_id, 3 * HASH_TOKENS + 1, 0, [bytes([number]) for number in range(num_keys)])
    recorder.close()

    assert len(read_trace(path).requests) == 2
    assert read_end(path) == TraceEnd(2, 1, is_full=False)


def test_a_prompt_of_no_token_and_one_of_a_million_are_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvtier.recording.recorder.CLOSE_TIMEOUT_S", 60.0
    )  # however long a busy machine writes
    recorder = TraceRecorder(TraceFile(path, 2**30), HASH_TOKENS, SALT)
    for req_id, num_blocks in (("none", 0), ("huge", 10**6 // HASH_TOKENS)):
        recorder.on_arrival(req_id)
        keys = [number.to_bytes(8, "big") for number in range(num_blocks)]
        recorder.on_end(req_id, num_blocks * HASH_TOKENS, 0, keys)
    recorder.close()

    assert [one.num_prompt_tokens for one in read_trace(path).requests] == [0, 10**6]


def test_a_clock_that_goes_back_leaves_a_trace_that_is_read(path: Path) -> None:
    times_s = iter((5.0, 4.0, 6.5))
    recorder = TraceRecorder(TraceFile(path, 10**6), HASH_TOKENS, SALT, clock=lambda: next(times_s))
    for req_id in ("early", "late"):
        recorder.on_arrival(req_id)
        recorder.on_end(req_id, 1, 0, [])
    recorder.close()

    assert [one.arrival_s for one in read_trace(path).requests] == [0.0, 1.5]
