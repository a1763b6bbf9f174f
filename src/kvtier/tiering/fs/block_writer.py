"""Room for the blocks of one part of a job: spare files, then what is reserved in the shared count.

It asks nobody for room and writes nothing; it keeps the account of what was used and what was not.
"""

import errno
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import cycle
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.fs.block_file import NewFile, plan_batch_files
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import FSNamespace, make_block_folder, prefix_of
from kvtier.tiering.fs.recycled_files import RecycledFiles, Spare
from kvtier.tiering.fs.shared_usage import SharedUsage
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.disk import ThreadPages, checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, RAW_CODEC, pack, seal

Place = Spare | None
"""Where one block may be written: over a spare file, or into a new one."""


class StoreOutcome(Enum):
    """What became of one block that was to be stored; of ``NO_SPARE``, that the file to be written over was gone."""

    WRITTEN = "written"
    EXISTED = "existed"
    NO_ROOM = "no_room"
    NO_SPARE = "no_spare"
    FAILED = "failed"


class Reservation:
    """Where some blocks may be written; used by one thread.

    The bytes of spare files are in the shared count already. One that is written over stays there under its new name;
    one that was used up in vain stays until somebody counts anew, which is too much and never too little.

    A place that is taken and not ended, because an exception came in between, counts as written too: its file may be
    there.

    Args:
        spares: where spare files come from, and go when they were not used.
        block_bytes: length of a block's file.
    """

    def __init__(self, spares: RecycledFiles, block_bytes: int) -> None:
        self._all_spares = spares
        self._block_bytes = block_bytes
        self._spares: deque[Spare] = deque()
        self._taken: set[Spare] = set()
        self._num_reserved = self._num_new = 0

    @property
    def num_blocks(self) -> int:
        """For how many blocks there is some left."""
        return self._num_new_left + len(self._spares)

    def add(self, spares: Iterable[Spare], num_reserved: int) -> None:
        """Have more of it."""
        self._spares.extend(spares)
        self._num_reserved += num_reserved

    def take(self, num_blocks: int) -> list[Place]:
        """Return up to ``num_blocks`` places, each of which is to be ended whatever becomes of its block."""
        places: list[Place] = []
        while self._spares and len(places) < num_blocks:
            spare = self._spares.popleft()
            self._taken.add(spare)
            places.append(spare)
        num_new = min(num_blocks - len(places), self._num_new_left)
        self._num_new += num_new
        places += [None] * num_new
        return places

    def end(self, place: Place, outcome: StoreOutcome) -> None:
        """Note what became of the block that was to be written there."""
        is_written = outcome is StoreOutcome.WRITTEN
        if place is None:
            self._num_new -= not is_written
            return
        self._taken.remove(place)
        if outcome is StoreOutcome.EXISTED:
            self._spares.append(place)
        elif not is_written:
            self._all_spares.discard(place)

    def settle(self, ledger: SharedUsage) -> None:
        """Give back what was not used, and have the count know the rest."""
        for spare in self._taken:
            self._all_spares.discard(spare)
        self._all_spares.give_back(self._spares)
        ledger.settle(self._num_reserved * self._block_bytes, self._num_new * self._block_bytes)

    @property
    def _num_new_left(self) -> int:
        return self._num_reserved - self._num_new


logger = logging.getLogger(__name__)

Outcomes = dict[OffloadKey, StoreOutcome]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

NO_PLACE = (StoreOutcome.NO_ROOM, StoreOutcome.NO_SPARE)


FOLDER_ATTEMPTS = 3
"""How often folders are made for one block: somebody who removes a directory with ``rm -rf`` may remove them again."""


class _Sealed(NamedTuple):
    """A block that is ready to be written."""

    key: OffloadKey
    page: memoryview
    row: memoryview


class BlockWriter:
    """Writes some blocks at a time; keeps no state but header pages per thread.

    Args:
        directory: where to.
        rows: the primary's.
        evictor: makes room.
        spares: files of evicted blocks, to be written over.
    """

    def __init__(self, directory: FSDirectory, rows: Rows, evictor: Evictor, spares: RecycledFiles) -> None:
        self._directory = directory
        self._rows = rows
        self._files = directory.files
        self._ledger = directory.ledger
        self._evictor = evictor
        self._spares = spares
        self._batch_blocks = plan_batch_files(rows.row_bytes)
        self._num_ahead = plan_num_checksums_ahead(
            self._batch_blocks * rows.row_bytes, has_direct_io=directory.has_direct_io
        )
        self._pages = ThreadPages(self._batch_blocks * (self._num_ahead + 1))

    def write(self, space: FSNamespace, blocks: Sequence[tuple[OffloadKey, int]]) -> Outcomes:
        """Write blocks, given as keys and slots, and return what became of each.

        Thread: any of the pool's; blocks.
        """
        outcomes: Outcomes = dict.fromkeys((key for key, _ in blocks), StoreOutcome.NO_ROOM)
        num_removals = self._evictor.removals.num_seen
        room = Reservation(self._spares, self._directory.block_bytes)
        try:
            self._fill(room, space, len(blocks))
            seal_next = partial(self._seal, space, cycle(self._pages.of_this_thread()))
            batches = _cut(blocks[: room.num_blocks], self._batch_blocks)
            for batch in checksum_ahead(batches, seal_next, self._num_ahead):
                if not self._write_batch(space, room, batch, outcomes):
                    break
        finally:
            room.settle(self._ledger)
            if self._evictor.removals.num_seen != num_removals:
                # What was written before the removal is gone, and has just been counted as being on the disk.
                self._evictor.removals.ask_count()
        return outcomes

    def _fill(self, room: Reservation, space: FSNamespace, num_blocks: int) -> None:
        """Take room for as many of ``num_blocks`` as there is some for, after an eviction if need be."""
        self._add_room(room, space, num_blocks)
        num_missing = num_blocks - room.num_blocks
        if num_missing > 0:
            self._evictor.make_room(num_missing * self._directory.block_bytes)
            self._add_room(room, space, num_missing)

    def _add_room(self, room: Reservation, space: FSNamespace, num_blocks: int) -> None:
        spares = self._spares.take(num_blocks, space.namespace.name)
        if spares:
            self._evictor.ask()
        num_missing = num_blocks - len(spares)
        num_reserved = 0
        if num_missing > 0:
            grant = self._ledger.reserve(num_missing, self._directory.block_bytes)
            num_reserved = grant.num_blocks
            self._evictor.note(grant.book)
        room.add(spares, num_reserved)

    def _seal(
        self, space: FSNamespace, pages: Iterator[memoryview], blocks: Sequence[tuple[OffloadKey, int]]
    ) -> list[_Sealed]:
        """Fill the next of ``pages`` with the headers of blocks, given as keys and slots."""
        sealed = []
        for key, slot in blocks:
            page, row = next(pages), self._rows.row(slot)
            page[:ENVELOPE_BYTES] = pack(seal(key, space.namespace.digest, row, codec=RAW_CODEC))
            sealed.append(_Sealed(key, page, row))
        return sealed

    def _write_batch(
        self, space: FSNamespace, room: Reservation, batch: Sequence[_Sealed], outcomes: Outcomes
    ) -> bool:
        """Write blocks, those without room once more as long as some can be made; return whether all had room."""
        if self._try(space, room, batch, outcomes):
            return True
        return all(
            outcomes[sealed.key] not in NO_PLACE or self._try_again(space, room, sealed, outcomes)
            for sealed in batch
        )

    def _try_again(self, space: FSNamespace, room: Reservation, sealed: _Sealed, outcomes: Outcomes) -> bool:
        """Write a block that had no place into another, made if need be; False when there is none."""
        while outcomes[sealed.key] is StoreOutcome.NO_SPARE:
            self._try(space, room, [sealed], outcomes)
        if outcomes[sealed.key] is StoreOutcome.NO_ROOM and not room.num_blocks:
            self._fill(room, space, 1)  # the disk is not full, spare files were gone
            self._try(space, room, [sealed], outcomes)
        if outcomes[sealed.key] is StoreOutcome.NO_ROOM:
            self._evictor.make_room(self._directory.block_bytes, is_disk_full=True)
            room.add(self._spares.take(1, space.namespace.name), 0)
            self._try(space, room, [sealed], outcomes)
        return outcomes[sealed.key] not in NO_PLACE

    def _try(
        self, space: FSNamespace, room: Reservation, batch: Sequence[_Sealed], outcomes: Outcomes
    ) -> bool:
        """Write the first of some blocks, as many as have places, with one call; return whether all had room."""
        places = room.take(len(batch))
        files = []
        for (key, page, row), place in zip(batch, places, strict=False):
            files.append((space.block_path(key), (page, row), place and place.path))
        had_room = len(places) == len(batch)
        for sealed, place, file, answer in zip(
            batch, places, files, self._publish(space, batch, files), strict=False
        ):
            outcome = StoreOutcome.WRITTEN if answer is True else _judge(file, answer)
            room.end(place, outcome)
            outcomes[sealed.key] = outcome
            had_room &= outcome not in NO_PLACE
        for sealed in batch[len(places) :]:
            outcomes[sealed.key] = StoreOutcome.NO_ROOM
        return had_room

    def _publish(
        self, space: FSNamespace, batch: Sequence[_Sealed], files: Sequence[NewFile]
    ) -> list[bool | OSError]:
        """Publish files, those without a folder again when there is one."""
        answers = self._files.publish(files)
        for index, answer in enumerate(answers):
            if isinstance(answer, FileNotFoundError):
                answers[index] = self._publish_in_new_folder(space, batch[index].key, files[index])
            elif answer is True:
                space.folders.add(prefix_of(batch[index].key))
        return answers

    def _publish_in_new_folder(self, space: FSNamespace, key: OffloadKey, file: NewFile) -> bool | OSError:
        path, directory = file[0], self._directory
        self._note_missing_folder(space, key, path)
        answer: bool | OSError = OSError()
        for _ in range(FOLDER_ATTEMPTS):
            try:
                make_block_folder(directory.root, space.namespace, path, directory.file_mode, directory.owner)
            except FileNotFoundError as error:
                answer = error
                continue
            except OSError as error:
                return error
            space.folders.add(prefix_of(key))
            (answer,) = self._files.publish([file])
            if file[2] is not None or not isinstance(answer, FileNotFoundError):
                break
        return answer

    def _note_missing_folder(self, space: FSNamespace, key: OffloadKey, path: str) -> None:
        """Note that a folder was removed, unless it never was there."""
        prefix = prefix_of(key)
        was_there = prefix in space.folders
        space.folders.discard(prefix)
        if space.index.lose(prefix):
            self._evictor.removals.note(path.rpartition("/")[0])
        elif was_there:
            self._evictor.removals.note(None)  # perhaps it was only tidied up, as empty folders are


def _cut(
    blocks: Sequence[tuple[OffloadKey, int]], batch_blocks: int
) -> Iterator[Sequence[tuple[OffloadKey, int]]]:
    """Yield the blocks in batches. Pure."""
    for start in range(0, len(blocks), batch_blocks):
        yield blocks[start : start + batch_blocks]


def _judge(file: NewFile, answer: bool | OSError) -> StoreOutcome:
    """Return what became of a block whose file was answered for."""
    path, _, spare = file
    if not isinstance(answer, OSError):
        # One that was there is not renewed: should it be a file that we cannot read, it has to age until it is evicted.
        return StoreOutcome.WRITTEN if answer else StoreOutcome.EXISTED
    if answer.errno in NO_ROOM:
        return StoreOutcome.NO_ROOM
    if spare is not None and isinstance(answer, FileNotFoundError):
        # The folder was there a moment ago, so the spare file is gone: another host has taken us for dead.
        return StoreOutcome.NO_SPARE
    if not isinstance(answer, FileNotFoundError):  # of folders that are removed under us, the evictor tells
        logger.warning("tier fs: block %s was not stored: %s", path, answer)
    return StoreOutcome.FAILED
