"""Room for the blocks of one part of a job: spare files, then what is reserved in the shared count.

It asks nobody for room and writes nothing; it keeps the account of what was used and what was not.
"""

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum

from kvtier.tiering.fs.ledger import Ledger
from kvtier.tiering.fs.spares import Spare, Spares


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

    Args:
        spares: where spare files come from, and go when they were not used.
        block_bytes: length of a block's file.
    """

    def __init__(self, spares: Spares, block_bytes: int) -> None:
        self._all_spares = spares
        self._block_bytes = block_bytes
        self._spares: deque[Spare] = deque()
        self._num_reserved = self._num_new = 0

    @property
    def num_blocks(self) -> int:
        """For how many blocks there is some left."""
        return self._num_new_left + len(self._spares)

    def add(self, spares: Iterable[Spare], num_reserved: int) -> None:
        """Have more of it."""
        self._spares.extend(spares)
        self._num_reserved += num_reserved

    def use(self, write: Callable[[str | None], StoreOutcome]) -> StoreOutcome:
        """Write a block into the next place.

        Args:
            write: does it, over the spare file that it is given or, given None, into a new one.
        """
        if self._spares:
            return self._write_over(self._spares.popleft(), write)
        if self._num_new_left == 0:
            return StoreOutcome.NO_ROOM
        outcome = write(None)
        self._num_new += outcome is StoreOutcome.WRITTEN
        return outcome

    def settle(self, ledger: Ledger) -> None:
        """Give back what was not used, and have the count know the rest."""
        self._all_spares.give_back(self._spares)
        ledger.settle(self._num_reserved * self._block_bytes, self._num_new * self._block_bytes)

    def _write_over(self, spare: Spare, write: Callable[[str | None], StoreOutcome]) -> StoreOutcome:
        outcome = StoreOutcome.FAILED
        try:
            outcome = write(spare.path)
        finally:
            if outcome is StoreOutcome.EXISTED:
                self._spares.append(spare)
            elif outcome is not StoreOutcome.WRITTEN:
                self._all_spares.discard(spare)
        return outcome

    @property
    def _num_new_left(self) -> int:
        return self._num_reserved - self._num_new
