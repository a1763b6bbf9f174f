"""How full each place was, and what had been written to it, at evenly spaced times of a simulation.

The recorder plans no events, so it does not change a simulation: between two events nothing changes, so the engine
reports until when that holds, and the recorder reads once for all samples that are due before. A run may take a
thousand times as long as its trace, so every second sample is dropped when there are too many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_SAMPLES = 200
"""More points than a picture can show, and few enough that a result stays some kilobytes. Even, so that half of them
are evenly spaced too."""

FIRST_INTERVAL_S = 1.0
"""Seconds between samples at first; it doubles. Shorter begins with reads that are dropped, longer leaves a short run
with few samples."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Numbers of one moment, by the name of the place.

    Attributes:
        held_blocks: blocks that each place holds, transfers in flight included.
        written_blocks: blocks written to each place since the start; computing writes to the device.
    """

    held_blocks: Mapping[str, int]
    written_blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class History:
    """Readings in columns, at most MAX_SAMPLES and one of the end.

    Attributes:
        at_s: time of each reading, on the clock of the trace.
        held_blocks: the numbers of each place, one per time.
        written_blocks: the same for written blocks.
    """

    at_s: tuple[float, ...] = ()
    held_blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    written_blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class HistoryRecorder:
    """Takes the samples of one run.

    Args:
        begin_s: time of the first sample.
        read: returns the numbers of now.
    """

    def __init__(self, begin_s: float, read: Callable[[], Reading]) -> None:
        self._begin_s = begin_s
        self._read = read
        self._interval_s = FIRST_INTERVAL_S
        self._next_s = begin_s
        self._samples: list[tuple[float, Reading]] = []

    def record_until(self, when_s: float) -> None:
        """Take the samples that are due until ``when_s``; nothing changes before that."""
        if self._next_s > when_s:
            return
        reading = self._read()
        while self._next_s <= when_s:
            if len(self._samples) == MAX_SAMPLES:
                del self._samples[1::2]
                self._interval_s *= 2
            else:
                self._samples.append((self._next_s, reading))
            self._next_s = self._begin_s + len(self._samples) * self._interval_s

    def finish(self, now_s: float) -> History:
        """Return the samples and one of now, at the end of the run."""
        samples = [*self._samples, (max(now_s, self._begin_s), self._read())]

        def columns(read: Callable[[Reading], Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
            return {
                place: tuple(read(reading)[place] for _, reading in samples) for place in read(samples[0][1])
            }

        return History(
            tuple(at_s for at_s, _ in samples),
            columns(lambda reading: reading.held_blocks),
            columns(lambda reading: reading.written_blocks),
        )
