"""Who evicts from a directory that several processes share.

It evicts nothing. The kernel releases the lock of a process that dies, so another takes over.
"""

import fcntl
import heapq
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.folders import (
    LOCK_NAME,
    TEMPORARY_NAME,
    BlockFile,
    FSNamespace,
    namespace_of,
    remove_empty_folders,
    sweep_temporaries,
    walk_blocks,
)
from kvtier.tiering.fs.recycled_files import RecycledFiles
from kvtier.tiering.fs.removals import Removals
from kvtier.tiering.fs.shared_usage import UsageRecord
from kvtier.tiering.fs.system import open_shared_file


@contextmanager
def leading(root: Path, file_mode: int) -> Iterator[bool]:
    """Hold the lock of the directory's only evictor, if nobody else does; gives whether it is ours.

    Args:
        root: the directory.
        file_mode: permissions of the lock's file when it is made.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = open_shared_file(root / LOCK_NAME, file_mode)
    is_leader = False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_leader = True
        except BlockingIOError:
            pass
        yield is_leader
    finally:
        # Closing alone would not do: a child that was forked meanwhile has the same lock.
        if is_leader:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


logger = logging.getLogger(__name__)

MAX_CANDIDATES = 32_768
"""Files remembered from a walk as the next to go, about 300 bytes each. Fewer walk more often."""

WALK_TTL_S = 600.0
"""Seconds after which a walk is repeated before more is evicted. Longer trusts a count that crashed writers
and people with ``rm`` have made wrong; shorter walks a large directory all the time."""

SLACK_SHARE = 32
"""One part in so many of the capacity is kept free, in whole blocks, so that a writer rarely has to wait for an
eviction. A larger share of room would be wasted; none at all in directories of a few blocks."""

MAX_SPARES = 256
"""Files of evicted blocks that are kept to be written over, where the slack has room for them. More would lie idle, and
take long to remove at the end; fewer are used up by one long prompt, and new files are made."""

BARREN_FACTOR = 10
"""After a walk that led to no eviction, the next has to wait this many times as long as it took: a directory full
of what cannot be removed must not be walked all the time. For a small directory that is no time at all."""

ROOM_WAIT_S = 0.25
"""Seconds that a writer waits for room before its block is declined. A thread that waits moves nothing else,
so it must be short; an eviction of a few files takes milliseconds."""

LEADER_RETRY_S = 0.01
"""Pause between attempts to become the one who evicts while a writer waits, in seconds."""

REFRESH_S = 300.0
"""Seconds between signs of life in the shared count; a host that gives none for an hour is forgotten. Spare files of a
tier that has stored nothing for so long are removed."""

WATCH_S = 1.0
"""Seconds between two looks at whether the folders are still there, four calls of ``stat``. Longer answers lookups with
blocks that somebody has removed, whose loads then fail; shorter wakes an idle engine more often."""

BATCH_BLOCKS = 64
"""Files removed between two changes of the shared count; waiting writers get their room in such portions."""


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """Room that a waiting writer needs.

    Attributes:
        num_bytes: how much.
        is_disk_full: whether so much is to be evicted whatever the count says.
    """

    num_bytes: int
    is_disk_full: bool


class Evicted(NamedTuple):
    """What an eviction gave.

    Attributes:
        num_bytes: length of the file, 0 when it stays or somebody else removed it.
        is_kept: whether it waits to be written over, and so still counts.
    """

    num_bytes: int
    is_kept: bool = False


class Evictor:
    """A daemon thread that walks, counts and evicts; started by ``start``.

    Mutable for several threads are the wishes of waiting writers, the count of rounds and the end; ``_changed``
    guards them. The candidates belong to the evictor's thread.

    Args:
        directory: what it works on.
        current_space: the namespace whose index learns what is there and what went.
        spares: takes files of evicted blocks that can be written over.

    Attributes:
        removals: what others remove under the tier.
    """

    def __init__(
        self, directory: FSDirectory, current_space: Callable[[], FSNamespace], spares: RecycledFiles
    ) -> None:
        self._directory = directory
        self._current_space = current_space
        self._spares = spares
        self._changed = threading.Condition()
        self._wishes: list[Wish] = []
        self._has_work = False
        self._is_running = False
        self._is_closed = False
        self._num_rounds = 0
        self._num_looks = 0
        self.removals = Removals(directory, current_space, spares)
        self._candidates: list[BlockFile] = []
        self._walked_s: float | None = None
        self._walk_took_s = 0.0
        self._freed_since_walk_bytes = 0
        self._num_found_blocks = 0
        self._thread = threading.Thread(target=self._work, name="kvtier-fs-evictor", daemon=True)

    def start(self) -> None:
        """Start the thread; its first work is to see what is there."""
        self._thread.start()

    def note(self, book: UsageRecord | None) -> None:
        """Ask for an eviction, without waiting for it, when ``book`` says that the slack is being used up."""
        block_bytes = self._directory.block_bytes
        if book is None:
            return
        if not book.is_counted or plan_excess(book, block_bytes, self._spares.num_bytes) > 0:
            self.ask()

    def ask(self) -> None:
        """Ask for an eviction, without waiting for it, when spare files were taken."""
        with self._changed:
            self._has_work = True
            self._changed.notify_all()

    def make_room(self, num_bytes: int, *, is_disk_full: bool = False) -> None:
        """Wait, a quarter of a second at most, until an eviction has been tried.

        Args:
            num_bytes: what is to be written.
            is_disk_full: the disk refused it although the capacity allows it. So much is evicted then, whatever
                the count says: a disk filled by others shrinks the tier instead of stopping it.
        """
        wish = Wish(num_bytes, is_disk_full)
        with self._changed:
            enough_rounds = self._num_rounds + (2 if self._is_running else 1)
            self._wishes.append(wish)
            self._has_work = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._num_rounds >= enough_rounds, ROOM_WAIT_S)
            # A round takes the wishes that it serves; one that nobody could serve ends with its writer.
            self._wishes = [other for other in self._wishes if other is not wish]

    def shutdown(self, timeout_s: float) -> bool:
        """End the thread; False when it had not ended after ``timeout_s``; idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        self._guard(self._begin)
        while self._wait_for_work():
            self._guard(self._run_round)
        self._guard(self._leave)

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # thread top
            logger.exception("tier fs: tidying %s failed", self._directory.root)
        with self._changed:
            self._is_running = False
            self._num_rounds += 1
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Return True with work to do, False at the end; gives signs of life in between."""
        while True:
            with self._changed:
                has_work = self._changed.wait_for(lambda: self._is_closed or self._has_work, WATCH_S)
                if self._is_closed:
                    return False
                # Also of a look at the folders: a writer that comes now must wait for the round behind it.
                self._is_running = True
                if has_work:
                    self._has_work = False
                    return True
            self._guard(self._look)

    def _look(self) -> None:
        """See whether the folders are there; now and then give a sign of life, and spare files back."""
        was_due = self.removals.is_count_due
        has_lost = self.removals.look()
        if not self.removals.has_root:
            return
        self._num_looks += 1
        if self._num_looks * WATCH_S >= REFRESH_S:
            # Nobody has stored for minutes, and others may want the room of the spare files.
            self._num_looks = 0
            self._spares.give_up(self._directory.ledger)
            self._directory.ledger.refresh()
        if was_due and not has_lost:
            self.ask()

    def _leave(self) -> None:
        self.removals.close()
        if self.removals.has_root:
            self._spares.give_up(self._directory.ledger)
            self._directory.ledger.leave()

    def _begin(self) -> None:
        directory = self._directory
        space = self._current_space()
        try:
            sweep_temporaries(directory.root / TEMPORARY_NAME, directory.owner, directory.wall_clock())
            with leading(directory.root, directory.file_mode) as is_leader:
                book = self._walk(space, is_recount=is_leader)
            if book is not None and book.used_bytes > book.limit_bytes:
                self.note(book)
        finally:
            # A walk that failed leaves an index with gaps; questions fill them as they do for other writers.
            space.index.set_complete()

    def _run_round(self) -> None:
        directory = self._directory
        if self.removals.look() and not self._wishes:
            return  # more may be removed just now: the next look has it counted
        while self.removals.restore_root() if self._wishes else self.removals.has_root:
            with suppress(FileNotFoundError), leading(directory.root, directory.file_mode) as is_leader:
                if is_leader:
                    self._evict()
                    return
            with self._changed:
                if self._is_closed or not self._wishes:
                    return
                self._changed.wait(LEADER_RETRY_S)

    def _evict(self) -> None:
        wishes = self._take_wishes()
        book = self._directory.ledger.refresh()
        if book is None:
            return
        if not (book.is_counted and self._is_walk_fresh()):
            book = self._walk(None, is_recount=True) or book
        block_bytes = self._directory.block_bytes
        num_spares = plan_num_spares(book, block_bytes)
        self._directory.ledger.remove(self._spares.trim(num_spares))
        wanted_bytes = sum(wish.num_bytes for wish in wishes)
        disk_full_bytes = sum(wish.num_bytes for wish in wishes if wish.is_disk_full)
        excess_bytes = plan_excess(book, block_bytes, self._spares.num_bytes) + wanted_bytes
        excess_bytes = max(disk_full_bytes, excess_bytes)
        has_just_walked = False
        while excess_bytes > 0 and not self._is_closed:
            if not self._candidates:
                if has_just_walked or self._is_barren():
                    return
                self._walk(None, is_recount=True)
                has_just_walked = True
            freed_bytes = self._evict_batch(excess_bytes, num_spares)
            excess_bytes -= freed_bytes
            self._freed_since_walk_bytes += freed_bytes
            has_just_walked = has_just_walked and freed_bytes == 0

    def _take_wishes(self) -> list[Wish]:
        with self._changed:
            wishes, self._wishes = self._wishes, []
            return wishes

    def _is_walk_fresh(self) -> bool:
        if self._walked_s is None or self.removals.is_count_due:
            return False
        return self._directory.clock() - self._walked_s < WALK_TTL_S

    def _is_barren(self) -> bool:
        """Return whether the last walk found what cannot be removed, and that not long ago for what it cost."""
        if self._walked_s is None or self._freed_since_walk_bytes or not self._num_found_blocks:
            return False
        return self._directory.clock() - self._walked_s < BARREN_FACTOR * self._walk_took_s

    def _walk(self, space: FSNamespace | None, *, is_recount: bool) -> UsageRecord | None:
        """See every block: who is oldest, how much there is, and what of it ``space`` should know.

        Returns:
            The corrected count, None when this was no recount.
        """
        directory = self._directory
        begun_s = directory.clock()
        if is_recount and self.removals.take_count():
            space = self._current_space()  # what is left of its blocks is to be found again
        begun = directory.ledger.begin_recount() if is_recount else None
        found_bytes = sweep_temporaries(
            directory.root / TEMPORARY_NAME, directory.owner, directory.wall_clock()
        )

        def observe() -> Iterator[BlockFile]:
            nonlocal found_bytes
            for block in walk_blocks(directory.root):
                if self._is_closed:
                    return
                found_bytes += block.num_bytes
                if space is not None and namespace_of(block.path) == space.namespace.name:
                    space.index.add((block.key,))
                yield block

        oldest = heapq.nsmallest(MAX_CANDIDATES, observe(), key=lambda block: (block.mtime_ns, block.path))
        if self._is_closed:
            return None
        self._candidates = oldest[::-1]
        self._num_found_blocks = len(oldest)
        self._walked_s = directory.clock()
        self._walk_took_s = self._walked_s - begun_s
        self._freed_since_walk_bytes = 0
        if begun is None:
            if is_recount:
                self.removals.ask_count()
            return None
        remove_empty_folders(directory.root, directory.wall_clock())
        counted = directory.ledger.end_recount(found_bytes, begun)
        if counted is None:
            self.removals.ask_count()
        return counted

    def _evict_batch(self, excess_bytes: int, num_spares: int) -> int:
        """Evict the next candidates, as many as are needed or a batch, and return the bytes they gave.

        Args:
            excess_bytes: how much is needed.
            num_spares: how many files may be kept to be written over; others are removed.
        """
        own = self._current_space()
        evicted_bytes, kept_bytes, num_blocks, keys = 0, 0, 0, []
        for _ in range(min(BATCH_BLOCKS, len(self._candidates))):
            if evicted_bytes >= excess_bytes:
                break
            block = self._candidates.pop()
            is_own = namespace_of(block.path) == own.namespace.name
            heir = own.namespace.name if is_own and len(self._spares) < num_spares else None
            evicted = self._evict_if_still_old(block, heir)
            evicted_bytes += evicted.num_bytes
            kept_bytes += evicted.num_bytes if evicted.is_kept else 0
            num_blocks += evicted.num_bytes > 0
            if is_own and evicted.num_bytes > 0:
                keys.append(block.key)
        own.index.evict(keys)
        self._directory.ledger.remove(evicted_bytes - kept_bytes)
        self._directory.counters.add(evicted_blocks=num_blocks, evicted_bytes=evicted_bytes)
        return evicted_bytes

    def _evict_if_still_old(self, block: BlockFile, heir: str | None) -> Evicted:
        """Keep the file for blocks of the namespace ``heir``, or remove it."""
        try:
            status = os.lstat(block.path)
            if status.st_mtime_ns != block.mtime_ns:
                return Evicted(0)  # used since the walk: the next walk gives it its new place
            if heir and self._spares.can_keep(status) and self._spares.keep(block.path, heir):
                return Evicted(status.st_size, is_kept=True)
            return Evicted(self._directory.files.remove(block.path))
        except FileNotFoundError:
            return Evicted(0)
        except OSError as error:
            logger.warning("tier fs: %s cannot be evicted: %s", block.path, error)
            return Evicted(0)


def plan_excess(book: UsageRecord, block_bytes: int, spare_bytes: int) -> int:
    """Return by how many bytes a directory is beyond where it should be, negative when below. Pure.

    Args:
        book: the shared count.
        block_bytes: length of a block's file.
        spare_bytes: what of the count waits to be written over by the one who asks.
    """
    slack_bytes = plan_slack_blocks(book, block_bytes) * block_bytes
    return book.used_bytes - spare_bytes - (book.limit_bytes - slack_bytes)


def plan_num_spares(book: UsageRecord, block_bytes: int) -> int:
    """Return how many spare files one tier may keep: those of all together fit into the slack. Pure."""
    return min(MAX_SPARES, plan_slack_blocks(book, block_bytes) // max(1, len(book.members)))


def plan_slack_blocks(book: UsageRecord, block_bytes: int) -> int:
    """Return for how many blocks a directory is to have room that is not used. Pure."""
    return book.limit_bytes // SLACK_SHARE // block_bytes
