"""Room for the blocks of one part of a job: spare files, then what is reserved in the shared count.

It asks nobody for room and writes nothing; it keeps the account of what was used and what was not.
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum

from kvtier.tiering.fs.ledger import Ledger
from kvtier.tiering.fs.spares import Spare, Spares

Place = Spare | None
"""Where one block may be written: over a spare file, or into a new one."""


class StoreOutcome(Enum):
    """What became of one block that was to be stored; of ``NO_SPARE``, that the file to be written over was gone."""

    WRITTEN = "written"
    EXISTED = "existed"
    NO_ROOM = "no_room"
    NO_SPARE = "no_spare"
    FAILED = "failed"


class Room:
    """Where some blocks may be written; used by one thread.

    The bytes of spare files are in the shared count already. One that is written over stays there under its new name;
    one that was used up in vain stays until somebody counts anew, which is too much and never too little.

    A place that is taken and not ended, because an exception came in between, counts as written too: its file may be
    there.

    Args:
        spares: where spare files come from, and go when they were not used.
        block_bytes: length of a block's file.
    """

    def __init__(self, spares: Spares, block_bytes: int) -> None:
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

    def settle(self, ledger: Ledger) -> None:
        """Give back what was not used, and have the count know the rest."""
        for spare in self._taken:
            self._all_spares.discard(spare)
        self._all_spares.give_back(self._spares)
        ledger.settle(self._num_reserved * self._block_bytes, self._num_new * self._block_bytes)

    @property
    def _num_new_left(self) -> int:
        return self._num_reserved - self._num_new
