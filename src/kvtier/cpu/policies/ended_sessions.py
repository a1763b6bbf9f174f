"""Which held blocks only ended sessions have used: they leave before all others, as long as that pays.

A client says with a session's last request that it ends (``continues`` false), or with any that its blocks matter less
than others (``priority`` -1). When that request has finished, those of its blocks that only its session has named
leave next, tails first; what others share stays where it is. Whose hints are believed at all is up to ``hint_trust``.

That a hint is mostly right does not make it worth following. The block that stays in place of another is one from the
old end of the queue, and where the cache is large few of those come back: then even one wrong hint in five costs more
hits than the others bring. So both are counted, in a sample of the blocks: how many that were said to have ended come
back within a turn of the cache, and how many that were evicted from the old end. While the first come back as often,
ends are only counted and move nothing, as before the first turn. A low priority is no forecast and is always followed.
Nothing is kept while no client sends hints.
"""

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable
from enum import Enum
from zlib import crc32

from kvtier.base import OffloadKey
from kvtier.cpu.policies.hint_trust import HintTrust
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.hints.values import NO_HINTS

OWNERS_PER_BLOCK = 2
"""Owners that are remembered for each block of capacity, before those of evicted blocks are dropped."""

SAMPLE_MASK = 7
"""One block in eight is counted. More cost memory and time; fewer make small caches wait for a verdict."""

TURN_SHARE = 0.5
"""Evictions within which a block must come back to count, as a share of the capacity. Longer judges later; shorter
sees only those that come back at once, which are mostly wrong hints."""

MAX_COUNTED = 4096.0
"""Verdicts that count; when there are more, old ones fade."""

LEAST_COUNTED = 32.0
"""Verdicts of each kind before hints move anything."""


class Kind(Enum):
    """Why a block is watched."""

    ENDED = "ended"
    OLDEST = "oldest"


class Returns:
    """How many of the watched blocks came back; old verdicts fade.

    Attributes:
        num: blocks whose time is over.
        num_returned: those of them that came back in it.
    """

    __slots__ = ("num", "num_returned")

    def __init__(self) -> None:
        self.num = self.num_returned = 0.0

    def add(self, *, has_returned: bool) -> None:
        """Count a block whose time is over."""
        if self.num >= MAX_COUNTED:
            self.num /= 2
            self.num_returned /= 2
        self.num += 1
        self.num_returned += has_returned


class ReturnWatch:
    """Watches a sample of blocks for one turn of the cache each.

    Args:
        capacity: blocks of the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._turn = max(1, round(TURN_SHARE * capacity))
        self._num_evicted = 0
        # Of each watched block, oldest first: the number of evictions at its begin, why, and whether it came back.
        self._watched: OrderedDict[OffloadKey, tuple[int, Kind, bool]] = OrderedDict()
        self._returns = {kind: Returns() for kind in Kind}

    @property
    def favours_ended(self) -> bool:
        """Whether blocks that were said to have ended come back less often than the oldest ones."""
        ended, oldest = self._returns[Kind.ENDED], self._returns[Kind.OLDEST]
        if min(ended.num, oldest.num) < LEAST_COUNTED:
            return False
        return ended.num_returned / ended.num < oldest.num_returned / oldest.num

    def on_ended(self, keys: Iterable[OffloadKey]) -> None:
        """Watch blocks that were said to have ended."""
        for key in keys:
            if not crc32(key) & SAMPLE_MASK:
                self._watched.pop(key, None)
                self._watched[key] = self._num_evicted, Kind.ENDED, False

    def on_evicted(self, keys: Collection[OffloadKey]) -> None:
        """Watch blocks that were evicted because they were the oldest, and judge those whose time is over."""
        self._num_evicted += len(keys)
        watched = self._watched
        for key in keys:
            if not crc32(key) & SAMPLE_MASK and key not in watched:
                watched[key] = self._num_evicted, Kind.OLDEST, False
        first = self._num_evicted - self._turn
        while watched:
            began, kind, has_returned = next(iter(watched.values()))
            if began > first:
                return
            watched.popitem(last=False)
            self._returns[kind].add(has_returned=has_returned)

    def on_named(self, keys: Iterable[OffloadKey]) -> None:
        """Note that a request has named blocks."""
        watched = self._watched
        for key in keys:
            if key in watched:
                began, kind, _ = watched[key]
                watched[key] = began, kind, True

    def __len__(self) -> int:
        return len(self._watched)


class EndedSessions:
    """Remembers which session named each block first, until another does.

    Args:
        held: the blocks that are held; its ``in`` is evaluated for each block of a request with hints.
        capacity: how many there can be.

    Attributes:
        watch: counts which blocks come back; None until a client has sent hints.
    """

    def __init__(self, held: Container[OffloadKey], capacity: int) -> None:
        self._held = held
        self._capacity = capacity
        self._max_owners = OWNERS_PER_BLOCK * capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.watch: ReturnWatch | None = None
        self._trust = HintTrust()
        self._owners: dict[OffloadKey, str] = {}
        # Of each running request whose blocks may leave first: its session, its blocks, head first, and whether that
        # is what the client asks for (a low priority) and no forecast.
        self._ending: dict[str, tuple[str, list[OffloadKey], bool]] = {}

    def note(self, request: ArrivedRequest) -> None:
        """Learn who names the blocks of a request that arrives."""
        if request.hints is NO_HINTS and not self._owners:
            return
        if self.watch is None:
            self.watch = ReturnWatch(self._capacity)
        hints = self._trust.hear(request.hints, request.arrival_s)
        name = f"{hints.tenant or ''}/{hints.session}" if hints.session is not None else f"#{request.req_id}"
        keys = [key for chain in request.chains for key in chain]
        self.watch.on_named(keys)
        self._set_owners(keys, name, may_own=hints is not NO_HINTS)
        if hints.is_ended or hints.priority < 0:
            self._ending[request.req_id] = (name, keys, hints.priority < 0)

    def finish(self, req_id: str) -> Collection[OffloadKey]:
        """Return the blocks that leave next now that a request has finished, head first."""
        name, keys, is_demand = self._ending.pop(req_id, ("", [], False))
        if self.watch is None or not keys:
            return ()
        ended = [key for key in keys if self._owners.get(key) == name and key in self._held]
        if is_demand:
            return ended
        self.watch.on_ended(ended)
        return ended if self.watch.favours_ended else ()

    def _set_owners(self, keys: Collection[OffloadKey], name: str, *, may_own: bool) -> None:
        """Make a session the owner of the blocks that are new, and those of others ownerless."""
        owners = self._owners
        for key in keys:
            owner = owners.get(key)
            if owner is None:
                if may_own and key not in self._held:
                    owners[key] = name
            elif owner != name:
                del owners[key]
        if len(owners) > self._max_owners:
            self._owners = {key: owner for key, owner in owners.items() if key in self._held}
