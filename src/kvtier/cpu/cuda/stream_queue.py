"""The device queue of a CUDA device: a stream, and events that say how far it is.

It decides nothing about copies; ``queue_lane`` keeps their books. The launches have not been confirmed on a device;
their order is tested with a runtime that writes it down.
"""

from collections.abc import Callable
from typing import Any

import torch

from kvtier.cpu.queue_lane import Ticket

cuda: Any = torch.cuda  # Any: torch does not annotate its CUDA interface


class StreamQueue:
    """A stream beside the compute stream, for the copies of one direction.

    Args:
        device: the CUDA device.
        runtime: torch's interface to CUDA.
    """

    def __init__(self, device: torch.device, runtime: Any = cuda) -> None:  # noqa: ANN401  # Any: as above
        self._device = device
        self._cuda = runtime
        self._stream = runtime.Stream(device)

    def launch(self, copy: Callable[[], None]) -> Ticket:
        """Launch ``copy`` after what the compute stream holds now.

        A store needs what compute is still writing; a load must not overwrite what compute is still reading.
        When ``copy`` raises, nothing of it is running any more by the time the error is passed on.
        """
        start = self._cuda.Event(enable_timing=True)
        end = self._cuda.Event(enable_timing=True)
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        try:
            with self._cuda.stream(self._stream):
                start.record()
                copy()
                end.record()
        except BaseException:
            self._stream.synchronize()
            raise
        return StreamTicket(start, end, lambda: self._cuda.current_stream(self._device))


class StreamTicket:
    """A launched copy on a stream."""

    def __init__(self, start: Any, end: Any, compute_stream: Callable[[], Any]) -> None:  # noqa: ANN401  # as above
        self._start = start
        self._end = end
        self._compute_stream = compute_stream

    def is_done(self) -> bool:
        """Return True when the device has passed the copy."""
        return bool(self._end.query())

    def block(self) -> None:
        """Block until the device has passed the copy."""
        self._end.synchronize()

    def publish(self) -> None:
        """Order compute launched from now on after the copy."""
        self._compute_stream().wait_event(self._end)

    def elapsed_s(self) -> float:
        """Return the seconds between the copy's first launch and its end, as the device measured them."""
        return float(self._start.elapsed_time(self._end)) / 1000
