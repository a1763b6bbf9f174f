"""The roles of the tier of packs, whose backend is slots."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
from tests.tiering.fs.engine import NUM_PACK_SLOTS, EagerTier, bytes_of_packs
from tests.tiering.roles.bench import RawBackend
from tests.tiering.roles.every_role import EveryRole

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_driver import ROW_BYTES, key_of
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.fs.pack_header import PackHeader
from kvtier.tiering.fs.records import Kind, last_of_each, names_of, whole_records
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, HEADER_PAGE_BYTES

ONE_LENGTH = "a slot has one length"
BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES


class Slot(NamedTuple):
    """Where a block is: the pack, and the offset of its slot."""

    pack: Path
    offset: int


class InPacks(RawBackend):
    """The slots that the journals name, and files that are none of ours.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def name_of(self, namespace: str, name: bytes) -> str:
        return f"{namespace}/{name.hex()}"

    def document_name(self, namespace: str) -> str:
        return f"{namespace}/namespace.json"

    def strange_names(self, namespace: str) -> list[str]:
        return [
            "notes.txt",
            f"{namespace}/0123456789abcdef.packs",
            f"{namespace}/0123456789ABCDEF.pack",
            f"{namespace}/deeper/0123456789abcdef.pack",
            f"{namespace}x/0123456789abcdef.pack",
        ]

    def names(self) -> list[str]:
        documents = [str(path.relative_to(self._root)) for path in self._root.glob("*/*.json")]
        return [name for name, _ in self._slots()] + documents

    def read(self, name: str) -> bytes | None:
        path = self._root / name
        if path.is_file():
            return path.read_bytes()
        for slot in (slot for found, slot in self._slots() if found == name):
            value = slot.pack.read_bytes()[slot.offset :]
            return value[:ENVELOPE_BYTES] + value[HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + ROW_BYTES]
        return None

    def write(self, name: str, value: bytes) -> None:
        slots = [slot for found, slot in self._slots() if found == name]
        if not slots:
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value)
        for slot in slots:
            assert len(value) <= BLOCK_BYTES, "a slot has one length"
            padded = value.ljust(BLOCK_BYTES, b"\0")
            with slot.pack.open("r+b") as file:
                file.seek(slot.offset)
                file.write(padded[:ENVELOPE_BYTES])
                file.seek(slot.offset + HEADER_PAGE_BYTES)
                file.write(padded[ENVELOPE_BYTES:])

    def add_age(self, name: str, seconds: float) -> None:
        """The clock that tiers tell times of stores by goes on instead."""

    def remove(self, name: str) -> None:
        raise NotImplementedError("only the owner of a pack removes a block: remove_blocks asks it")

    def _slots(self) -> Iterator[tuple[str, Slot]]:
        for path in sorted(self._root.glob("*/*.pack")):
            header = PackHeader.unpack(path.read_bytes()[:HEADER_PAGE_BYTES])
            if header is None:
                continue
            journal = path.with_suffix(".index").read_bytes()
            records = last_of_each(whole_records(journal, header.pack_id, header.geometry.num_slots)[0])
            held = records[records["kind"] == Kind.STORED]
            for name, slot in zip(names_of(held), held["slot"].tolist(), strict=True):
                yield self.name_of(path.parent.name, name), Slot(path, header.geometry.offset_of(slot))


class TestPacks(EveryRole):
    """Packs of four slots."""

    tier_class = EagerTier
    lacks: ClassVar = {
        "empty values": ONE_LENGTH,
        "lengths": ONE_LENGTH,
        "other lengths": ONE_LENGTH,
        "untouched slots": "blocks are read into their slots and checked there",
        "whole removals": "an engine that lives keeps its emptied packs",
        "small jobs": "small jobs of a step are one call, which may have more blocks than a tiny tier has slots",
        "one copy": "two engines that store a block within a tenth of a second store it twice",
        "quotas of all models": "a quota counts the blocks of one namespace",
        "single ages": "engines alone tell when a block was used",
        "emptied": "a pack that is gone is noticed by itself",
    }
    small: ClassVar = {"num_slots": NUM_PACK_SLOTS}
    num_small = NUM_PACK_SLOTS

    @pytest.fixture(autouse=True)
    def _use_folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "packs"

    def own_settings(self) -> dict[str, object]:
        return {
            "root_dir": str(self.root),
            "capacity_bytes": bytes_of_packs(32),
            "pack_bytes": bytes_of_packs(1),
            "num_threads": 1,
        }

    def get_backend(self) -> InPacks:
        return InPacks(self.root)

    def build(
        self, config: OffloadingConfig, rows: memoryview, settings: TierSettings, **own: object
    ) -> SecondaryTierManager:
        num_slots = own.pop("num_slots", None)
        if isinstance(num_slots, int):  # a single pack of so many
            own["capacity_bytes"] = own["pack_bytes"] = bytes_of_packs(
                1, num_slots, (rows.shape or (0, 0))[1]
            )
        return super().build(config, rows, settings, **{"wall_clock": self.tell_time, **own})

    def tell_time(self) -> float:
        """Return seconds since 1970."""
        return 1.7e9 + self.clock()

    def remove_block_of_engine(self, number: int) -> None:
        self._remove([key_of(number)], None)

    def remove_blocks(self, *numbers: int) -> None:
        self._remove(list(map(key_of, numbers)), [self.namespace_of()])

    def _remove(self, keys: Sequence[OffloadKey], namespaces: Collection[str] | None) -> None:
        """Remove blocks as a command does, which asks their owners."""
        place = self.tier_class.open_place(self.own_settings())
        try:
            place.begin_removal()
            blocks = [block for block in place.blocks(namespaces) if block.key in keys]
            assert place.remove(blocks, unless_changed=False).num == len(keys)
            place.end_removal(())
        finally:
            place.close()
