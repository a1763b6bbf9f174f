"""Blocks that are kept from eviction until a time: each has one hold in the block table while its lease lasts.

A hold takes effect when its block is ready, so a block may be pinned before it is in host memory. At most a tenth of
the slots may be held so: a cache that cannot evict stores nothing new. Of these, three quarters are for requests at
most, and of those a tenant has no more than its quota of host memory has blocks: the rest is left to operators, so
that no request pins everything. A block that both have pinned counts for both until each lease has ended.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.cpu.block_table import BlockTable
from kvtier.cpu.tenant_quotas import TenantBlocks
from kvtier.errors import InvariantError, PinLimitError
from kvtier.operating import PinnedBlocks

logger = logging.getLogger(__name__)

LIMIT_DIVISOR = 10
"""A tenth of the slots may be pinned, by operators and clients together: names of clients can be made up. More takes
from every other request what one wants for his; less would not keep a few long prompts of a small cache."""

CLIENT_QUARTERS = 3
"""Quarters of that which requests may pin, all together. With all four a single request leaves an operator none for a
day; with fewer the prompts that clients name lose to none that an operator may never name."""

NEVER_S = float("inf")


class PinLeases:
    """The leases of one block table. Used from the manager's thread.

    Args:
        table: the blocks.
        clock: seconds, monotonic.
        quotas: those of tenants; None where there are none.

    Attributes:
        limit: blocks that may have a lease.
        client_limit: of these, how many requests may pin.
        ends_s: the clock's reading at the end of each lease. INVARIANT: each key has one hold of its own in the table.
        client_ends_s: the same of those that requests have pinned. INVARIANT: each has an entry in ``ends_s`` that does
            not end before.
        next_end_s: not after the earliest of them; infinite when there is none.
        num_refused: blocks that clients asked for beyond the limits.
    """

    def __init__(
        self,
        table: BlockTable,
        clock: Callable[[], float],
        quotas: TenantBlocks | None = None,
    ) -> None:
        self._table = table
        self._clock = clock
        self._quotas = quotas
        self.limit = max(1, table.num_blocks // LIMIT_DIVISOR)
        self.client_limit = self.limit * CLIENT_QUARTERS // 4
        self.ends_s: dict[OffloadKey, float] = {}
        self.client_ends_s: dict[OffloadKey, float] = {}
        self._num_of_tenant: Counter[int] = Counter()
        self.next_end_s = NEVER_S
        self.num_refused = 0

    def pin(self, keys: Collection[OffloadKey], lease_s: float, *, needs_block: bool = False) -> PinnedBlocks:
        """Hold ``keys`` for ``lease_s`` seconds from now; arguments as ``OffloadingManager.pin``.

        Raises:
            PinLimitError: there would be more than ``limit`` leases; nothing has changed.
        """
        self.expire()
        distinct = dict.fromkeys(keys)
        if needs_block and not self._table.held_among(distinct):
            return PinnedBlocks(0, 0, len(self.ends_s), self.limit)
        num_new = sum(key not in self.ends_s for key in distinct)
        if len(self.ends_s) + num_new > self.limit:
            raise PinLimitError(num_new, len(self.ends_s), self.limit)
        self._hold(distinct, self._clock() + lease_s)
        num_ready = len(self._table.ready_among(distinct))
        return PinnedBlocks(len(distinct), num_ready, len(self.ends_s), self.limit)

    def pin_for_request(self, keys: Iterable[OffloadKey], lease_s: float) -> None:
        """Do what ``pin`` does for the first of one request's ``keys`` that the limits allow, and count the others."""
        self.expire()
        distinct = list(dict.fromkeys(keys))
        if not distinct:
            return
        tenant = get_offload_tenant(distinct[0])
        quota_blocks = None if self._quotas is None else self._quotas.quota_blocks(tenant)
        num_left = self.client_limit - len(self.client_ends_s)
        if quota_blocks is not None:
            num_left = min(num_left, quota_blocks - self._num_of_tenant[tenant])
        num_free = self.limit - len(self.ends_s)
        pinned = []
        for key in distinct:
            is_new = key not in self.client_ends_s
            needs_room = key not in self.ends_s
            if is_new and (num_left <= 0 or (needs_room and num_free <= 0)):
                continue
            num_left -= is_new
            num_free -= needs_room
            pinned.append(key)
        self._note_refused(len(distinct) - len(pinned), len(distinct))
        end_s = self._clock() + lease_s
        self._hold(pinned, end_s)
        if num_new := sum(key not in self.client_ends_s for key in pinned):
            # Only then: a tenant whose pins are all declined leaves nothing here, whatever names clients make up.
            self._num_of_tenant[tenant] += num_new
        for key in pinned:
            self.client_ends_s[key] = max(end_s, self.client_ends_s.get(key, end_s))

    def add_leased(
        self, admitted: Collection[OffloadKey], wanted: Collection[OffloadKey]
    ) -> Collection[OffloadKey]:
        """Return those of ``wanted`` that are admitted or have a lease, in order. Pure."""
        if not self.ends_s:
            return admitted
        kept = frozenset(admitted)
        return [key for key in wanted if key in kept or key in self.ends_s]

    def unpin(self, keys: Collection[OffloadKey] | None) -> int:
        """End the leases of ``keys``, or all for None; return how many there were."""
        ends_s = self.ends_s
        ended = list(ends_s) if keys is None else [key for key in dict.fromkeys(keys) if key in ends_s]
        self._forget_clients(ended)
        for key in ended:
            del ends_s[key]
        self._table.release_each(ended)
        if not ends_s:
            self.next_end_s = NEVER_S
        return len(ended)

    def expire(self) -> None:
        """End the leases whose time has come."""
        if not self.ends_s or (now_s := self._clock()) < self.next_end_s:
            return
        self._forget_clients([key for key, end_s in self.client_ends_s.items() if end_s <= now_s])
        self.unpin([key for key, end_s in self.ends_s.items() if end_s <= now_s])
        next_ends = (min(ends.values(), default=NEVER_S) for ends in (self.ends_s, self.client_ends_s))
        self.next_end_s = min(next_ends)

    def check(self) -> None:
        """Raise InvariantError when a lease has no hold, or there are more than may be."""
        for ends_s, limit in ((self.ends_s, self.limit), (self.client_ends_s, self.client_limit)):
            if len(ends_s) > limit:
                raise InvariantError(f"{len(ends_s)} blocks have a lease, at most {limit} may")
        for key, end_s in self.ends_s.items():
            if not self._table.holds.get(key):
                raise InvariantError(f"{key.hex()} has a lease but no hold")
            if end_s < self.next_end_s:
                raise InvariantError(f"a lease ends at {end_s}, before {self.next_end_s}, the earliest")
        for key, end_s in self.client_ends_s.items():
            if self.ends_s.get(key, -NEVER_S) < end_s:
                raise InvariantError(f"a request's lease of {key.hex()} outlasts its hold")
        if dict(self._num_of_tenant) != dict(Counter(map(get_offload_tenant, self.client_ends_s))):
            raise InvariantError("the leases of tenants are not those of requests")

    def _hold(self, keys: Collection[OffloadKey], end_s: float) -> None:
        for key in keys:
            if key not in self.ends_s:
                self._table.hold(key)
            self.ends_s[key] = max(end_s, self.ends_s.get(key, end_s))
        if keys:
            self.next_end_s = min(self.next_end_s, end_s)

    def _forget_clients(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if self.client_ends_s.pop(key, None) is not None:
                tenant = get_offload_tenant(key)
                self._num_of_tenant[tenant] -= 1
                if not self._num_of_tenant[tenant]:
                    del self._num_of_tenant[tenant]

    def _note_refused(self, num: int, num_asked: int) -> None:
        if num and not self.num_refused:
            logger.warning(
                "pin_s: %d of the %d blocks of a request are not pinned: requests may pin %d of %d slots, and each "
                "tenant no more than its quota of host memory; kvtier_host_refused_pins counts further ones",
                num,
                num_asked,
                self.client_limit,
                self._table.num_blocks,
            )
        self.num_refused += num
