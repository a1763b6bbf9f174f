"""The contract of a backend: what a ``ThreadedTier`` needs from the place where its blocks are kept.

A ``BlockStore`` moves the bytes of some blocks between rows of the primary tier and its backend, each with a header,
and returns which ones succeeded. Beside it is what its threads share: the rows, pages for headers, and counts.
"""

import mmap
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
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


def allocate_page() -> memoryview:
    """Return one zeroed, aligned page, format 'B'."""
    return memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES))


def allocate_pages(num_pages: int, page_bytes: int = HEADER_PAGE_BYTES) -> list[memoryview]:
    """Return zeroed, aligned pages of ``page_bytes``, format 'B', in one piece of memory."""
    stride = -(-page_bytes // HEADER_PAGE_BYTES) * HEADER_PAGE_BYTES
    memory = memoryview(mmap.mmap(-1, num_pages * stride))
    return [memory[start : start + page_bytes] for start in range(0, len(memory), stride)]


class ThreadPages:
    """Aligned pages that each thread has for itself, made at its first use.

    Args:
        num_pages: how many a thread has.
        page_bytes: length of each.
    """

    def __init__(self, num_pages: int, page_bytes: int = HEADER_PAGE_BYTES) -> None:
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self._local = threading.local()

    def of_this_thread(self) -> list[memoryview]:
        """Return the calling thread's, always the same ones, format 'B'. Thread: any."""
        pages: list[memoryview] | None = getattr(self._local, "pages", None)
        if pages is None:
            pages = self._local.pages = allocate_pages(self._num_pages, self._page_bytes)
        return pages


class Counters:
    """Named counts that any thread may raise.

    Mutable are the counts. ``_lock`` guards them.
    """

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def add(self, **amounts: int) -> None:
        """Raise each named count."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Return the counts by name."""
        with self._lock:
            return dict(self._counts)


class BlockStore(ABC, Generic[S]):
    """Keeps blocks under keys, in namespaces that do not see each other: one for each identity and epoch.

    A call that cannot reach the backend raises a TierError; what is wrong with single blocks is part of the answer.
    Several threads call at once. ``S`` is the namespace handle: whatever the backend needs to reach one namespace.
    """

    @property
    def is_open(self) -> bool:
        """Whether a lookup may be answered from memory: nothing keeps the blocks that are known from being used."""
        return True

    @property
    def refusal(self) -> str:
        """Why nothing of the namespace is moved, in a few words; empty where it is, and before the first look."""
        return ""

    @abstractmethod
    def open_namespace(self, identity: Namespace, *, is_new: bool) -> S:
        """Return the handle of a namespace.

        Args:
            identity: what makes its blocks its own: model, layout, epoch.
            is_new: whether its epoch has just been drawn, so that nothing can be held in it.

        Thread: the scheduler's; must not block.
        """

    @abstractmethod
    def contains_batch(self, namespace: S, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Return which of ``keys`` are held.

        Raises:
            TierError: the backend cannot be reached.

        Thread: the lookup's; may block for as long as the store's own time-outs say.
        """

    @abstractmethod
    def store(self, namespace: S, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Write the rows ``slots`` under ``keys``; those that are held afterwards have succeeded.

        Raises:
            TierError: the backend cannot be reached; nothing counts as written.

        Thread: any of the pool's; may block likewise.
        """

    @abstractmethod
    def load(self, namespace: S, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Read ``keys`` into the rows ``slots``; those whose bytes are there and right have succeeded.

        Raises:
            TierError: the backend cannot be reached; nothing counts as read.

        Thread: any of the pool's; may block likewise.
        """

    def drop(self, namespace: S, keys: Sequence[OffloadKey]) -> None:
        """Delete ``keys``, whose bytes are wrong although their checksums are right; absent ones are no error.

        The default deletes nothing: the engine that found them wrong does not look them up any more, others may.

        Raises:
            TierError: the backend cannot be reached.

        Thread: any of the pool's; may block likewise.
        """

    def with_deadline(self, end_s: float) -> "BlockStore[S]":
        """Return this store for the calls of one job, which should be over by ``end_s``.

        The default is the store itself: its own time-outs must do. A backend that may keep a call busy without an end,
        a byte at a time, returns a store that stops waiting then.

        Args:
            end_s: the job's deadline, on the tier's clock.

        Thread: the scheduler's; must not block.
        """
        del end_s
        return self

    def check_reachable(self) -> None:
        """Check once that the backend is there and accepts us; called before anything else, may block.

        Raises:
            TierError: it is not, or it does not, and why.
        """

    def restore_description(self, namespace: S) -> bool:
        """Write what describes a namespace again if it was written before and is gone; return whether it was.

        It is written before the first block and kept as long as the last one, so blocks are gone with it. Nothing to
        do for a backend that keeps no description, or learns of lost blocks in another way.

        Raises:
            TierError: the backend cannot be reached.

        Thread: any of the tier's; may block for as long as the store's own time-outs say.
        """
        del namespace
        return False

    def on_purged(self) -> None:
        """Forget what was remembered of blocks: all of them, or a tenant's, were removed. Thread: the scheduler's."""

    def stats(self) -> dict[str, float]:
        """Return counts and gauges by name."""
        return {}

    def on_forked(self) -> None:
        """Close a forked child's copies of files whose locks it shares; it takes no lock and gives none back."""

    def close(self) -> None:
        """Close connections and files; called once, when no thread uses the store any more."""
