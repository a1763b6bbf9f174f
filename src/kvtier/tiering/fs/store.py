"""Moves blocks between rows of the primary tier and files, and says what is wrong with which.

A store reserves room for all its blocks with one call, writes some at a time, and ends the reservation with what it
used. A load reads some at a time and checks their headers; a damaged file is removed, one of another namespace or
version is left alone.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.departed import Loss, make_losses
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.fs.block_file import NewFile, plan_batch_files
from kvtier.tiering.fs.block_reader import BlockReader
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.expiry import BlockExpiry
from kvtier.tiering.fs.folders import (
    FSNamespace,
    FSSiblings,
    make_block_folder,
    namespace_path,
)
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.permissions import find_link
from kvtier.tiering.fs.recycled_files import RecycledFiles, Reservation, StoreOutcome
from kvtier.tiering.kit.backend import BlockStore, Rows
from kvtier.tiering.kit.disk import ThreadPages, checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAULTS,
    make_header,
)
from kvtier.tiering.kit.io_pool import TransferOutcome, outcome_of
from kvtier.tiering.kit.siblings import SiblingNamespaces
from kvtier.tiering.kit.tenant_counts import TenantCounts

logger = logging.getLogger(__name__)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

NO_TARGET = (StoreOutcome.NO_ROOM, StoreOutcome.NO_RECYCLED)

HELD = (StoreOutcome.WRITTEN, StoreOutcome.EXISTED)

FOLDER_ATTEMPTS = 3
"""How often folders are made for one block: ``rm -rf`` of a directory may remove them again. More would pin the row
longer in a directory that is being removed; fewer would fail stores that a moment later succeed."""

FOLDERS_ABOVE = 4
"""Folders whose names lead to a block's folder: a digit, the namespace, the directory and what that is in."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the evicting thread is waited for. It touches no row: nothing depends on its end."""

Outcomes = dict[OffloadKey, StoreOutcome]


class ReadyBlock(NamedTuple):
    """A block that is ready to be written: its header is in the page."""

    key: OffloadKey
    path: str
    page: memoryview
    payload: memoryview


class FSBlockStore(BlockStore[FSNamespace]):
    """Stores and loads some blocks at a time in files; keeps no state of its own.

    Args:
        directory: where to.
        rows: the primary's.
        evictor: makes room.
        recycled: files of evicted blocks, to be written over.
        max_keys: blocks of a namespace that the index has room for.
        emit_events: whether evictions are recorded.
        clock: seconds, monotonic.
        make_counts: gives what counts the blocks of a namespace by tenant; None where there are no tenants.

    Attributes:
        losses: why blocks are gone.
        siblings: the other namespaces of the directory.
    """

    def __init__(
        self,
        directory: FSDirectory,
        rows: Rows,
        evictor: Evictor,
        recycled: RecycledFiles,
        max_keys: int,
        *,
        emit_events: bool,
        clock: Callable[[], float] = time.monotonic,
        make_counts: Callable[[], TenantCounts | None] = lambda: None,
    ) -> None:
        self._make_counts = make_counts
        self.losses = make_losses("fs", max_keys, clock)
        self.siblings = SiblingNamespaces("fs", FSSiblings(directory.root), clock)
        self._directory = directory
        self._row_bytes = rows.row_bytes
        self._files = directory.files
        self._counters = directory.counters
        self._evictor = evictor
        self._writer = BlockWriter(directory, rows, evictor, recycled)
        self._reader = BlockReader(directory, rows)
        self._max_keys = max_keys
        self._emit_events = emit_events

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> FSNamespace:
        index = KeyIndex(
            self._max_keys,
            is_complete=is_new,
            emit_events=self._emit_events,
            losses=self.losses,
            tenant_counts=self._make_counts(),
        )
        name = identity.name
        path = namespace_path(self._directory.root, name)
        namespace = FSNamespace(identity, name, path, index)
        self._evictor.set_namespace(namespace)
        return namespace

    def contains_batch(self, namespace: FSNamespace, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        if self._evictor.deletions.refusal is not None:
            return []
        # A tenth of what making a Path of each costs; what cannot be looked at cannot be loaded either.
        found = [
            key
            for key in keys
            if os.access(namespace.block_path(key), os.F_OK) and find_link(namespace, key) is None
        ]
        if (expiry := self._directory.expiry) is not None:
            found = [key for key in found if not expiry.is_path_over(namespace.block_path(key))]
        namespace.index.add(found)
        if len(found) < len(keys):
            held = frozenset(found)
            self.siblings.look_for(namespace.identity, [key for key in keys if key not in held])
        return found

    def store(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        if self._directory.expiry is not None:
            self._remove_expired(namespace, keys, self._directory.expiry)
        held: list[OffloadKey] = []
        todo: list[tuple[OffloadKey, int]] = []
        for key, slot in zip(keys, slots, strict=True):
            if key in namespace.index and self._files.touch(namespace.block_path(key)):
                held.append(key)
            else:
                todo.append((key, slot))
        if not todo:
            return TransferOutcome(held)
        if self._directory.tenants is None:
            outcomes = self._writer.write(namespace, todo)
        else:
            with self._directory.tenants.counting([key for key, _ in todo]) as written:
                outcomes = self._writer.write(namespace, todo)
                written += [key for key, outcome in outcomes.items() if outcome is StoreOutcome.WRITTEN]
        stored = [key for key, outcome in outcomes.items() if outcome in HELD]
        namespace.index.add(stored)
        if self.siblings.found:
            self.siblings.forget(stored)
        reached = list(outcomes.values())
        num_written = reached.count(StoreOutcome.WRITTEN)
        failed = [key for key, outcome in outcomes.items() if outcome is StoreOutcome.FAILED]
        self._counters.add(
            stored_blocks=num_written,
            stored_bytes=num_written * self._row_bytes,
            declined=len(reached) - len(stored) - len(failed),
            store_errors=len(failed),
        )
        return outcome_of(held + stored, failed)

    def load(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        failures = self._reader.read(namespace, keys, slots)
        succeeded = [key for key in keys if key not in failures]
        namespace.known_folders.update(map(namespace.folder_prefix, succeeded))
        for failure in failures.values():
            self._counters.add(**{failure.value: 1})
        absent = [key for key, failure in failures.items() if failure is TierFailure.ABSENT]
        if absent:
            self._check_folders_of(namespace, absent)
        self._counters.add(hits=len(succeeded), loaded_bytes=len(succeeded) * self._row_bytes)
        return outcome_of(succeeded, [key for key, failure in failures.items() if failure in FAULTS])

    def _remove_expired(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], expiry: BlockExpiry
    ) -> None:
        """Remove those of ``keys`` that are over, so that they can be stored again."""
        for key in keys:
            path = namespace.block_path(key)
            if expiry.is_path_over(path):
                try:
                    self._directory.remove_block(key, path)
                except OSError as error:
                    logger.warning("tier fs: expired block %s cannot be removed: %s", path, error)

    def _check_folders_of(self, namespace: FSNamespace, absent: Sequence[OffloadKey]) -> None:
        """Forget every block in the folders of ``absent`` that are gone: an eviction leaves the folder."""
        by_folder: dict[str, list[OffloadKey]] = {}
        for key in absent:
            by_folder.setdefault(namespace.block_path(key).rpartition("/")[0], []).append(key)
        for folder, keys in by_folder.items():
            if os.access(folder, os.F_OK):
                continue
            prefix = namespace.folder_prefix(keys[0])
            namespace.known_folders.discard(prefix)
            self.losses.report(keys, Loss.REMOVED)  # the failed reads have taken them out of the index
            namespace.unlinked_folders.discard(prefix)
            namespace.synced_folders.discard(prefix)
            is_any_left = namespace.index.forget_prefix(prefix, namespace.format.name) > 0
            self._evictor.deletions.on_deleted(folder if is_any_left else None)

    def drop(self, namespace: FSNamespace, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            path = namespace.block_path(key)
            try:
                self._directory.remove_block(key, path)
            except OSError as error:
                logger.warning("tier fs: wrong block %s cannot be removed: %s", path, error)
        namespace.index.evict(keys, Loss.DAMAGED)

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot()

    def close(self) -> None:
        self._evictor.shutdown(CLOSE_TIMEOUT_S)


class BlockWriter:
    """Writes some blocks at a time; keeps no state but header pages per thread.

    Args:
        directory: where to.
        rows: the primary's.
        evictor: makes room.
        recycled: files of evicted blocks, to be written over.
    """

    def __init__(self, directory: FSDirectory, rows: Rows, evictor: Evictor, recycled: RecycledFiles) -> None:
        self._directory = directory
        self._rows = rows
        self._files = directory.files
        self._usage = directory.usage
        self._owner_name = str(directory.owner)
        self._evictor = evictor
        self._recycled = recycled
        self._batch_blocks = plan_batch_files(rows.row_bytes)
        self._num_ahead = plan_num_checksums_ahead(
            self._batch_blocks * rows.row_bytes, has_direct_io=directory.has_direct_io
        )
        num_pages = self._batch_blocks * (self._num_ahead + 1)
        self._pages = ThreadPages(num_pages)
        self._scratch = ThreadPages(num_pages, rows.row_bytes)
        self._outage = directory.outage
        self._full_disk = directory.full_disk

    def write(self, namespace: FSNamespace, blocks: Sequence[tuple[OffloadKey, int]]) -> Outcomes:
        """Write blocks, given as keys and slots, and return the outcome of each.

        Thread: any of the pool's; blocks.
        """
        deletions = self._evictor.deletions
        if self._is_refused():
            return dict.fromkeys((key for key, _ in blocks), StoreOutcome.FAILED)
        outcomes: Outcomes = dict.fromkeys((key for key, _ in blocks), StoreOutcome.NO_ROOM)
        # A folder that is missing is made, and those above it looked at then.
        leaves = {
            namespace.folder_prefix(key): namespace.block_path(key).rpartition("/")[0] for key, _ in blocks
        }
        unseen = leaves.keys() - namespace.unlinked_folders
        if self._outage.is_out or any(map(os.path.lexists, map(leaves.__getitem__, unseen))):
            blocks = self._without_links(namespace, blocks, outcomes)
        num_deletions = deletions.num_seen
        reservation = Reservation(self._recycled, self._directory.block_bytes)
        try:
            if not self._reserve(reservation, namespace, len(blocks)):
                return dict.fromkeys(outcomes, StoreOutcome.FAILED)
            num_blocks = min(len(blocks), len(reservation.targets))
            starts = range(0, num_blocks, self._batch_blocks)
            batches = [blocks[start : min(start + self._batch_blocks, num_blocks)] for start in starts]
            is_encrypted = namespace.format.is_encrypted
            scratch_rows = cycle(self._scratch.of_this_thread()) if is_encrypted else None
            pages = cycle(self._pages.of_this_thread())
            add_headers = partial(self._add_headers, namespace, pages, scratch_rows)
            for batch in checksum_ahead(batches, add_headers, self._num_ahead):
                self._write_batch(namespace, reservation, batch, outcomes)
                lacking = [block for block in batch if outcomes[block.key] in NO_TARGET]
                if lacking and not all(
                    self._write_again(namespace, reservation, block, outcomes) for block in lacking
                ):
                    break
        finally:
            self._evictor.on_reserved(0, reservation.end(self._usage))
            if self._outage.is_out or self._full_disk.is_out:
                self._report(outcomes, reservation)
            if deletions.num_seen != num_deletions:
                # What was written before the removal is gone, and has just been counted as being on the disk.
                deletions.request_recount()
        return outcomes

    def _is_refused(self) -> bool:
        """Return whether the directory cannot be written to now: it is gone, or another one is in its place."""
        # Where its file system has another number than at the start, it may be gone. That is looked at here: a store
        # within the second until the evictor's next check would go on below the mount point.
        device = None
        with suppress(OSError):
            device = os.stat(self._directory.root).st_dev  # noqa: PTH116 - once for each task
        if device != self._directory.device:
            return self._directory.find_refusal() is not None
        return self._evictor.deletions.refusal is not None

    def _report(self, outcomes: Outcomes, reservation: Reservation) -> None:
        """End what the log says of an outage when blocks were written, and none failed for its reason."""
        reached = frozenset(outcomes.values())
        if StoreOutcome.WRITTEN in reached:
            if StoreOutcome.FAILED not in reached:
                self._outage.on_success("store")
            if not reservation.has_met_full_disk:
                self._full_disk.on_success("room")

    def _without_links(
        self, namespace: FSNamespace, blocks: Sequence[tuple[OffloadKey, int]], outcomes: Outcomes
    ) -> Sequence[tuple[OffloadKey, int]]:
        """Return the blocks that would not be stored behind a symbolic link; the others have failed."""
        links = {key: link for key, _ in blocks if (link := find_link(namespace, key)) is not None}
        if not links:
            self._outage.on_success("link")
            return blocks
        outcomes.update(dict.fromkeys(links, StoreOutcome.FAILED))
        link = next(iter(links.values()))
        self._outage.on_failure("link", f"{link} is a link, behind which bytes are not counted: remove it")
        return [block for block in blocks if block[0] not in links]

    def _reserve(self, reservation: Reservation, namespace: FSNamespace, num_blocks: int) -> bool:
        """Reserve targets for as many of ``num_blocks`` as there is room for, after an eviction if need be.

        Return False when there is none because the shared count cannot be changed.
        """
        block_bytes = self._directory.block_bytes
        for is_last_try in (False, True):
            num_missing = num_blocks - len(reservation.targets)
            recycled = self._recycled.take(num_missing, namespace.name)
            grant = self._usage.reserve(num_missing - len(recycled), block_bytes)
            reservation.add(recycled, grant.num_blocks)
            self._evictor.on_reserved(len(recycled), grant.record)
            num_missing = num_blocks - len(reservation.targets)
            if grant.is_fault:
                return bool(reservation.targets)
            if num_missing <= 0 or is_last_try:
                break
            self._evictor.make_room(num_missing * block_bytes)
        return True

    def _add_headers(
        self,
        namespace: FSNamespace,
        pages: Iterator[memoryview],
        scratch_rows: Iterator[memoryview] | None,
        blocks: Sequence[tuple[OffloadKey, int]],
    ) -> list[ReadyBlock]:
        """Fill the next of ``pages`` with the headers of blocks, given as keys and slots."""
        ready = []
        for key, slot in blocks:
            page, payload = next(pages), self._rows.row(slot)
            if scratch_rows is None:
                page[:ENVELOPE_BYTES] = make_header(key, namespace.identity.digest, payload)
            else:
                page[:ENVELOPE_BYTES], payload = namespace.format.seal(key, payload, next(scratch_rows))
            ready.append(ReadyBlock(key, namespace.block_path(key), page, payload))
        return ready

    def _write_batch(
        self,
        namespace: FSNamespace,
        reservation: Reservation,
        batch: Sequence[ReadyBlock],
        outcomes: Outcomes,
    ) -> None:
        """Write the first of some blocks, as many as have targets, with one call; the others have no room."""
        targets = reservation.take(len(batch))
        files: list[NewFile] = []
        for block, target in zip(batch, targets, strict=False):
            files.append((block.path, (block.page, block.payload), target and target.path))
        answers = self._files.publish(files)
        for number, (block, target) in enumerate(zip(batch, targets, strict=False)):
            answer = answers[number]
            if isinstance(answer, FileNotFoundError):
                answer = self._publish_in_new_folder(namespace, block.key, files[number])
            elif answer is True:
                if self._files.is_durable:
                    answer = self._learn_folder(namespace, block.key, block.path)
                namespace.known_folders.add(namespace.folder_prefix(block.key))
            outcome = StoreOutcome.WRITTEN if answer is True else self._outcome_of(files[number], answer)
            reservation.complete(target, outcome)
            outcomes[block.key] = outcome
        for block in batch[len(targets) :]:
            outcomes[block.key] = StoreOutcome.NO_ROOM

    def _write_again(
        self,
        namespace: FSNamespace,
        reservation: Reservation,
        block: ReadyBlock,
        outcomes: Outcomes,
    ) -> bool:
        """Write a block that had no target to another one, made if need be; False when there is none."""
        while outcomes[block.key] is StoreOutcome.NO_RECYCLED:
            self._write_batch(namespace, reservation, [block], outcomes)
        if outcomes[block.key] is StoreOutcome.NO_ROOM and not reservation.targets:
            self._reserve(reservation, namespace, 1)  # the disk is not full, recycled files were gone
            self._write_batch(namespace, reservation, [block], outcomes)
        if outcomes[block.key] is StoreOutcome.NO_ROOM:
            self._evictor.make_room(self._directory.block_bytes, is_disk_full=True)
            reservation.add(self._recycled.take(1, namespace.name), 0)
            self._write_batch(namespace, reservation, [block], outcomes)
        return outcomes[block.key] not in NO_TARGET

    def _publish_in_new_folder(
        self, namespace: FSNamespace, key: OffloadKey, file: NewFile
    ) -> bool | OSError:
        path, _, recycled_path = file
        directory = self._directory
        answer: bool | OSError = FileNotFoundError()
        for _ in range(FOLDER_ATTEMPTS):
            # Before the folder is made: afterwards other threads store blocks in it, which nothing has removed.
            was_known, known = namespace.list_known(key)
            try:
                is_made = make_block_folder(
                    directory.root, namespace, path, directory.file_mode, self._owner_name
                )
            except FileNotFoundError as error:
                answer = error
                continue
            except OSError as error:
                return error
            if is_made:
                self._on_folder_made(namespace, key, path, known, was_known=was_known)
            (answer,) = self._files.publish([file])
            # With a recycled file it may be that file which is missing: the block gets another target then.
            if recycled_path is not None or not isinstance(answer, FileNotFoundError):
                break
        if answer is True and self._files.is_durable:
            return self._learn_folder(namespace, key, path)
        return answer

    def _learn_folder(self, namespace: FSNamespace, key: OffloadKey, path: str) -> bool | OSError:
        """Sync the names that lead to a block's folder, once for each; they are to last as long as the block."""
        prefix = namespace.folder_prefix(key)
        if prefix not in namespace.synced_folders:
            try:
                self._files.sync_folders(path, FOLDERS_ABOVE)
            except OSError as error:
                return error
            namespace.synced_folders.add(prefix)
        return True

    def _on_folder_made(
        self, namespace: FSNamespace, key: OffloadKey, path: str, known: list[OffloadKey], *, was_known: bool
    ) -> None:
        """Forget the blocks of a folder that this process knew and had to make again: it was removed."""
        prefix = namespace.folder_prefix(key)
        namespace.synced_folders.discard(prefix)
        namespace.unlinked_folders.add(prefix)
        namespace.known_folders.add(prefix)
        namespace.index.forget(known)
        if known:
            self._evictor.deletions.on_deleted(path.rpartition("/")[0])
        elif was_known:
            self._evictor.deletions.on_deleted(None)  # perhaps only as an empty folder, which evictors remove

    def _outcome_of(self, file: NewFile, answer: bool | OSError) -> StoreOutcome:
        """Return the outcome of a block whose file was not simply written."""
        recycled_path = file[2]
        if not isinstance(answer, OSError):
            # One that was there is not touched: should it be a file that we cannot read, it has to age to be evicted.
            return StoreOutcome.WRITTEN if answer else StoreOutcome.EXISTED
        if answer.errno in NO_ROOM:
            self._full_disk.on_failure("room", f"no room although capacity_bytes is not reached: {answer}")
            return StoreOutcome.NO_ROOM
        if recycled_path is not None and isinstance(answer, FileNotFoundError):
            # The folder was there a moment ago, so the recycled file is gone: another host has taken us for dead.
            return StoreOutcome.NO_RECYCLED
        if not isinstance(answer, FileNotFoundError):  # the evictor logs folders that were removed
            self._outage.on_failure("store", f"a block was not stored: {answer}")
        return StoreOutcome.FAILED
