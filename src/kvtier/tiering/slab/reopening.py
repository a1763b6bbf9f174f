"""Which file a slab tier works with: the one of its start, or the one that is there since that was lost.

A slab is lost when another program deletes, replaces or cuts it, or its file system goes. Its blocks are misses then
and its jobs fail, until no thread uses the old file any more and a file can be opened as at a start: one that is there
is kept, and one that is missing is made anew if its file system is mounted. What was known of the old one goes with it.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.errors import ConfigError, TierError
from kvtier.tiering.slab.scan import Indexer
from kvtier.tiering.slab.slab_file import SlabFile
from kvtier.tiering.slab.slot_table import SlabNamespace, SlotTable

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two checks whether the file is there, a few calls of the system. Longer stores more blocks into a
file that was deleted; shorter adds them to every job."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the thread that reads headers is waited for before its file is closed; it stops at its next
slot."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenSlab:
    """A slab and what is known of it.

    Attributes:
        file: the slab.
        slots: which block is where.
        indexer: finds what was in the slab when it was opened.
    """

    file: SlabFile
    slots: SlotTable
    indexer: Indexer


class CurrentSlab:
    """The slab that jobs use.

    Mutable are the slab, the namespace, why there is none, how many jobs use it, when it was checked last and whether a
    thread checks it. ``_lock`` guards them; ``opened`` is read without it, for a lookup that comes too late is a miss.

    Args:
        open_file: opens the file as at a start.
        make_slot_table: makes the table of the slots of a file.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the file cannot be opened.
        TierError: the file belongs to a tier that is running.

    Attributes:
        opened: the slab, or the one that was lost.
        num_reopened: how often another one was opened; any thread may read it.
    """

    def __init__(
        self,
        open_file: Callable[[], SlabFile],
        make_slot_table: Callable[[SlabFile], SlotTable],
        clock: Callable[[], float],
    ) -> None:
        self._open_file = open_file
        self._make_slot_table = make_slot_table
        self._clock = clock
        self._lock = threading.Lock()
        self._namespace: SlabNamespace | None = None
        self._loss: str | None = None
        self._is_file_open = True
        self._num_users = 0
        self._checked_s = clock()
        self._is_checking = False
        self.opened = self._open()
        self.num_reopened = 0

    def open_namespace(self, namespace: SlabNamespace) -> None:
        """Make ``namespace`` the one whose blocks are found, in this slab and in those that follow."""
        with self._lock:
            self._namespace = namespace
        self.opened.slots.open_namespace(namespace)

    @contextmanager
    def use(self) -> Iterator[OpenSlab]:
        """Give the slab, which stays open meanwhile. Thread: any of the pool's; may block.

        Raises:
            TierError: it is lost, and there is no other yet.
        """
        if self._begin_check():
            try:
                self._check()
            finally:
                with self._lock:
                    self._is_checking = False
        with self._lock:
            if self._loss is not None:
                raise TierError("slab", self._loss)
            self._num_users += 1
            opened = self.opened
        try:
            yield opened
        finally:
            with self._lock:
                self._num_users -= 1

    def require_there(self, opened: OpenSlab) -> None:
        """Return if the file is still there, of which a call has just failed or moved too little.

        Raises:
            TierError: it is lost.
        """
        loss = opened.file.find_loss()
        if loss is not None:
            with self._lock:
                self._checked_s -= CHECK_S
            raise TierError("slab", loss)

    def close(self) -> None:
        """Close the file, unless a thread still reads from it."""
        if self._is_file_open and not _close(self.opened):
            # Its number must not become another file's while that thread may still read from it.
            path = self.opened.file.path
            logger.warning("tier slab: %s hangs; it stays locked until this process ends", path)
        self._is_file_open = False

    def close_in_child(self) -> None:
        """Close a forked child's copy of the file, so that it does not hold the lock when its parent has ended."""
        if self._is_file_open:
            self.opened.file.close_in_child()

    def _begin_check(self) -> bool:
        now_s = self._clock()
        with self._lock:
            if self._is_checking or now_s - self._checked_s < CHECK_S:
                return False
            self._checked_s = now_s
            self._is_checking = True
            return True

    def _check(self) -> None:
        """Find out whether the file is lost, and open another one as soon as nothing uses it."""
        before = self._loss
        loss = before or self.opened.file.find_loss()
        if loss is None:
            return
        with self._lock:
            self._loss = loss
            if self._num_users:
                return
        if self._is_file_open:
            if not _close(self.opened):
                return
            self._is_file_open = False
        try:
            opened = self._open()
        except (ConfigError, TierError) as error:
            with self._lock:
                self._loss = f"{loss.partition(' (')[0]} ({error})"
            return
        self._is_file_open = True
        with self._lock:
            namespace = self._namespace
        if namespace is not None:
            opened.slots.open_namespace(namespace)
            opened.indexer.start(namespace)
        with self._lock:
            self.opened, self._loss = opened, None
            self.num_reopened += 1
        if before is None:  # otherwise jobs have failed meanwhile, and the log has the outage and its end
            is_empty = ", empty" if opened.file.is_new else ""
            logger.warning(
                "tier slab: %s: its blocks are misses; the file is used as it is now%s", loss, is_empty
            )

    def _open(self) -> OpenSlab:
        file = self._open_file()
        slots = self._make_slot_table(file)
        return OpenSlab(file, slots, Indexer(file, slots))


def _close(opened: OpenSlab) -> bool:
    """Close a slab that no job uses; False while its headers are read."""
    opened.indexer.stop()
    if not opened.indexer.join(CLOSE_TIMEOUT_S):
        return False
    opened.file.close()
    return True
