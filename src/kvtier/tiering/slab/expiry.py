"""When blocks of a slab are over: the time of each one's store, beside it in the header page and in memory.

The slot table drops a block that is over when it is looked up, and the oldest of them when a store needs slots. Its
bytes stay in the slot until that is written again, but no later start finds them. Without a lifetime nothing of this is
called, and the header page has no time. Where there is a lifetime, a block without a time is over.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from kvtier.base import OffloadKey
from kvtier.tiering.kit.envelope import Buffer
from kvtier.tiering.kit.lifetime import Lifetime

_TIME = struct.Struct("<QQ")
"""Milliseconds since 1970, and the same with every bit inverted: a damaged time is none."""

MASK = 2**64 - 1
NO_TIME = 0.0
"""The time of a block that has none."""


def pack_time(page: memoryview, offset: int, stored_s: float) -> None:
    """Write the time of a store into a header page."""
    time_ms = max(0, int(stored_s * 1000))
    _TIME.pack_into(page, offset, time_ms, time_ms ^ MASK)


def unpack_time(page: Buffer, offset: int) -> float:
    """Return the time in a header page, seconds since 1970; NO_TIME where there is none. Pure."""
    time_ms, inverted = _TIME.unpack_from(page, offset)
    return time_ms / 1000 if time_ms ^ MASK == inverted else NO_TIME


class SlotExpiry:
    """The times of the stores of the present epoch's blocks. The slot table's lock guards it.

    Args:
        lifetime: how long blocks live.
        wall_clock: seconds since 1970.
    """

    def __init__(self, lifetime: Lifetime, wall_clock: Callable[[], float]) -> None:
        self._lifetime = lifetime
        self._wall_clock = wall_clock
        self._stored_s: OrderedDict[OffloadKey, float] = OrderedDict()

    def now_s(self) -> float:
        """Return the wall clock's reading. Thread: any."""
        return self._wall_clock()

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
