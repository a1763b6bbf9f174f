"""In which order a stream queue launches: after compute, between two events; compute after the second of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvtier.cpu.cuda.start import StreamQueue


class Recorder:
    """Torch's interface to CUDA, as a list of what was asked of it; the stream of compute is called "compute"."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = "compute"
        self.num_events = 0

    def Stream(self, device: torch.device) -> "FakeStream":  # noqa: N802
        return FakeStream(self, "copies")

    def Event(self, *, enable_timing: bool) -> "FakeEvent":  # noqa: N802
        assert enable_timing
        self.num_events += 1
        return FakeEvent(self, self.num_events)

    def current_stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, self.current)

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class FakeStream:
    """A stream by its name."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.name = name
        self._recorder = recorder

    def wait_stream(self, other: "FakeStream") -> None:
        self._recorder.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self._recorder.calls.append(f"{self.name} waits for event {event.number}")

    def synchronize(self) -> None:
        self._recorder.calls.append(f"host waits for {self.name}")


class FakeEvent:
    """An event by its number."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self.number = number
        self._recorder = recorder

    def record(self) -> None:
        self._recorder.calls.append(f"event {self.number} on {self._recorder.current}")

    def query(self) -> bool:
        self._recorder.calls.append(f"is event {self.number} there?")
        return True

    def synchronize(self) -> None:
        self._recorder.calls.append(f"host waits for event {self.number}")

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1500.0 * (other.number - self.number)


def test_a_copy_waits_for_compute_and_compute_for_the_copy_and_the_host_for_nothing() -> None:
    recorder = Recorder()
    queue = StreamQueue(torch.device("cuda"), recorder)

    handle = queue.launch(lambda: recorder.calls.append(f"copy on {recorder.current}"))
    assert handle.is_done()
    handle.publish()

    assert recorder.calls == [
        "copies waits for compute",
        "event 1 on copies",
        "copy on copies",
        "event 2 on copies",
        "is event 2 there?",
        "compute waits for event 2",
    ]
    assert recorder.current == "compute"
    assert handle.elapsed_s() == 1.5


def test_waiting_for_a_copy_waits_for_its_last_event() -> None:
    recorder = Recorder()

    StreamQueue(torch.device("cuda"), recorder).launch(lambda: None).block()

    assert recorder.calls[-1] == "host waits for event 2"


def test_when_a_launch_fails_what_it_launched_has_ended_by_the_time_the_error_is_passed_on() -> None:
    recorder = Recorder()

    def fail() -> None:
        recorder.calls.append("first of two copies")
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        StreamQueue(torch.device("cuda"), recorder).launch(fail)

    assert recorder.calls[-2:] == ["first of two copies", "host waits for copies"]
    assert recorder.current == "compute"
