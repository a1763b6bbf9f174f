"""What a router believes that this engine can load from one secondary tier, and the events that keep that true.

A router sends a request to the engine that already has its blocks. It knows only events, so each block is announced
when the tier has it and withdrawn as soon as the engine knows that it cannot be loaded: evicted, missed by a lookup or
a load, behind an open breaker, of an older epoch. Where this module is in doubt it withdraws: a router that knows too
little costs a hit, one that believes too much sends requests to the wrong engine.

States of a block: unknown -> announced, by a store or a load that succeeded -> unknown. While the tier is hidden the
announced blocks are withdrawn and remembered, and announced again when the tier can be used again.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvtier.base import OffloadingEvent, OffloadKey
from kvtier.cpu.common import EventLog
from kvtier.tiering.base import SecondaryTierManager

MAX_ANNOUNCED_KEYS = 262_144
"""Blocks of one tier that routers know, about 150 bytes each, 40 MB. Beyond it the block announced first is withdrawn:
fewer hide what a large tier holds; more cost memory and make the withdrawal of a whole tier a larger message."""

MAX_UNKNOWN_KEYS = 65_536
"""Withdrawals of blocks that were never announced by this process, between two times that events are taken. They are
of use only to a router that remembers an earlier process; zero leaves such a router with blocks that are gone."""


class Announcements:
    """The blocks of one tier that a router knows.

    Args:
        log: receives the events.
        max_keys: blocks that a router knows at most.
    """

    def __init__(self, log: EventLog, *, max_keys: int = MAX_ANNOUNCED_KEYS) -> None:
        self._log = log
        self._max_keys = max_keys
        self._held: OrderedDict[OffloadKey, None] = OrderedDict()
        self._open: Counter[OffloadKey] = Counter()
        self._spoiled: set[OffloadKey] = set()
        self._missed: set[OffloadKey] = set()
        self._num_unknown = 0
        self._is_hidden = False

    def begin_job(self, keys: Collection[OffloadKey]) -> None:
        """Record that a store or load of ``keys`` is about to be submitted."""
        self._open.update(keys)

    def end_job(self, keys: Sequence[OffloadKey], arrived: Collection[OffloadKey], *, is_load: bool) -> None:
        """Record what a job has shown: what arrived is in the tier, and what a load did not bring is not.

        A block that was evicted while the job was open may have left after it was moved: it is not announced.
        """
        self._announce(key for key in keys if key in arrived and key not in self._spoiled)
        if is_load:
            self._withdraw([key for key in keys if key not in arrived])
        self._open.subtract(keys)
        for key in keys:
            if self._open[key] <= 0:
                del self._open[key]
                self._spoiled.discard(key)

    def on_evicted(self, keys: Collection[OffloadKey] | None) -> None:
        """Record what the tier has evicted; None: some blocks, and it does not know which."""
        if keys is None:
            self._spoiled.update(self._open)
            self._withdraw(list(self._held))
            return
        self._spoiled.update(key for key in keys if key in self._open)
        self._withdraw([key for key in keys if key not in self._missed])

    def on_missed(self, key: OffloadKey) -> None:
        """Record that a lookup has not found a block."""
        if key in self._held:
            self._withdraw((key,))
            self._missed.add(key)  # the tier may name it, too, when it is next asked what it has evicted

    def hide(self, *, forgets: bool) -> None:
        """Withdraw everything while the tier cannot be used.

        Args:
            forgets: whether the blocks may be gone when the tier is back, so that it has to show each anew.
        """
        if not self._is_hidden:
            self._is_hidden = True
            self._log.record(list(self._held), removed=True)
        if forgets:
            self._held.clear()

    def show(self) -> None:
        """Announce again what was hidden."""
        if self._is_hidden:
            self._is_hidden = False
            self._log.record(list(self._held), removed=False)

    def clear(self) -> None:
        """Withdraw everything and forget the open jobs, of which no end will be recorded."""
        self._withdraw(list(self._held))
        self._open.clear()
        self._spoiled.clear()

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, oldest first, and drop them."""
        self._num_unknown = 0
        self._missed.clear()
        return self._log.take()

    def __contains__(self, key: object) -> bool:
        return not self._is_hidden and key in self._held

    def _announce(self, keys: Iterable[OffloadKey]) -> None:
        new = [key for key in keys if key not in self._held]
        self._held.update(dict.fromkeys(new))
        if not self._is_hidden:
            self._log.record(new, removed=False)
        num_beyond = len(self._held) - self._max_keys
        if num_beyond > 0:
            self._withdraw([key for key, _ in zip(self._held, range(num_beyond), strict=False)])

    def _withdraw(self, keys: Collection[OffloadKey]) -> None:
        """Withdraw ``keys``; those that a router cannot know from this process as long as there are few."""
        num_unknown = sum(key not in self._held for key in keys)
        named = list(keys)
        if self._is_hidden:
            named = []
        elif num_unknown:
            if self._num_unknown + num_unknown > MAX_UNKNOWN_KEYS:
                named = [key for key in keys if key in self._held]
            else:
                self._num_unknown += num_unknown
        for key in keys:
            self._held.pop(key, None)
        self._log.record(named, removed=True)


def make_event_names(tiers: Sequence[SecondaryTierManager]) -> list[str]:
    """Return what events call each tier: its type, with its position where an earlier one has the same type. Pure."""
    names: list[str] = []
    for position, tier in enumerate(tiers):
        name = tier.get_tier_type()
        names.append(f"{name}.{position}" if name in names else name)
    return names
