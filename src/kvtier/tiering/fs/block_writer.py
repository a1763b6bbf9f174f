"""Writes blocks of the primary tier into files: seals them, finds room, and says what became of each.

It knows no job and no index. Small blocks are published some at a time, so that a thread gives the interpreter's lock
away once for all of them. A block that cannot be stored costs itself only.
"""

import errno
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.aligned import ThreadPages
from kvtier.tiering.block_store import Rows
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import ENVELOPE_BYTES, pack, seal
from kvtier.tiering.fs.block_file import NewFile, plan_batch_files
from kvtier.tiering.fs.directory import Directory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import make_block_folder
from kvtier.tiering.fs.room import Room, StoreOutcome
from kvtier.tiering.fs.space import Space
from kvtier.tiering.fs.spares import Spares
from kvtier.tiering.sealing import plan_num_ahead, seal_ahead

logger = logging.getLogger(__name__)

Outcomes = dict[OffloadKey, StoreOutcome]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

NO_PLACE = (StoreOutcome.NO_ROOM, StoreOutcome.NO_SPARE)


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

    def __init__(self, directory: Directory, rows: Rows, evictor: Evictor, spares: Spares) -> None:
        self._directory = directory
        self._rows = rows
        self._files = directory.files
        self._ledger = directory.ledger
        self._evictor = evictor
        self._spares = spares
        self._batch_blocks = plan_batch_files(rows.row_bytes)
        self._num_ahead = plan_num_ahead(
            self._batch_blocks * rows.row_bytes, has_direct_io=directory.has_direct_io
        )
        self._pages = ThreadPages(self._batch_blocks * (self._num_ahead + 1))

    def write(self, space: Space, blocks: Sequence[tuple[OffloadKey, int]]) -> Outcomes:
        """Write blocks, given as keys and slots, and return what became of each.

        Thread: any of the pool's; blocks.
        """
        outcomes: Outcomes = dict.fromkeys((key for key, _ in blocks), StoreOutcome.NO_ROOM)
        room = Room(self._spares, self._directory.block_bytes)
        try:
            self._fill(room, space, len(blocks))
            seal_next = partial(self._seal, space, cycle(self._pages.of_this_thread()))
            batches = _cut(blocks[: room.num_blocks], self._batch_blocks)
            for batch in seal_ahead(batches, seal_next, self._num_ahead):
                if not self._write_batch(space, room, batch, outcomes):
                    break
        finally:
            room.settle(self._ledger)
        return outcomes

    def _fill(self, room: Room, space: Space, num_blocks: int) -> None:
        """Take room for as many of ``num_blocks`` as there is some for, after an eviction if need be."""
        self._add_room(room, space, num_blocks)
        num_missing = num_blocks - room.num_blocks
        if num_missing > 0:
            self._evictor.make_room(num_missing * self._directory.block_bytes)
            self._add_room(room, space, num_missing)

    def _add_room(self, room: Room, space: Space, num_blocks: int) -> None:
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
        self, space: Space, pages: Iterator[memoryview], blocks: Sequence[tuple[OffloadKey, int]]
    ) -> list[_Sealed]:
        """Fill the next of ``pages`` with the headers of blocks, given as keys and slots."""
        sealed = []
        for key, slot in blocks:
            page, row = next(pages), self._rows.row(slot)
            page[:ENVELOPE_BYTES] = pack(seal(key, space.namespace.digest, row, codec=RAW_NUMBER))
            sealed.append(_Sealed(key, page, row))
        return sealed

    def _write_batch(self, space: Space, room: Room, batch: Sequence[_Sealed], outcomes: Outcomes) -> bool:
        """Write blocks, those without room once more as long as some can be made; return whether all had room."""
        if self._try(space, room, batch, outcomes):
            return True
        return all(
            outcomes[sealed.key] not in NO_PLACE or self._try_again(space, room, sealed, outcomes)
            for sealed in batch
        )

    def _try_again(self, space: Space, room: Room, sealed: _Sealed, outcomes: Outcomes) -> bool:
        """Write a block that had no place into another, made if need be; False when there is none."""
        while outcomes[sealed.key] is StoreOutcome.NO_SPARE:
            self._try(space, room, [sealed], outcomes)
        if outcomes[sealed.key] is StoreOutcome.NO_ROOM:
            self._evictor.make_room(self._directory.block_bytes, is_disk_full=True)
            room.add(self._spares.take(1, space.namespace.name), 0)
            self._try(space, room, [sealed], outcomes)
        return outcomes[sealed.key] not in NO_PLACE

    def _try(self, space: Space, room: Room, batch: Sequence[_Sealed], outcomes: Outcomes) -> bool:
        """Write the first of some blocks, as many as have places, with one call; return whether all had room."""
        places = room.take(len(batch))
        files = []
        for (key, page, row), place in zip(batch, places, strict=False):
            files.append((space.block_path(key), (page, row), place and place.path))
        had_room = len(places) == len(batch)
        for sealed, place, file, answer in zip(
            batch, places, files, self._publish(space, files), strict=False
        ):
            outcome = StoreOutcome.WRITTEN if answer is True else _judge(file, answer)
            room.end(place, outcome)
            outcomes[sealed.key] = outcome
            had_room &= outcome not in NO_PLACE
        for sealed in batch[len(places) :]:
            outcomes[sealed.key] = StoreOutcome.NO_ROOM
        return had_room

    def _publish(self, space: Space, files: Sequence[NewFile]) -> list[bool | OSError]:
        """Publish files, those without a folder again when there is one."""
        answers = self._files.publish(files)
        for index, answer in enumerate(answers):
            if isinstance(answer, FileNotFoundError):
                answers[index] = self._publish_in_new_folder(space, files[index])
        return answers

    def _publish_in_new_folder(self, space: Space, file: NewFile) -> bool | OSError:
        path, directory = file[0], self._directory
        try:
            make_block_folder(directory.root, space.namespace, path, directory.file_mode, directory.owner)
        except OSError as error:
            return error
        return self._files.publish([file])[0]


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
    logger.warning("tier fs: block %s was not stored: %s", path, answer)
    return StoreOutcome.FAILED
