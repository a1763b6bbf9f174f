"""Evicts from a directory that several processes share, in a thread of its own.

One process evicts at a time: the one that holds the eviction lock, which the kernel releases when it dies. A round
walks the directory when its last walk is too old, and evicts the files that were used longest ago until there is room
for the writers that wait and some slack besides. Files of this tier's namespace are recycled as far as there is use.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.departed import Loss
from kvtier.tiering.fs.candidates import Candidates
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.external_deletions import ExternalDeletions
from kvtier.tiering.fs.folders import (
    TEMPORARY_NAME,
    BlockFile,
    FSNamespace,
    eviction_lock,
    namespace_of,
    refresh_document,
    remove_empty_folders,
    sweep_temporaries,
    walk_blocks,
)
from kvtier.tiering.fs.recycled_files import RecycledFiles, plan_excess, plan_num_recycled
from kvtier.tiering.fs.shared_usage import UsageRecord

logger = logging.getLogger(__name__)

WALK_TTL_S = 600.0
"""Seconds after which a walk is repeated before more is evicted. Longer trusts a count that crashed writers
and people with ``rm`` have made wrong; shorter walks a large directory all the time."""

FRUITLESS_FACTOR = 10
"""After a walk that led to no eviction, the next has to wait this many times as long as it took: a directory full
of what cannot be removed must not be walked all the time. For a small directory that is no time at all. Likewise a walk
for the blocks of tenants beyond their quotas alone: others' leave meanwhile."""

ROOM_WAIT_S = 0.25
"""Seconds that a writer waits for room before its block is declined. A thread that waits moves nothing else,
so it must be short; an eviction of a few files takes milliseconds."""

LOCK_RETRY_S = 0.01
"""Seconds between attempts to get the eviction lock while a writer waits."""

REFRESH_S = 300.0
"""Seconds between signs of life in the shared count; a host that gives none for an hour is forgotten. Recycled files
of a tier that has stored nothing for so long are removed."""

CHECK_S = 1.0
"""Seconds between two checks whether the folders are still there, four calls of ``stat``. Longer answers lookups with
blocks that another program has deleted, whose loads then fail; shorter wakes an idle engine more often."""

BATCH_BLOCKS = 64
"""Files removed between two changes of the shared count; waiting writers get their room in such portions."""


@dataclass(frozen=True, slots=True, eq=False)
class RoomRequest:
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
        num_bytes: length of the file, 0 when it stays or was gone.
        is_kept: whether it waits to be written over, and so still counts.
    """

    num_bytes: int
    is_kept: bool = False


class EvictedBatch(NamedTuple):
    """What an eviction of some files gave.

    Attributes:
        num_tried: files that were to be evicted.
        num_bytes: length of those that were.
    """

    num_tried: int
    num_bytes: int


class _Work(Protocol):
    """A method without arguments; its name tells its failures from others'."""

    __name__: str

    def __call__(self) -> object:
        """Do it."""


class Evictor:
    """A daemon thread that walks, counts and evicts; started by ``start``.

    Mutable for several threads are the room requests of waiting writers, the namespace, the count of rounds and the
    end. ``_changed`` guards them. The candidates belong to the evictor's thread.

    Args:
        directory: what it works on.
        recycled: takes files of evicted blocks that can be written over.

    Attributes:
        deletions: what other programs delete under the tier.
    """

    def __init__(self, directory: FSDirectory, recycled: RecycledFiles) -> None:
        self._directory = directory
        self._namespace: FSNamespace | None = None
        self._recycled = recycled
        self._changed = threading.Condition()
        self._requests: list[RoomRequest] = []
        self._has_work = False
        self._is_running = False
        self._is_closed = False
        self._num_rounds = 0
        self._num_checks = 0
        self.deletions = ExternalDeletions(directory, self._current_namespace, recycled)
        self._candidates = Candidates(directory, self._current_namespace)
        self._walked_s: float | None = None
        self._walk_took_s = 0.0
        self._freed_since_walk_bytes = 0
        self._evicted_bytes = 0  # since the start, for writers that compare it
        self._num_found_blocks = 0
        # Whether blocks were written during the last recount, which may have counted them twice.
        self._is_count_rough = False
        self._finished_bytes: int | None = None
        self._thread = threading.Thread(target=self._work, name="kvtier-fs-evictor", daemon=True)

    def set_namespace(self, namespace: FSNamespace) -> None:
        """Report what is found and what is evicted to the index of ``namespace`` from now on."""
        with self._changed:
            self._namespace = namespace

    def start(self) -> None:
        """Start the thread, once there is a namespace; its first work is to see what is there."""
        self._thread.start()

    def on_reserved(self, num_recycled: int, record: UsageRecord | None) -> None:
        """Start a round, without waiting for it, after a reservation, or the end of one, that it has work from.

        That is one that used up recycled files or the slack, or found the bytes uncounted.

        Args:
            num_recycled: recycled files that it took.
            record: the shared count after it, None when it did not change.
        """
        block_bytes = self._directory.block_bytes
        has_work = num_recycled > 0
        if record is not None and not has_work:
            recycled_bytes = len(self._recycled.waiting) * block_bytes
            has_work = not record.is_counted or plan_excess(record, block_bytes, recycled_bytes) > 0
        if has_work:
            self._start_round()

    def make_room(self, num_bytes: int, *, is_disk_full: bool = False) -> bool:
        """Wait, a quarter of a second at most, until an eviction has been tried; return whether any gave something.

        Args:
            num_bytes: what is to be written.
            is_disk_full: the disk refused it although the capacity allows it. So much is evicted then, whatever
                the count says: a disk filled by others shrinks the tier instead of stopping it.
        """
        request = RoomRequest(num_bytes, is_disk_full)
        evicted_bytes = self._evicted_bytes
        with self._changed:
            enough_rounds = self._num_rounds + (2 if self._is_running else 1)
            self._requests.append(request)
            self._has_work = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._num_rounds >= enough_rounds, ROOM_WAIT_S)
            # A round takes the requests that it serves; one that was not served ends with its writer.
            self._requests = [other for other in self._requests if other is not request]
        return self._evicted_bytes > evicted_bytes

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

    def _guard(self, work: "_Work") -> None:
        try:
            work()
            if self._directory.outage.is_out:
                self._directory.outage.on_success(work.__name__)
        except OSError as error:  # of the directory as a whole, its lock for example
            self._directory.outage.on_failure(work.__name__, f"it cannot be tidied: {error}")
        except Exception:  # thread top
            logger.exception("tier fs: tidying %s failed", self._directory.root)
        with self._changed:
            self._is_running = False
            self._num_rounds += 1
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Return True with work to do, False at the end; checks the folders in between."""
        while True:
            with self._changed:
                has_work = self._changed.wait_for(lambda: self._is_closed or self._has_work, CHECK_S)
                if self._is_closed:
                    return False
                # Set for a check of the folders too: a writer that comes now must wait for the round after it.
                self._is_running = True
                if has_work:
                    self._has_work = False
                    return True
            self._guard(self._check_folders)
            if self._directory.expiry is not None:
                self._guard(self._sweep_if_due)

    def _start_round(self) -> None:
        with self._changed:
            self._has_work = True
            self._changed.notify_all()

    def _check_folders(self) -> None:
        """Check that the folders are there; now and then give a sign of life, and remove recycled files."""
        was_due = self.deletions.is_recount_due
        has_found_any = self.deletions.check()
        if not self.deletions.has_root:
            return
        self._num_checks += 1
        tenants = self._directory.tenants
        if tenants is not None and tenants.has_changes:
            tenants.refresh()
        if self._num_checks * CHECK_S >= REFRESH_S:
            # This tier has stored nothing for minutes, and others may need the room of its recycled files.
            self._num_checks = 0
            self._recycled.remove_all(self._directory.usage)
            self._directory.usage.refresh()
        if was_due and not has_found_any:
            self._start_round()
        elif self._is_count_rough:
            self._count_again_when_idle()

    def _count_again_when_idle(self) -> None:
        """Have the next check start a recount if no tier has written since the last check."""
        record = self._directory.usage.refresh()
        before, self._finished_bytes = self._finished_bytes, None if record is None else record.finished_bytes
        if record is not None and record.in_flight_bytes == 0 and record.finished_bytes == before:
            self.deletions.request_recount()

    def _leave(self) -> None:
        self.deletions.close()
        if self.deletions.has_root:
            self._recycled.remove_all(self._directory.usage)
            self._directory.usage.leave()
            if self._directory.tenants is not None:
                self._directory.tenants.refresh()

    def _current_namespace(self) -> FSNamespace:
        with self._changed:
            assert self._namespace is not None, "the store opens a namespace before it starts the thread"
            return self._namespace

    def _begin(self) -> None:
        directory = self._directory
        namespace = self._current_namespace()
        try:
            self.deletions.begin()
            refresh_document(directory.root, namespace, directory.file_mode, str(directory.owner))
            sweep_temporaries(directory.root / TEMPORARY_NAME, directory.owner, directory.wall_clock())
            with eviction_lock(directory.root, directory.file_mode) as has_lock:
                record = self._walk(namespace, is_recount=has_lock)
            if record is not None and record.used_bytes > record.limit_bytes:
                logger.warning(
                    "tier fs: %s holds %d bytes and capacity_bytes is %d: what was used longest ago is evicted",
                    directory.root,
                    record.used_bytes,
                    record.limit_bytes,
                )
                self.on_reserved(0, record)
        finally:
            # A walk that failed leaves an index with gaps; questions fill them as they do for other writers.
            namespace.index.set_complete()

    def _run_round(self) -> None:
        directory = self._directory
        if self.deletions.check() and not self._requests:
            return  # more may be removed just now: the next check starts the recount
        while self.deletions.restore_root() if self._requests else self.deletions.has_root:
            with suppress(FileNotFoundError), eviction_lock(directory.root, directory.file_mode) as has_lock:
                if has_lock:
                    self._evict()
                    return
            with self._changed:
                if self._is_closed or not self._requests:
                    return
                self._changed.wait(LOCK_RETRY_S)

    def _evict(self) -> None:
        requests = self._take_requests()
        record = self._directory.usage.refresh()
        if record is None:
            return
        tenants = self._directory.tenants
        if tenants is not None:
            tenants.refresh()
        are_tenants_counted = tenants is None or tenants.is_counted
        if not (record.is_counted and are_tenants_counted and self._is_walk_fresh()):
            record = self._walk(None, is_recount=True) or record
        block_bytes = self._directory.block_bytes
        num_recycled = plan_num_recycled(record, block_bytes)
        self._directory.usage.remove(self._recycled.trim(num_recycled))
        wanted_bytes = sum(request.num_bytes for request in requests)
        disk_full_bytes = sum(request.num_bytes for request in requests if request.is_disk_full)
        excess_bytes = (
            plan_excess(record, block_bytes, len(self._recycled.waiting) * block_bytes) + wanted_bytes
        )
        self._evict_bytes(max(disk_full_bytes, excess_bytes), num_recycled)

    def _evict_bytes(self, excess_bytes: int, num_recycled: int) -> None:
        """Evict so much, as far as there is something that may leave; arguments as of ``_evict_batch``."""
        has_just_walked = False
        self._candidates.begin_round()
        while excess_bytes > 0 and not self._is_closed:
            if not has_just_walked and self._is_walk_needed():
                self._walk(None, is_recount=True)
                has_just_walked = True
                self._candidates.begin_round()
            may_walk = not has_just_walked and not self._is_walk_too_soon()
            batch = self._evict_batch(excess_bytes, num_recycled, may_walk=may_walk)
            if batch.num_tried == 0 and not (may_walk and self._candidates.is_lacking()):
                return
            excess_bytes -= batch.num_bytes
            self._evicted_bytes += batch.num_bytes
            self._freed_since_walk_bytes += batch.num_bytes
            has_just_walked = has_just_walked and batch.num_bytes == 0

    def _sweep_if_due(self) -> None:
        """Remove the blocks whose time to live is over, unless another process evicts just now."""
        directory = self._directory
        expiry = directory.expiry
        if expiry is None or not self.deletions.has_root or not expiry.is_due():
            return
        with suppress(FileNotFoundError), eviction_lock(directory.root, directory.file_mode) as has_lock:
            if not has_lock:
                return
            own = self._current_namespace()
            swept = expiry.sweep(walk_blocks(directory.root), self._remove_expired, own.identity.name)
            own.index.evict(list(map(own.format.key, swept.own_names)), Loss.EXPIRED)
            directory.usage.remove(swept.num_bytes)
            directory.counters.add(expired_blocks=swept.num_blocks)

    def _remove_expired(self, block: BlockFile) -> int:
        num_bytes = self._directory.files.remove(block.path)
        self._candidates.on_evicted(block, num_bytes)
        return num_bytes

    def _take_requests(self) -> list[RoomRequest]:
        with self._changed:
            requests, self._requests = self._requests, []
            return requests

    def _is_walk_fresh(self) -> bool:
        if self._walked_s is None or self.deletions.is_recount_due:
            return False
        return self._directory.clock() - self._walked_s < WALK_TTL_S

    def _is_walk_needed(self) -> bool:
        """Return whether a walk may find more to evict: not soon, for what it cost, after one that led to nothing."""
        is_empty = self._candidates.is_empty
        if not is_empty and not self._candidates.is_lacking():
            return False
        if is_empty and (self._freed_since_walk_bytes or not self._num_found_blocks):
            return True
        return not self._is_walk_too_soon()

    def _is_walk_too_soon(self) -> bool:
        if self._walked_s is None:
            return False
        return self._directory.clock() - self._walked_s < FRUITLESS_FACTOR * self._walk_took_s

    def _walk(self, namespace: FSNamespace | None, *, is_recount: bool) -> UsageRecord | None:
        """Visit every block: which are oldest, how much there is, and which are for the index of ``namespace``.

        Returns:
            The corrected count, None when this was no recount.
        """
        directory = self._directory
        begun_s = directory.clock()
        if is_recount and self.deletions.claim_recount():
            namespace = self._current_namespace()  # what is left of its blocks is to be found again
        begun = directory.usage.begin_recount() if is_recount else None
        found_bytes = sweep_temporaries(
            directory.root / TEMPORARY_NAME, directory.owner, directory.wall_clock()
        )

        def observe() -> Iterator[BlockFile]:
            nonlocal found_bytes
            for block in walk_blocks(directory.root):
                if self._is_closed:
                    return
                found_bytes += block.num_bytes
                if namespace is not None and namespace_of(block.path) == namespace.identity.name:
                    namespace.index.add((namespace.format.key(block.name),))
                yield block

        self._num_found_blocks = self._candidates.choose(observe(), is_recount=is_recount)
        if self._is_closed:
            return None
        self._candidates.end_recount()
        self._walked_s = directory.clock()
        self._walk_took_s = self._walked_s - begun_s
        self._freed_since_walk_bytes = 0
        if begun is None:
            if is_recount:
                self.deletions.request_recount()
            return None
        remove_empty_folders(directory.root, directory.wall_clock())
        counted = directory.usage.end_recount(found_bytes, begun)
        if counted is None:
            self.deletions.request_recount()
        self._is_count_rough = _may_count_twice(counted, begun)
        return counted

    def _evict_batch(self, excess_bytes: int, num_recycled: int, *, may_walk: bool) -> "EvictedBatch":
        """Evict the next candidates, as many as are needed or a batch.

        Args:
            excess_bytes: how much is needed.
            num_recycled: how many files may be kept to be written over; others are removed.
            may_walk: whether there may be a walk for candidates that lack.
        """
        own = self._current_namespace()
        num_tried, evicted_bytes, kept_bytes, num_blocks, keys = 0, 0, 0, 0, []
        while num_tried < BATCH_BLOCKS and evicted_bytes < excess_bytes:
            block = self._candidates.pop(excess_bytes - evicted_bytes, may_walk=may_walk)
            if block is None:
                break
            num_tried += 1
            is_own = namespace_of(block.path) == own.identity.name
            reuse_for = own.identity.name if is_own and len(self._recycled.waiting) < num_recycled else None
            evicted = self._evict_if_still_old(block, reuse_for)
            self._candidates.on_evicted(block, evicted.num_bytes)
            evicted_bytes += evicted.num_bytes
            kept_bytes += evicted.num_bytes if evicted.is_kept else 0
            num_blocks += evicted.num_bytes > 0
            if is_own and evicted.num_bytes > 0:
                keys.append(own.format.key(block.name))
        own.index.evict(keys)
        self._directory.usage.remove(evicted_bytes - kept_bytes)
        self._directory.counters.add(evicted_blocks=num_blocks, evicted_bytes=evicted_bytes)
        return EvictedBatch(num_tried, evicted_bytes)

    def _evict_if_still_old(self, block: BlockFile, reuse_for: str | None) -> Evicted:
        """Keep the file for blocks of the namespace ``reuse_for``, or remove it."""
        try:
            status = os.lstat(block.path)
            if status.st_mtime_ns != block.mtime_ns or (
                self._directory.expiry is not None and status.st_atime_ns != block.atime_ns
            ):
                return Evicted(0)  # used since the walk: the next walk gives it its new place
            if reuse_for and self._recycled.can_keep(status) and self._recycled.keep(block.path, reuse_for):
                return Evicted(status.st_size, is_kept=True)
            return Evicted(self._directory.files.remove(block.path))
        except FileNotFoundError:
            return Evicted(0)
        except OSError as error:
            logger.warning("tier fs: %s cannot be evicted: %s", block.path, error)
            return Evicted(0)


def _may_count_twice(counted: UsageRecord | None, begun: UsageRecord) -> bool:
    """Return whether a tier wrote during a recount, so that blocks may be in it twice. Pure."""
    return counted is not None and (counted.finished_bytes, counted.in_flight_bytes) != (
        begun.finished_bytes,
        0,
    )
