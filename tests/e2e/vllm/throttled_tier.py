"""An fs tier whose disk moves bytes at a rate that a test sets while the engine runs.

The fault sits where a slow disk has it: in the system calls that read and write a block. Threads that read at the same
time share the rate.
"""

import os
import threading
import time
from math import inf
from typing import Any

from kvtier.config import OffloadingConfig
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.factory import TIERS
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system_calls import Buffers, SystemCalls

TIER_NAME = "throttled-fs"


class Throttle:
    """A disk's rate. Mutable are the rate and when the disk is free; ``_lock`` guards both.

    Bytes are counted in the order in which threads ask, and each thread waits until its own have passed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_per_s = inf
        self._free_s = 0.0

    def set_rate(self, bytes_per_s: float) -> None:
        """Let bytes that are moved from now on pass at this rate; ``inf`` is the machine's own."""
        with self._lock:
            self._bytes_per_s, self._free_s = bytes_per_s, 0.0

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read, and take as long as the rate says."""
        num_bytes = os.preadv(fd, buffers, offset)
        self._wait(num_bytes)
        return num_bytes

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write, and take as long as the rate says."""
        num_bytes = os.pwritev(fd, buffers, offset)
        self._wait(num_bytes)
        return num_bytes

    def _wait(self, num_bytes: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)  # the fault itself: this thread of the tier waits for its disk


DISK = Throttle()
"""The disk of all throttled tiers of this process."""


class ThrottledFSTier(FSTier):
    """Keeps blocks as the fs tier does, on a disk with a rate."""

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings = NO_SETTINGS,
        **own: Any,  # Any: a user's JSON
    ) -> None:
        calls = SystemCalls(preadv=DISK.preadv, pwritev=DISK.pwritev)
        super().__init__(config, primary_kv_view, settings, calls=calls, **own)


def register() -> None:
    """Make the tier known to configurations of this process."""
    if TIER_NAME not in TIERS:
        TIERS.register(TIER_NAME, f"{__name__}:ThrottledFSTier")
