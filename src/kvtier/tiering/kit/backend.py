"""The place that keeps a tier's blocks, as the tier's threads see it.

It knows no job, no queue and no scheduler: ``ThreadedTier`` has those. A store moves the bytes of some blocks between
rows of the primary tier and wherever it keeps them, in envelopes, and says which arrived.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.io_pool import TransferOutcome

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Rows:
    """The primary's rows as a store sees them.

    Attributes:
        flat: every row's bytes one after another, format 'B'.
        row_bytes: length of one.
    """

    flat: memoryview
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.flat) // self.row_bytes

    def row(self, slot: int) -> memoryview:
        """Return the bytes of ``slot``, writable."""
        return self.flat[slot * self.row_bytes : (slot + 1) * self.row_bytes]


def rows_of(primary_kv_view: memoryview) -> Rows:
    """Return the rows behind a primary's view of shape (num_rows, row_bytes), format 'b'. Pure."""
    row_bytes = primary_kv_view.shape[1] if primary_kv_view.shape else 0
    return Rows(primary_kv_view.cast("B"), row_bytes)


class BlockStore(ABC, Generic[S]):
    """Keeps blocks under keys, in spaces that do not see each other: one for each namespace and epoch.

    A call fails as a whole with a TierError when the place cannot be reached; what single blocks lack is part of
    its answer. Several threads call at once.
    """

    @abstractmethod
    def open_space(self, namespace: Namespace, *, is_new: bool) -> S:
        """Return what it takes to reach the blocks of ``namespace``.

        Args:
            namespace: their identity.
            is_new: whether its epoch has just been drawn, so that nothing can be held in it.

        Thread: the scheduler's; must not block.
        """

    @abstractmethod
    def find(self, space: S, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Return which of ``keys`` are held.

        Raises:
            TierError: the place cannot be reached.

        Thread: the lookup's; may block for as long as the store's own time-outs say.
        """

    @abstractmethod
    def store(self, space: S, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Write the rows ``slots`` under ``keys``; those that are held now have arrived.

        Raises:
            TierError: the place cannot be reached; nothing counts as written.

        Thread: any of the pool's; may block likewise.
        """

    @abstractmethod
    def load(self, space: S, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Read ``keys`` into the rows ``slots``; those whose bytes are there and right have arrived.

        Raises:
            TierError: the place cannot be reached; nothing counts as read.

        Thread: any of the pool's; may block likewise.
        """

    def until(self, end_s: float) -> "BlockStore[S]":
        """Return this store for the calls of one job, which should be over by ``end_s``.

        By default the store itself, whose own time-outs must do; one that may be kept busy without an end, a byte at
        a time, returns one that gives up.

        Args:
            end_s: the job's deadline, on the tier's clock.

        Thread: the scheduler's; must not block.
        """
        del end_s
        return self

    def check_reachable(self) -> None:
        """Ask the place once whether it is there and lets us in; called before anything else, may block.

        Raises:
            TierError: it does not, and why.
        """

    def touch(self, space: S, keys: Collection[OffloadKey]) -> None:
        """Mark ``keys`` as recently used. Thread: the scheduler's; must not block."""

    def stats(self) -> dict[str, float]:
        """Return counts and gauges by name."""
        return {}

    def close(self) -> None:
        """Give back connections and files; called once, when no thread uses the store any more."""
