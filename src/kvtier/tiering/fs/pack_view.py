"""What a pack holds as its journal says, for a process without an engine: the blocks of a place, one at a time."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.pack_contents import read_envelopes
from kvtier.tiering.fs.pack_files import PACK_SUFFIX
from kvtier.tiering.fs.records import NO_RECORDS, RECORD, Change, Kind, Records, names_of, pack_changes
from kvtier.tiering.kit.block_pieces import check_in_pieces
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.place import BlockState, Opener, PlaceBlock

CHUNK_SLOTS = 4096
"""Slots whose names are in memory at a time while blocks are listed."""


class Stamp(NamedTuple):
    """What a block's stamp says.

    Attributes:
        stem: name of its pack, a number.
        slot: where it is in the pack.
        stored_s: when it was stored, seconds since 1970.
        used_s: when it was last used, as far as the journal knows.
    """

    stem: int
    slot: int
    stored_s: int
    used_s: int

    @property
    def pack_name(self) -> str:
        """Name of the pack's file."""
        return f"{self.stem:016x}{PACK_SUFFIX}"


def stamp_of(block: PlaceBlock) -> Stamp:
    """Return a block's stamp. Pure."""
    return Stamp(*block.stamp)


def by_pack(blocks: Sequence[PlaceBlock]) -> list[list[PlaceBlock]]:
    """Return blocks, those of each pack together. Pure."""

    def pack_of(block: PlaceBlock) -> tuple[str, int]:
        return block.namespace, stamp_of(block).stem

    return [list(group) for _, group in groupby(sorted(blocks, key=pack_of), key=pack_of)]


class PackView:
    """What the journal of a pack says last of each slot; where it is lost the envelopes are read, as engines do.

    Args:
        pack: open; not closed here.
    """

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._last: Records = np.zeros(pack.geometry.num_slots, RECORD)
        self.refresh()

    def refresh(self) -> None:
        """Take over what was written since the last call."""
        is_new, records = False, NO_RECORDS
        if self.pack.journal.is_lost:
            records = np.frombuffer(pack_changes(read_envelopes(self.pack), self.pack.header.pack_id), RECORD)
        else:
            with suppress(OSError):  # gone meanwhile: what it said last stands
                is_new, records = self.pack.journal.tail()
        if is_new:
            self._last = np.zeros_like(self._last)
        self._last[records["slot"]] = records

    def count(self) -> int:
        """Return how many slots hold a block."""
        return int(np.count_nonzero(self._last["kind"] == Kind.STORED))

    def stored(self) -> Iterator[Change]:
        """Yield the records of the slots that hold a block."""
        for start in range(0, len(self._last), CHUNK_SLOTS):
            yield from _stored_in(self._last[start : start + CHUNK_SLOTS])

    def blocks(self, *, is_encrypted: bool) -> Iterator[PlaceBlock]:
        """Yield the blocks.

        Args:
            is_encrypted: whether their names tell neither key nor tenant.
        """
        path = self.pack.path
        for change in self.stored():
            name = OffloadKey(change.name)
            yield PlaceBlock(
                namespace=path.parent.name,
                address=f"slot {change.slot} of {path}",
                num_bytes=self.pack.geometry.slot_bytes,
                used_s=change.used_s or None,
                stamp=Stamp(int(path.stem, 16), change.slot, change.stored_s, change.used_s),
                tenant=None if is_encrypted else get_offload_tenant(name),
                key=None if is_encrypted else name,
                name=name,
            )

    def find(self, block: PlaceBlock) -> Change | None:
        """Return the record of a block; None where its slot does not hold it any more."""
        slot = stamp_of(block).slot
        found = next(_stored_in(self._last[slot : slot + 1]), None)
        return found if found is not None and found.name == block.name else None

    def held(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> list[PlaceBlock]:
        """Return those of some blocks that are there, and are as they were listed where that is asked for."""
        return [block for block in blocks if self._holds(block, unless_changed=unless_changed)]

    def check(self, block: PlaceBlock, opener: Opener | None) -> BlockState:
        """Read a block and compare it with its header."""
        pack, slot = self.pack, stamp_of(block).slot

        def read(skipped_bytes: int, num_bytes: int) -> memoryview:
            piece = memoryview(bytearray(num_bytes))
            return piece[: pack.read(slot, [piece], skipped_bytes)]

        try:
            state = check_in_pieces(
                read(0, HEADER_PAGE_BYTES),
                pack.geometry.row_bytes,
                lambda start, num_bytes: read(HEADER_PAGE_BYTES + start, num_bytes),
                block.namespace,
                block.name,
                opener,
                # The first page says how long a row is, and may be forged.
                num_disk_blocks=pack.path.lstat().st_blocks,
            )
        except OSError:
            return BlockState.UNREADABLE
        pack.forget_cached(slot)
        return state

    def _holds(self, block: PlaceBlock, *, unless_changed: bool) -> bool:
        found, stamp = self.find(block), stamp_of(block)
        if found is None or not unless_changed:
            return found is not None
        return found.stored_s == stamp.stored_s and found.used_s <= stamp.used_s


class PackReader:
    """Opens the packs of blocks for reading, one after the other.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: PackDirectory) -> None:
        self._directory = directory
        self._view: PackView | None = None

    def find(self, block: PlaceBlock) -> PackView | None:
        """Return the pack of a block, as it was when it was opened, and open until another one is; None: it is gone."""
        name = stamp_of(block).pack_name
        path = self._directory.folder_of(block.namespace) / name
        if self._view is not None and (self._view.pack.path != path or self._view.pack.is_lost()):
            self.close()
        if self._view is None:
            pack = self._directory.open(block.namespace, name, has_own_rows=False)
            self._view = None if pack is None else PackView(pack)
        return self._view

    def held(
        self, blocks: Sequence[PlaceBlock], *, unless_changed: bool
    ) -> Iterator[tuple[Pack, list[PlaceBlock]]]:
        """Yield the packs of some blocks, each until the next, and those that they hold by now."""
        for group in by_pack(blocks):
            view = self.find(group[0])
            if view is not None:
                view.refresh()
                yield view.pack, view.held(group, unless_changed=unless_changed)

    def close(self) -> None:
        """Close the pack that is open; idempotent."""
        if self._view is not None:
            self._view.pack.close()
            self._view = None


def _stored_in(records: Records) -> Iterator[Change]:
    stored = records[records["kind"] == Kind.STORED]
    slots, stored_s, used_s = (stored[name].tolist() for name in ("slot", "stored_s", "used_s"))
    for slot, name, begun_s, last_s in zip(slots, names_of(stored), stored_s, used_s, strict=True):
        yield Change(Kind.STORED, slot, name, begun_s, last_s)
