"""The blocks of one epoch that were stored or used in this process, and who reads or writes them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.cpu.policies import BlockStatus, CachePolicy


@dataclass(slots=True, eq=False)
class Era:
    """An eviction policy and how much it holds. Guarded by whoever has it.

    Attributes:
        policy: holds the blocks and orders them.
        num_held: how many there are.
    """

    policy: CachePolicy
    num_held: int = 0

    def insert(self, key: OffloadKey, status: BlockStatus) -> None:
        """Hold a block that is not held."""
        self.policy.insert(key, status)
        self.num_held += 1

    def remove(self, key: OffloadKey, status: BlockStatus) -> bool:
        """Stop holding a block; False when another one, or none, stands under its key."""
        if self.policy.get(key) is not status:
            return False
        self.policy.remove(key)
        self.num_held -= 1
        return True

    def evict(self, num: int, protected: Collection[OffloadKey] = ()) -> list[tuple[OffloadKey, BlockStatus]]:
        """Stop holding ``num`` blocks, or as many as nobody reads or writes, and return them."""
        if num <= 0:
            return []
        victims = self.policy.evict(num, protected)
        if victims is None:
            victims = []
            while one := self.policy.evict(1, protected):
                victims += one
        self.num_held -= len(victims)
        return victims


class Hold(NamedTuple):
    """A slot that is being read or written, and therefore stays as it is.

    Attributes:
        key: its block.
        status: the slot's number and its pins.
        era: the epoch that the block is of.
        generation: of the write; 0 for a read.
    """

    key: OffloadKey
    status: BlockStatus
    era: Era
    generation: int = 0

    @property
    def slot(self) -> int:
        """Number of the slot."""
        return self.status.block_id
