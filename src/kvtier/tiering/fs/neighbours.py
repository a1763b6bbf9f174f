"""What other packs of the namespace hold: those of neighbours, and those without an owner. This process reads them.

It is what their journals say, a tail interval ago at most. A slot may be written over while it is read: the envelope
and the checksum tell, and then the block is a miss.
"""

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.block_format import BlockFormat, format_of
from kvtier.tiering.kit.lifetime import Lifetime

SLOT_BITS = 32
SLOT_MASK = 2**SLOT_BITS - 1


def address_of(number: int, slot: int) -> int:
    """Return the address of a slot: the pack's number in this process, and the slot's. Pure."""
    return number << SLOT_BITS | slot


class SlotContent(NamedTuple):
    """What a journal says last of a slot.

    Attributes:
        slot: its number.
        key: the block that it holds; None: it holds none.
        stored_s: when the block was stored, seconds since 1970.
        used_s: when it was last used.
    """

    slot: int
    key: OffloadKey | None
    stored_s: int = 0
    used_s: int = 0


class PackContents(NamedTuple):
    """The blocks of a pack, oldest use first.

    Attributes:
        slots: where they are; shape (num_blocks,).
        keys: the blocks.
        stored_s: when each was stored, seconds since 1970; shape (num_blocks,).
        used_s: when each was last used; shape (num_blocks,).
    """

    slots: npt.NDArray[np.int64]
    keys: Sequence[OffloadKey]
    stored_s: npt.NDArray[np.uint32]
    used_s: npt.NDArray[np.uint32]


NO_CONTENTS = PackContents(np.zeros(0, np.int64), (), np.zeros(0, np.uint32), np.zeros(0, np.uint32))


class Difference(NamedTuple):
    """Blocks that came to be known, and blocks that are not there any more."""

    added: Sequence[OffloadKey] = ()
    removed: Sequence[OffloadKey] = ()


class _Pack:
    """What is known of the slots of one pack; ``Neighbours`` guards it."""

    __slots__ = ("keys", "stored_s", "used_s")

    def __init__(self, num_slots: int) -> None:
        self.keys: list[OffloadKey | None] = [None] * num_slots
        self.stored_s = array("I", bytes(4 * num_slots))
        self.used_s = array("I", bytes(4 * num_slots))


class Neighbours:
    """Where blocks are in packs that this process does not own.

    Mutable are the packs and the addresses by key; ``_lock`` guards changes. ``find`` reads without it: a single look
    into a dictionary is atomic, and an address that is out of date is a miss when it is read.

    Args:
        lifetime: how long blocks live; None: as long as they are held.
        wall_clock: seconds since 1970.
    """

    def __init__(self, lifetime: Lifetime | None, wall_clock: Callable[[], float]) -> None:
        self._lifetime = lifetime
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._packs: dict[int, _Pack] = {}
        self._address_of: dict[OffloadKey, int] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def __contains__(self, key: OffloadKey) -> bool:
        return self.find(key) is not None

    def find(self, key: OffloadKey) -> int | None:
        """Return the address of a block, None where none is known or it is over. Thread: any."""
        address = self._address_of.get(key)
        if address is None or self._lifetime is None:
            return address
        pack = self._packs.get(address >> SLOT_BITS)
        if pack is None or self._lifetime.is_over(pack.stored_s[address & SLOT_MASK], self._wall_clock()):
            return None
        return address

    def is_over(self, key: OffloadKey) -> bool:
        """Return whether a block is there and its time to live has ended."""
        return key in self._address_of and self.find(key) is None

    def key_at(self, address: int) -> OffloadKey | None:
        """Return the block that is known to be in a slot."""
        pack = self._packs.get(address >> SLOT_BITS)
        slot = address & SLOT_MASK
        return None if pack is None or slot >= len(pack.keys) else pack.keys[slot]

    def numbers(self) -> list[int]:
        """Return the numbers of the packs."""
        with self._lock:
            return list(self._packs)

    def add_pack(self, number: int, num_slots: int) -> None:
        """Add a pack of which nothing is known yet."""
        with self._lock:
            self._packs[number] = _Pack(num_slots)

    def apply(self, number: int, changes: Iterable[SlotContent], *, is_all: bool = False) -> Difference:
        """Take over what a journal says; nothing where the pack is not known any more.

        Args:
            number: the pack's.
            changes: each slot once.
            is_all: whether slots that are not named hold nothing.
        """
        added: list[OffloadKey] = []
        removed: set[OffloadKey] = set()
        with self._lock:
            pack = self._packs.get(number)
            if pack is None:
                return Difference()
            if is_all:
                removed.update(self._forget_all(number, pack))
            addresses = self._address_of
            for slot, key, stored_s, used_s in changes:
                address = address_of(number, slot)
                before = pack.keys[slot]
                if before is not None and addresses.get(before) == address:
                    del addresses[before]
                    removed.add(before)
                pack.keys[slot] = key
                pack.stored_s[slot], pack.used_s[slot] = stored_s, used_s
                if key is not None:
                    if key not in addresses:
                        added.append(key)
                    addresses[key] = address
            is_back = removed.intersection(added)
        return Difference(
            [key for key in added if key not in is_back], [key for key in removed if key not in is_back]
        )

    def remove_pack(self, number: int) -> tuple[list[SlotContent], Difference]:
        """Forget a pack; return what it holds, and the blocks that are not there any more."""
        with self._lock:
            pack = self._packs.pop(number, None)
            if pack is None:
                return [], Difference()
            held = [
                SlotContent(slot, key, pack.stored_s[slot], pack.used_s[slot])
                for slot, key in enumerate(pack.keys)
                if key is not None
            ]
            return held, Difference(removed=self._forget_all(number, pack))

    def forget(self, key: OffloadKey, address: int) -> bool:
        """Forget one block that was not as the journal says; False when it is known elsewhere, or not any more."""
        with self._lock:
            if self._address_of.get(key) != address:
                return False
            del self._address_of[key]
            return True

    def clear(self) -> list[int]:
        """Forget everything; return the numbers of the packs."""
        with self._lock:
            numbers = list(self._packs)
            self._packs, self._address_of = {}, {}
            return numbers

    def _forget_all(self, number: int, pack: _Pack) -> list[OffloadKey]:
        gone = []
        for slot, key in enumerate(pack.keys):
            if key is not None and self._address_of.get(key) == address_of(number, slot):
                del self._address_of[key]
                gone.append(key)
            pack.keys[slot] = None
        return gone


@dataclass(frozen=True, slots=True, eq=False)
class PackNamespace:
    """The blocks of one epoch; compared by identity, a reset opens another one.

    Attributes:
        identity: what makes its blocks its own: model, layout, epoch.
        neighbours: those in packs of others.
        format: how they are written.
    """

    identity: Namespace
    neighbours: Neighbours
    format: BlockFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_of(self.identity))

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.identity.name
