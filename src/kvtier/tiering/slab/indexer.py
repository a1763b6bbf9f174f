"""The thread that finds out at the start what a slab holds.

It decides nothing about blocks: ``scan`` does, and the book takes over what was found, in one go. Until then the tier
holds nothing and has no room.
"""

import logging
import threading

from kvtier.tiering.slab.book import SlotBook
from kvtier.tiering.slab.scan import scan
from kvtier.tiering.slab.slab_file import SlabFile
from kvtier.tiering.slab.space import Space

logger = logging.getLogger(__name__)


class Indexer:
    """Scans a slab once, in the background.

    Mutable are two events and the thread; events guard themselves, and only the scheduler's thread starts and stops.

    Args:
        file: the slab; a new one holds nothing and is not scanned.
        book: takes over what is found.
    """

    def __init__(self, file: SlabFile, book: SlotBook) -> None:
        self._file = file
        self._book = book
        self._ended = threading.Event()
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if file.is_new:
            self._ended.set()

    def start(self, space: Space) -> None:
        """Begin to look for the blocks of ``space``; a new slab has none."""
        if self._ended.is_set() or self._thread is not None:
            return
        self._thread = threading.Thread(
            target=self._work, args=(space,), name="kvtier-slab-index", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("tier slab: no thread to read %s, it is not used: %s", self._file.path, error)
            self._thread = None
            self._ended.set()

    @property
    def is_complete(self) -> bool:
        """Whether everything that can be found has been found."""
        return self._ended.is_set()

    def wait_complete(self, timeout_s: float) -> bool:
        """Block until everything has been found, or nobody looks any more; False when ``timeout_s`` passed first."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """End the scan before its time; does not wait. Lookups that wait for it go on."""
        self._is_stopped.set()
        self._ended.set()

    def join(self, timeout_s: float) -> bool:
        """Block until the thread has ended; False when ``timeout_s`` passed first."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self, space: Space) -> None:
        try:
            contents = scan(self._file, space.namespace.digest, self._is_stopped.is_set)
            if not self._is_stopped.is_set():
                self._book.adopt(space, contents)
        except Exception:  # thread top
            logger.exception("tier slab: reading %s failed, it is not used", self._file.path)
        finally:
            self._ended.set()
