"""When own blocks are over: the time of each one's store, which its record in the journal has too.

The slot table drops a block that is over when it is looked up, and the oldest of them when a store needs slots. Where
there is a lifetime, a block without a time is over; without one nothing of this is called.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from kvtier.base import OffloadKey
from kvtier.tiering.kit.lifetime import Lifetime


class SlotExpiry:
    """The times of the stores of own blocks. The slot table's lock guards it.

    Args:
        lifetime: how long blocks live.
        wall_clock: seconds since 1970.
    """

    def __init__(self, lifetime: Lifetime, wall_clock: Callable[[], float]) -> None:
        self._lifetime = lifetime
        self._wall_clock = wall_clock
        self._stored_s: OrderedDict[OffloadKey, float] = OrderedDict()

    def record(self, key: OffloadKey, stored_s: float) -> None:
        """Note when a block was stored."""
        self._stored_s[key] = stored_s
        self._stored_s.move_to_end(key)

    def forget(self, key: OffloadKey) -> None:
        """Forget a block that is gone."""
        self._stored_s.pop(key, None)

    def clear(self) -> None:
        """Forget every block."""
        self._stored_s.clear()

    def is_over(self, key: OffloadKey) -> bool:
        """Return whether a block that is held is over; one that is being written has no time yet and is not."""
        stored_s = self._stored_s.get(key)
        return stored_s is not None and self.is_time_over(stored_s)

    def is_time_over(self, stored_s: float) -> bool:
        """Return whether a block stored then is over. Thread: any."""
        return self._lifetime.is_over(stored_s, self._wall_clock())

    def list_oldest_over(self) -> list[OffloadKey]:
        """Return the blocks that were stored first, as far as they are over; others are found by their lookups."""
        now_s = self._wall_clock()
        is_over = self._lifetime.is_over
        return [key for key, _ in takewhile(lambda item: is_over(item[1], now_s), self._stored_s.items())]
