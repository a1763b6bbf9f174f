"""Where the next slots come from.

In this order:

1. a new pack, while all packs of all namespaces together are below the smallest capacity of the directory's engines;
2. packs of this namespace that have no owner, which are adopted with their blocks;
3. a new pack in place of packs of other namespaces without an owner, those unused for longest first;
4. the process whose oldest block was used longest ago gives a pack, whatever its share: it is asked by the notes;
5. until then, or where that is this process, its own oldest blocks.

Equal shares would be wrong: when the load moves from one engine to another, half of the hits would be lost.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvtier.tiering.fs.catalog import PackCatalog
from kvtier.tiering.kit.health import OutageLog

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between two tries to get a pack in a full directory, each of which lists all packs. Longer lets an engine
that has just started wait for room; shorter lists more often."""

GIFT_AGE_RATIO = 1.6
GIFT_MARGIN_S = 2.0
"""A pack is given to a process only if one's own oldest block has not been used for so much longer than that process's
oldest. Less moves packs to and fro between engines that use their blocks alike, and each move loses the order of use of
some; more leaves room for longer with an engine that does not need it."""


class Want(NamedTuple):
    """A process lacks room.

    Attributes:
        namespace: name of the namespace that lacks room.
        since_s: when it was last tried for, seconds since 1970; each try is answered once.
        oldest_used_s: when its own oldest block was last used; None: it has none.
    """

    namespace: str
    since_s: float
    oldest_used_s: float | None


class Tail(NamedTuple):
    """The oldest block of a process: which process, and when the block was last used."""

    process: str
    oldest_used_s: float


def gives(own: Tail, others: Iterable[Tail], want: Want, now_s: float) -> bool:
    """Return whether this process is the one that gives a pack to whom ``want`` is of. Pure.

    Args:
        own: this process.
        others: the other living ones with blocks.
        want: what another process lacks.
        now_s: seconds since 1970.
    """
    is_oldest = all((own.oldest_used_s, own.process) <= (one.oldest_used_s, one.process) for one in others)
    if want.oldest_used_s is None or not is_oldest:
        return is_oldest
    age_s, wanted_age_s = now_s - own.oldest_used_s, max(0.0, now_s - want.oldest_used_s)
    return age_s > GIFT_AGE_RATIO * wanted_age_s + GIFT_MARGIN_S


class Room:
    """Makes packs where slots are missing. Thread: any.

    Mutable are the limit, the want and when a pack may be tried for again. ``_lock`` guards them, with I/O: other jobs
    that lack slots wait for the pack that is being made rather than evict.

    Args:
        catalog: the packs.
        capacity_bytes: the engine's own.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        catalog: PackCatalog,
        capacity_bytes: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._limit_bytes = self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._next_try_s = float("-inf")
        self._outage = OutageLog(f"tier {catalog.tier} at {catalog.directory.root}")
        self.want: Want | None = None

    def set_limit(self, others: Iterable[int]) -> None:
        """Take note of the capacities of the other engines: the smallest counts."""
        self._limit_bytes = min((self._capacity_bytes, *others))

    @property
    def is_full(self) -> bool:
        """Whether no pack is to be had now, as the last try has shown."""
        return self._clock() < self._next_try_s

    def try_again(self) -> None:
        """Look for a pack with the next store: the namespace is another, and the packs of the one before may go."""
        self._next_try_s = float("-inf")

    def make_room(self, num_blocks: int) -> None:
        """See to it that ``num_blocks`` can be stored without an eviction, as far as there is room."""
        table = self._catalog.table
        if not num_blocks or table.num_lacking(num_blocks) <= 0 or self._clock() < self._next_try_s:
            return
        with self._lock:
            while table.num_lacking(num_blocks) > 0 and self._clock() >= self._next_try_s:
                if not self._find_pack():
                    self._next_try_s = self._clock() + RETRY_S

    def _find_pack(self) -> bool:
        """Get a pack; False when there is none to be had now."""
        try:
            if self._catalog.create(self._limit_bytes, may_remove=False):
                self.want = None
            elif self._catalog.adopt_all():
                self.want = None
                return False  # its blocks can be evicted, so other packs stay
            elif self._catalog.create(self._limit_bytes, may_remove=True):
                self.want = None
            else:
                oldest = self._catalog.table.find_oldest()
                used_s = None if oldest is None else oldest[0]
                self.want = Want(self._catalog.namespace.name, self._wall_clock(), used_s)
                return False
        except OSError as error:
            if self._catalog.directory.root.is_dir():  # else the keeper says that the directory is gone
                self._outage.on_failure("room", f"no pack can be made: {error}")
            return False
        self._outage.on_success("room")
        return True
