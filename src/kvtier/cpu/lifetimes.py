"""When blocks in host memory end, whatever their use: their time to live counts from the end of their store.

Blocks are kept in the order of their stores, which is that of their ends: a look at the oldest tells whether any is
over. A block that is pinned when its time ends is not found any more, and stays until its transfers have ended; a lease
ends with the block.

The clock is monotonic, so no change of the wall clock makes a block older or younger.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

from kvtier.base import OffloadKey
from kvtier.cpu.block_table import BlockListener
from kvtier.cpu.policies.base import BlockStatus
from kvtier.errors import InvariantError


class BlockLifetimes(BlockListener):
    """The time of each block's store, the oldest first.

    Args:
        ttl_s: seconds that a block lives; None: no block ends, and none is listed here.
        clock: seconds, monotonic.

    Attributes:
        is_limited: whether blocks end; otherwise nothing has to be reported here.
        stored_s: the clock's reading at the end of each held block's store.
    """

    def __init__(self, ttl_s: float | None, clock: Callable[[], float]) -> None:
        self.is_limited = ttl_s is not None
        self._ttl_s = ttl_s or 0.0
        self._clock = clock
        self.stored_s: OrderedDict[OffloadKey, float] = OrderedDict()

    def on_ready(self, keys: Collection[OffloadKey]) -> None:
        now_s = self._clock()
        for key in keys:
            self.stored_s[key] = now_s

    def on_gone(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            self.stored_s.pop(key, None)

    def on_cleared(self) -> None:
        self.stored_s.clear()

    def is_over(self, key: OffloadKey) -> bool:
        """Return whether a block is ready and its time is over."""
        stored_s = self.stored_s.get(key)
        return stored_s is not None and stored_s <= self._clock() - self._ttl_s

    def list_expired(self) -> list[OffloadKey]:
        """Return the blocks whose time is over, oldest first. Visits those that are over and one more."""
        expired: list[OffloadKey] = []
        if not self.stored_s:
            return expired
        limit_s = self._clock() - self._ttl_s
        for key, stored_s in self.stored_s.items():
            if stored_s > limit_s:
                break
            expired.append(key)
        return expired

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        ready = {key for key, block in held.items() if block.is_ready}
        if self.stored_s.keys() != ready:
            raise InvariantError(
                f"{len(self.stored_s)} blocks have a time of their store, {len(ready)} are ready"
            )
