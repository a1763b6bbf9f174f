"""Which held blocks only ended sessions have used: they leave before all others.

A client says with a session's last request that it ends (``continues`` false), or with any that its blocks matter less
than others (``priority`` -1). When that request has finished, those of its blocks that only its session has named
leave next, tails first; what others share stays where it is. Clients are believed as far as they were right before
(``hint_trust``). Nothing is kept while no client sends hints.
"""

from collections.abc import Collection, Container

from kvtier.base import OffloadKey
from kvtier.cpu.policies.hint_trust import HintTrust
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.hints.values import NO_HINTS

OWNERS_PER_BLOCK = 2
"""Owners that are remembered for each block of capacity, before those of evicted blocks are dropped."""


class EndedSessions:
    """Remembers which session named each block first, until another does.

    Args:
        held: the blocks that are held; its ``in`` is evaluated for each block of a request with hints.
        capacity: how many there can be.
    """

    def __init__(self, held: Container[OffloadKey], capacity: int) -> None:
        self._held = held
        self._max_owners = OWNERS_PER_BLOCK * capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._trust = HintTrust()
        self._owners: dict[OffloadKey, str] = {}
        # Of each running request that is the last of its session: the session, and its blocks, head first.
        self._ending: dict[str, tuple[str, list[OffloadKey]]] = {}

    def note(self, request: ArrivedRequest) -> None:
        """Learn who names the blocks of a request that arrives."""
        if request.hints is NO_HINTS and not self._owners:
            return
        hints = self._trust.hear(request.hints, request.arrival_s)
        name = f"{hints.tenant or ''}/{hints.session}" if hints.session is not None else f"#{request.req_id}"
        keys = [key for chain in request.chains for key in chain]
        self._set_owners(keys, name, may_own=hints is not NO_HINTS)
        if hints.is_ended or hints.priority < 0:
            self._ending[request.req_id] = (name, keys)

    def finish(self, req_id: str) -> Collection[OffloadKey]:
        """Return the blocks that leave next now that a request has finished, head first."""
        name, keys = self._ending.pop(req_id, ("", []))
        return [key for key in keys if self._owners.get(key) == name and key in self._held]

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
