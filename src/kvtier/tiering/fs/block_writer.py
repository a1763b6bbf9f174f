"""Writes blocks to files: room for all of them reserved with one call, some written at a time, the rest given back.

A block goes into a recycled file where there is one. Folders are made when the first block of one is written.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.fs.block_file import NewFile, plan_batch_files
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import FSNamespace, make_block_folder
from kvtier.tiering.fs.permissions import find_link
from kvtier.tiering.fs.recycled_files import RecycledFiles, Reservation, StoreOutcome
from kvtier.tiering.kit.backend import Rows, ThreadPages
from kvtier.tiering.kit.disk import checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, make_header

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

NO_TARGET = (StoreOutcome.NO_ROOM, StoreOutcome.NO_RECYCLED)

MAX_ROOM_ATTEMPTS = 8
"""Attempts to reserve room for one task. Fewer decline a task whose room others take while there is more to evict; more
keep a thread that moves nothing else waiting."""

FOLDER_ATTEMPTS = 3
"""How often folders are made for one block: ``rm -rf`` of a directory may remove them again. More would pin the row
longer in a directory that is being removed; fewer would fail stores that a moment later succeed."""

FOLDERS_ABOVE = 4
"""Folders whose names lead to a block's folder: a digit, the namespace, the directory and what that is in."""

Outcomes = dict[OffloadKey, StoreOutcome]


class ReadyBlock(NamedTuple):
    """A block that is ready to be written: its header is in the page."""

    key: OffloadKey
    path: str
    page: memoryview
    payload: memoryview


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

        Return False when there is none because the shared count cannot be changed. Another task may take what was
        evicted for this one: while evictions give something, it tries again.
        """
        block_bytes = self._directory.block_bytes
        is_last_try = False
        for attempt in range(MAX_ROOM_ATTEMPTS):
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
            has_evicted = self._evictor.make_room(num_missing * block_bytes)
            is_last_try = not has_evicted or attempt + 2 == MAX_ROOM_ATTEMPTS
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
            prefix = namespace.folder_prefix(key)
            was_known = prefix in namespace.known_folders
            known = namespace.index.find_prefix(prefix, namespace.format.name)
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
                self._on_folder_made(namespace, prefix, path, known, was_known=was_known)
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
        self, namespace: FSNamespace, prefix: bytes, path: str, known: list[OffloadKey], *, was_known: bool
    ) -> None:
        """Forget the blocks of a folder that this process knew and had to make again: it was removed."""
        namespace.synced_folders.discard(prefix)
        namespace.unlinked_folders.add(prefix)
        namespace.known_folders.add(prefix)
        if known:
            namespace.index.forget(known)
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
