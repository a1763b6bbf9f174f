"""Pins with a lease: blocks that clients want to keep in host memory for a while.

A pin is one more use of the block's slot, so no policy evicts it and no slot is lost. What is pinned in all is bounded
by a share of the cache, so a client that pins everything holds a tenth of it and no more. A lease ends by the manager's
clock; one that is asked for again is extended, never shortened. A block that is asked for before its write has
completed is pinned when it has.
"""

from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush

from kvtier.base import OffloadKey
from kvtier.cpu.block_table import BlockTable
from kvtier.errors import InvariantError

MAX_PINNED_DIVISOR = 10
"""Leases hold at most a tenth of the cache, all clients together: names of clients can be made up. More would let one
client take the cache from the others; less would not keep a few long prompts of a small cache."""


class PinLeases:
    """The leases on the blocks of one cache.

    Args:
        table: the blocks.

    Attributes:
        num_refused: blocks that were not pinned because the share was used up.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._max_leases = table.num_blocks // MAX_PINNED_DIVISOR
        # When each lease ends, and those of them whose block is pinned; others are to be stored yet.
        self._ends_s: dict[OffloadKey, float] = {}
        self._pinned: set[OffloadKey] = set()
        # A heap of (end, key); an entry is stale when the lease was extended.
        self._due: list[tuple[float, OffloadKey]] = []
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._ends_s)

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned now."""
        return len(self._pinned)

    def lease(self, keys: Iterable[OffloadKey], now_s: float, duration_s: float) -> None:
        """Keep ``keys``, head first, for ``duration_s``; what exceeds the share is refused, tails first."""
        self.expire(now_s)
        end_s = now_s + duration_s
        for key in keys:
            if key not in self._ends_s:
                if len(self._ends_s) >= self._max_leases:
                    self.num_refused += 1
                    continue
                if self._table.pin(key):
                    self._pinned.add(key)
            elif self._ends_s[key] >= end_s:
                continue
            self._ends_s[key] = end_s
            heappush(self._due, (end_s, key))
        if len(self._due) > 2 * self._max_leases:
            self._due = [(end_s, key) for key, end_s in self._ends_s.items()]
            heapify(self._due)

    def add_leased(
        self, admitted: Collection[OffloadKey], wanted: Collection[OffloadKey]
    ) -> Collection[OffloadKey]:
        """Return those of ``wanted`` that are admitted or have a lease, in order. Pure."""
        kept = frozenset(admitted)
        return [key for key in wanted if key in kept or key in self._ends_s]

    def on_ready(self, keys: Collection[OffloadKey]) -> None:
        """Pin those of ``keys``, whose writes have completed, that have a lease."""
        for key in keys:
            if key in self._ends_s and key not in self._pinned and self._table.pin(key):
                self._pinned.add(key)

    def expire(self, now_s: float) -> None:
        """End the leases that are over."""
        over: list[OffloadKey] = []
        while self._due and self._due[0][0] <= now_s:
            end_s, key = heappop(self._due)
            if self._ends_s.get(key) == end_s:
                del self._ends_s[key]
                over.append(key)
        self._unpin(over)

    def clear(self) -> None:
        """End all leases; before a reset, which forgets the blocks."""
        self._unpin(list(self._ends_s))
        self._ends_s.clear()
        self._due.clear()

    def check(self) -> None:
        """Compare with the block table.

        Raises:
            InvariantError: there are more leases than may be, or a pinned block may be evicted.
        """
        if len(self._ends_s) > self._max_leases or not self._pinned <= self._ends_s.keys():
            raise InvariantError(
                f"{len(self._ends_s)} leases, {len(self._pinned)} pins, at most {self._max_leases}"
            )
        for key in self._pinned:
            block = self._table.get_block(key)
            if block is None or block.ref_cnt < 1:
                raise InvariantError(f"block {key.hex()} has a lease and may be evicted: {block}")

    def _unpin(self, keys: Iterable[OffloadKey]) -> None:
        pinned = [key for key in keys if key in self._pinned]
        self._pinned.difference_update(pinned)
        self._table.unpin_each(pinned)
