"""The device queue of a CUDA device: a stream, and events that say how far it is.

It decides nothing about copies; ``queue_lane`` keeps their books. The launches have not been confirmed on a device.
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
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = cuda.Stream(device)

    def launch(self, copy: Callable[[], None]) -> Ticket:
        """Launch ``copy`` after what the compute stream holds now.

        A store needs what compute is still writing; a load must not overwrite what compute is still reading.
        When ``copy`` raises, nothing of it is running any more by the time the error is passed on.
        """
        start = cuda.Event(enable_timing=True)
        end = cuda.Event(enable_timing=True)
        self._stream.wait_stream(cuda.current_stream(self._device))
        try:
            with cuda.stream(self._stream):
                start.record()
                copy()
                end.record()
        except BaseException:
            self._stream.synchronize()
            raise
        return StreamTicket(self._device, start, end)


class StreamTicket:
    """A launched copy on a stream."""

    def __init__(self, device: torch.device, start: torch.Event, end: torch.Event) -> None:
        self._device = device
        self._start = start
        self._end = end

    def is_done(self) -> bool:
        """Return True when the device has passed the copy."""
        return bool(self._end.query())

    def block(self) -> None:
        """Block until the device has passed the copy."""
        self._end.synchronize()

    def publish(self) -> None:
        """Order compute launched from now on after the copy."""
        cuda.current_stream(self._device).wait_event(self._end)

    def elapsed_s(self) -> float:
        """Return the seconds between the copy's first launch and its end, as the device measured them."""
        return float(self._start.elapsed_time(self._end)) / 1000
