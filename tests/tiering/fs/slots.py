"""Where blocks lie below the directory of a disk tier, for tests that damage or count them behind its back."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.pack_header import PackGeometry, PackHeader
from kvtier.tiering.fs.records import Kind, last_of_each, names_of, whole_records
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES


class StoredBlock(NamedTuple):
    """A block on the disk.

    Attributes:
        pack: the file that it is in.
        slot: its slot there.
        name: as its journal has it.
        geometry: how the pack is divided.
    """

    pack: Path
    slot: int
    name: bytes
    geometry: PackGeometry

    def read(self) -> bytes:
        """Return the whole slot."""
        return self.pack.read_bytes()[self._offset : self._offset + self.geometry.slot_bytes]

    def write(self, content: bytes) -> None:
        """Replace the whole slot."""
        assert len(content) == self.geometry.slot_bytes
        with self.pack.open("r+b") as file:
            file.seek(self._offset)
            file.write(content)

    def flip(self, at: int = HEADER_PAGE_BYTES + 100) -> None:
        """Change one bit of a byte of the slot, by default of the row."""
        content = bytearray(self.read())
        content[at] ^= 1
        self.write(bytes(content))

    @property
    def _offset(self) -> int:
        return self.geometry.offset_of(self.slot)


def stored_blocks(root: Path) -> list[StoredBlock]:
    """Return the blocks below a directory, as the journals say, in the order of files and slots."""
    return list(_stored_blocks(root))


def _stored_blocks(root: Path) -> Iterator[StoredBlock]:
    for pack in sorted(root.rglob("*.pack")):
        header = PackHeader.unpack(pack.read_bytes()[:HEADER_PAGE_BYTES])
        journal = pack.with_suffix(".index")
        if header is None or not journal.is_file():
            continue
        num_slots = header.geometry.num_slots
        records = last_of_each(whole_records(journal.read_bytes(), header.pack_id, num_slots)[0])
        held = records[records["kind"] == Kind.STORED]
        for name, slot in zip(names_of(held), held["slot"].tolist(), strict=True):
            yield StoredBlock(pack, slot, name, header.geometry)
