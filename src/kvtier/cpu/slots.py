"""Which slots of the primary tier are free, who took the others, and the one BlockStatus of each.

It does not know whether a block is still held: a policy does. Numbers are deterministic: fresh ones ascending
from 0, then freed ones, last freed first, so that a run can be replayed and a lightly used tier touches few
pages.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus


class SlotTable:
    """A counter of fresh slots, a stack of freed ones, and for each slot its block and the key that took it last.

    The blocks are made here, once: made one by one as slots are taken, a million of them would set off the
    garbage collector's full passes again and again, which halves the rate of stores. Made at the start they can
    also be frozen out of its sight by an engine that calls ``gc.freeze()``.

    Args:
        num_slots: slots of the primary tier.

    Attributes:
        num_used_once: slots that have ever been taken; they are numbered 0 to ``num_used_once - 1``.
        freed: slots that were taken and given back, in the order of giving.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_used_once = 0
        self.freed: list[int] = []
        self._num_slots = num_slots
        self._blocks = [BlockStatus(slot) for slot in range(num_slots)]
        # A stale entry is harmless: its block is gone or names another slot. Clearing it would slow eviction.
        self._last_keys: list[OffloadKey | None] = [None] * num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return self._num_slots - self.num_used_once + len(self.freed)

    def take(self, keys: Collection[OffloadKey]) -> tuple[list[int], list[BlockStatus]]:
        """Take a slot for each of ``keys``; the caller has made sure that so many are free.

        Returns:
            The slots and their blocks, in flight, in the order of ``keys``.
        """
        start = self.num_used_once
        end = self.num_used_once = min(start + len(keys), self._num_slots)
        # The block of a slot that was never taken is in flight from the beginning.
        slots, taken = list(range(start, end)), self._blocks[start:end]
        self._last_keys[start:end] = islice(keys, end - start)
        num_reused = len(keys) - len(slots)
        if num_reused:
            reused = self.freed[: -num_reused - 1 : -1]
            del self.freed[-num_reused:]
            last_keys, blocks = self._last_keys, self._blocks
            for key, slot in zip(islice(keys, end - start, None), reused, strict=True):
                last_keys[slot] = key
                block = blocks[slot]
                block.ref_cnt = IN_FLIGHT
                taken.append(block)
            slots += reused
        return slots, taken

    def take_one(self, key: OffloadKey) -> BlockStatus:
        """Take a slot for ``key``, as ``take`` does, and return its block."""
        if self.num_used_once < self._num_slots:
            slot = self.num_used_once
            self.num_used_once += 1
        else:
            slot = self.freed.pop()
        self._last_keys[slot] = key
        block = self._blocks[slot]
        block.ref_cnt = IN_FLIGHT
        return block

    def give_back(self, slots: Iterable[int]) -> None:
        """Free ``slots``; the last of them is taken first."""
        self.freed.extend(slots)

    def held_blocks(
        self, get_block: Callable[[OffloadKey], BlockStatus | None]
    ) -> dict[OffloadKey, BlockStatus]:
        """Return every block that a slot's last key still holds, by slot. Pure; visits each used slot."""
        held: dict[OffloadKey, BlockStatus] = {}
        for slot, key in enumerate(self._last_keys[: self.num_used_once]):
            block = None if key is None else get_block(key)
            if key is not None and block is not None and block.block_id == slot:
                held[key] = block
        return held
