"""The key ring of a living engine: read at the start, and again whenever its file has changed."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tiering.kit.key_ring import KeyRing, Stamp, read_ring_and_stamp, stamp_of

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two looks at the ring's file. Fewer are a system call for almost every batch; after more a dropped
tenant's blocks can be read for longer."""


class LivingRing:
    """The ring of a file, read again when the file has changed.

    Mutable are the ring, its stamp and when it is looked at next. ``_lock`` guards them against two threads that look
    at the same time, and is held while the small file is read; readers take the ring as one reference. A file that is
    gone, or that has become unusable, is an empty ring: nothing is read or stored until it is back.

    Args:
        path: the file.
        clock: seconds, monotonic.

    Attributes:
        ring: as last read.

    Raises:
        ConfigError: the file cannot be used at the start.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp: Stamp | None
        self.ring, self._stamp = read_ring_and_stamp(path)
        self._names_secret = self.ring.names_secret
        self._next_look_s = clock() + CHECK_S

    def refresh(self) -> None:
        """Make ``ring`` what it was a second ago at most. Thread: any; reads a small file when it has changed."""
        if self._clock() < self._next_look_s:
            return
        # Who comes second waits: otherwise it would go on with the ring of before.
        with self._lock:
            if self._clock() < self._next_look_s:
                return
            if self._find_stamp() != self._stamp:
                self._read_again()
            self._next_look_s = self._clock() + CHECK_S

    def _find_stamp(self) -> Stamp | None:
        try:
            return stamp_of(self._path.stat())
        except OSError:
            return None

    def _read_again(self) -> None:
        try:
            ring, stamp = read_ring_and_stamp(self._path)
            self._require_same(ring)
        except ConfigError as error:
            if self.ring.entries or self._stamp is not None:
                logger.warning("encryption: nothing encrypted is stored or loaded: %s", error)
            self.ring, self._stamp = KeyRing(self._names_secret), self._find_stamp()
            return
        logger.info("encryption: the key ring has changed: %d entries", len(ring.entries))
        self.ring, self._stamp = ring, stamp

    def _require_same(self, ring: KeyRing) -> None:
        if ring.names_secret != self._names_secret:
            remedy = "is another ring than at the start: restart the engine to use it"
            raise ConfigError("key_file", str(self._path), remedy)
