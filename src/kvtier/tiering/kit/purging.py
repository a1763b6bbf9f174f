"""The removal of every block of a namespace while the engine goes on: one thread, some blocks at a time.

States: idle -> under way -> ended, until ``poll`` has taken the outcome -> idle. The thread stops between two batches
when the tier shuts down; what is removed by then stays removed.
"""

import logging
import threading
from collections.abc import Callable, Generator
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.errors import KVTierError, TierError
from kvtier.tiering.base import PurgeOutcome

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 500
"""Blocks removed between two looks at whether the tier shuts down: a fraction of a second on a disk or a server."""

MAX_KEYS = 65_536
"""Keys of removed blocks that are kept for the cause of later misses; about 70 bytes each while the purge lasts."""


class Removed(NamedTuple):
    """What one batch has removed.

    Attributes:
        num_blocks: how many blocks.
        keys: those of them whose names tell their key, and that the tier does not remember itself.
    """

    num_blocks: int
    keys: list[OffloadKey]


Batches = Generator[Removed, None, None]

RemoveBlocks = Callable[[str, int | None], Batches]
"""Removes every block of the namespace of this name, or of one tenant in it by number, a batch for each item. Runs on
the purge's thread; it may raise KVTierErrors, and is closed when the tier shuts down meanwhile."""


class BackgroundPurge:
    """One purge at a time of a tier's namespace.

    Mutable are the thread, its outcome and the number of blocks. ``begin``, ``poll`` and ``stop`` are called on the
    scheduler's thread; the outcome is written by the purge's thread before it ends and read after that.

    Args:
        tier: the type of the tier, for messages.
        remove: removes the blocks.

    Attributes:
        tenant: number of the tenant whose blocks the last purge removes; None: all.
    """

    def __init__(self, tier: str, remove: RemoveBlocks) -> None:
        self._tier = tier
        self._remove = remove
        self.tenant: int | None = None
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_removed = 0
        self._keys: list[OffloadKey] = []
        self._error = ""

    def begin(self, namespace: str, tenant: int | None = None) -> None:
        """Start to remove the blocks of a namespace, or those of one tenant by its number.

        Raises:
            TierError: there is no thread for it.
        """
        assert self._thread is None, "one purge at a time"
        self._num_removed, self._keys, self._error = 0, [], ""
        self.tenant = tenant
        thread = threading.Thread(
            target=self._work, args=(namespace, tenant), name=f"kvtier-{self._tier}-purge", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise TierError(self._tier, f"no thread for the purge: {error}") from error
        self._thread = thread

    def poll(self) -> PurgeOutcome | int:
        """Return how the purge ended, once; while it goes on, how many blocks it has removed."""
        if self._thread is not None and self._thread.is_alive():
            return self._num_removed
        self._thread = None
        outcome = PurgeOutcome(self._num_removed, self._keys, self._error)
        self._keys = []
        return outcome

    def stop(self, timeout_s: float) -> bool:
        """End the purge before its time; False when its thread has not ended in ``timeout_s``."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _work(self, namespace: str, tenant: int | None) -> None:
        try:
            batches = self._remove(namespace, tenant)
            for num_blocks, keys in batches:
                self._num_removed += num_blocks
                self._keys += keys[: MAX_KEYS - len(self._keys)]
                if self._is_stopped.is_set():
                    batches.close()
                    self._error = "the engine has ended before all were removed"
                    return
        except KVTierError as error:
            self._error = str(error)
        except Exception as error:  # thread top: an engine serves on without its purge
            logger.exception("tier %s: a purge has failed", self._tier)
            self._error = f"{type(error).__name__}: {error}"
