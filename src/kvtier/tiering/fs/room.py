"""Room for the blocks of one part of a job: spare files, then what is reserved in the shared count.

It asks nobody for room and writes nothing; it keeps the account of what was used and what was not.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from kvtier.tiering.fs.ledger import Ledger
from kvtier.tiering.fs.spares import Spares


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
    one that was used up in vain is counted out. One that somebody else removed is not: who did may have counted anew.

    Args:
        block_bytes: length of a block's file.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._spares: list[str] = []
        self._num_reserved = self._num_new = self._num_lost = 0

    @property
    def num_blocks(self) -> int:
        """For how many blocks there is some left."""
        return self._num_new_left + len(self._spares)

    def add(self, spares: Sequence[str], num_reserved: int) -> None:
        """Have more of it."""
        self._spares.extend(spares)
        self._num_reserved += num_reserved

    def use(self, write: Callable[[str | None], StoreOutcome]) -> StoreOutcome:
        """Write a block into the next place.

        Args:
            write: does it, over the spare file that it is given or, given None, into a new one.
        """
        if self._spares:
            outcome = write(self._spares.pop())
            self._num_lost += outcome not in (StoreOutcome.WRITTEN, StoreOutcome.NO_SPARE)
            return outcome
        if self._num_new_left == 0:
            return StoreOutcome.NO_ROOM
        outcome = write(None)
        self._num_new += outcome is StoreOutcome.WRITTEN
        return outcome

    def settle(self, ledger: Ledger, spares: Spares) -> None:
        """Give back what was not used, and have the count know the rest."""
        spares.give_back(self._spares)
        ledger.settle(self._num_reserved * self._block_bytes, self._num_new * self._block_bytes)
        ledger.remove(self._num_lost * self._block_bytes)

    @property
    def _num_new_left(self) -> int:
        return self._num_reserved - self._num_new
