"""Blocks that are kept from eviction until a time: each has one hold in the block table while its lease lasts.

A hold takes effect when its block is ready, so a block may be pinned before it is in host memory. At most a tenth of
the slots may be held so: a cache that cannot evict stores nothing new.
"""

from collections.abc import Callable, Collection, Iterable

from kvtier.base import OffloadKey
from kvtier.cpu.block_table import BlockTable
from kvtier.errors import InvariantError, PinLimitError
from kvtier.operating import PinnedBlocks

LIMIT_DIVISOR = 10
"""A tenth of the slots may be pinned, by operators and clients together: names of clients can be made up. More takes
from every other request what one wants for his; less would not keep a few long prompts of a small cache."""

NEVER_S = float("inf")


class PinLeases:
    """The leases of one block table. Used from the manager's thread.

    Args:
        table: the blocks.
        clock: seconds, monotonic.

    Attributes:
        limit: blocks that may have a lease.
        ends_s: the clock's reading at the end of each lease. INVARIANT: each key has one hold of its own in the table.
        next_end_s: not after the earliest of them; infinite when there is none.
        num_refused: blocks that clients asked for beyond the limit.
    """

    def __init__(self, table: BlockTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        self.limit = max(1, table.num_blocks // LIMIT_DIVISOR)
        self.ends_s: dict[OffloadKey, float] = {}
        self.next_end_s = NEVER_S
        self.num_refused = 0

    def pin(self, keys: Collection[OffloadKey], lease_s: float) -> PinnedBlocks:
        """Hold ``keys`` for ``lease_s`` seconds from now; a lease that ends later stays as it is.

        Raises:
            PinLimitError: there would be more than ``limit`` leases; nothing has changed.
        """
        self.expire()
        ends_s = self.ends_s
        distinct = dict.fromkeys(keys)
        new = [key for key in distinct if key not in ends_s]
        if len(ends_s) + len(new) > self.limit:
            raise PinLimitError(len(new), len(ends_s), self.limit)
        end_s = self._clock() + lease_s
        for key in new:
            self._table.hold(key)
        for key in distinct:
            ends_s[key] = max(end_s, ends_s.get(key, end_s))
        if distinct:
            self.next_end_s = min(self.next_end_s, end_s)
        num_ready = len(self._table.ready_among(distinct))
        return PinnedBlocks(len(distinct), num_ready, len(ends_s), self.limit)

    def pin_as_many_as_fit(self, keys: Iterable[OffloadKey], lease_s: float) -> None:
        """Do what ``pin`` does for the first of ``keys`` that the limit allows, and count the others."""
        distinct = list(dict.fromkeys(keys))
        new = [key for key in distinct if key not in self.ends_s]
        refused = frozenset(new[max(0, self.limit - len(self.ends_s)) :])
        self.num_refused += len(refused)
        self.pin([key for key in distinct if key not in refused], lease_s)

    def add_leased(
        self, admitted: Collection[OffloadKey], wanted: Collection[OffloadKey]
    ) -> Collection[OffloadKey]:
        """Return those of ``wanted`` that are admitted or have a lease, in order. Pure."""
        kept = frozenset(admitted)
        return [key for key in wanted if key in kept or key in self.ends_s]

    def unpin(self, keys: Collection[OffloadKey] | None) -> int:
        """End the leases of ``keys``, or all for None; return how many there were."""
        ends_s = self.ends_s
        ended = list(ends_s) if keys is None else [key for key in dict.fromkeys(keys) if key in ends_s]
        for key in ended:
            del ends_s[key]
        self._table.release_each(ended)
        if not ends_s:
            self.next_end_s = NEVER_S
        return len(ended)

    def expire(self) -> None:
        """End the leases whose time has come."""
        now_s = self._clock()
        if now_s < self.next_end_s:
            return
        self.unpin([key for key, end_s in self.ends_s.items() if end_s <= now_s])
        self.next_end_s = min(self.ends_s.values(), default=NEVER_S)

    def check(self) -> None:
        """Raise InvariantError when a lease has no hold, or there are more than may be."""
        if len(self.ends_s) > self.limit:
            raise InvariantError(f"{len(self.ends_s)} blocks have a lease, at most {self.limit} may")
        for key, end_s in self.ends_s.items():
            if not self._table.holds.get(key):
                raise InvariantError(f"{key.hex()} has a lease but no hold")
            if end_s < self.next_end_s:
                raise InvariantError(f"a lease ends at {end_s}, before {self.next_end_s}, the earliest")
