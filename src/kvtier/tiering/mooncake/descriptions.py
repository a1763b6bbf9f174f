"""What namespaces a store has, in words: a few values of a fixed length under names that every client knows.

Clients cannot list a store, and a value that is there stays as it is. So an engine that has stored blocks looks at all
of these names, and puts its description under the first free one. A store without a free one is full: some minutes
later the engine removes one of them, and takes its place then. The store evicts descriptions as it does blocks; they
are put again after a while.
"""

import mmap
import re
import threading
from collections.abc import Callable, Collection, Sequence

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.kit.siblings import Sibling, SiblingPlace, log_siblings
from kvtier.tiering.mooncake.client import MooncakeClient, ScatterLists
from kvtier.tiering.mooncake.errors import HELD
from kvtier.tiering.mooncake.headers import address_of
from kvtier.tiering.mooncake.native import TIER_TYPE

MAX_DESCRIPTIONS = 32
"""Names for descriptions. More are more reads of each engine that looks; fewer are full with fewer models."""

DESCRIPTION_BYTES = 2**14
"""Length of each, filled up with spaces: the client reads values of a known length only. A namespace whose document is
longer is not described; those of large models have about 5 KiB."""

DESCRIBE_S = 600.0
"""Seconds after which an engine that stores looks whether its description is still there."""

MAX_TRIES = 4
"""Names that are tried: one may be taken by another engine that has just begun, or by what is no description. More try
for longer in a store that fails."""

FIRST_PAUSE_S = 1.0
"""The first pause after a look that found nothing. A look costs a round trip to the master."""

DESCRIPTION_NAMES = tuple(f"kvtier/namespaces/{number:02x}" for number in range(MAX_DESCRIPTIONS))

_DESCRIPTION = re.compile(r"([0-9a-f]{32})\n(.*)", re.DOTALL)


class DescriptionBuffer:
    """Memory that descriptions are read into and written from, registered with the client; used by one thread."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, DESCRIPTION_BYTES))
        self._lists = ScatterLists([[address_of(self.memory)]], [[DESCRIPTION_BYTES]])

    def read(self, client: MooncakeClient, name: str) -> tuple[str, str] | None:
        """Return namespace and document of one description; None where there is none. Raises as ``exist``."""
        self.memory[:] = bytes(DESCRIPTION_BYTES)
        if client.get([name], self._lists) != [DESCRIPTION_BYTES]:
            return None
        found = _DESCRIPTION.fullmatch(bytes(self.memory).decode("utf-8", "replace"))
        return (found[1], found[2].rstrip(" ")) if found else None

    def read_each(self, client: MooncakeClient) -> dict[str, tuple[str, str]]:
        """Return the descriptions that are there, by the names of the values. Raises as ``exist``."""
        there = client.exist(list(DESCRIPTION_NAMES))
        names = [name for name, answer in zip(DESCRIPTION_NAMES, there, strict=True) if answer == 1]
        return {name: found for name in names if (found := self.read(client, name)) is not None}

    def put(self, client: MooncakeClient, name: str, text: bytes) -> bool:
        """Write a description; one that is there stays as it is. False: there is no room. Raises as ``exist``."""
        self.memory[:] = text.ljust(DESCRIPTION_BYTES)
        return client.put([name], self._lists)[0] in HELD


class Describer:
    """Keeps the description of the own namespace in the store.

    Mutable are the time of the next look, which ``_lock`` guards, and whether the last one found no free name, which
    the thread that looks uses.

    Args:
        buffer: registered with the client, and used for nothing else.
        client: the store.
        clock: seconds, monotonic.
    """

    def __init__(self, buffer: DescriptionBuffer, client: MooncakeClient, clock: Callable[[], float]) -> None:
        self._buffer = buffer
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = float("-inf")
        self._was_full = False

    def describe(self, identity: Namespace) -> None:
        """See to it, at most every ten minutes, that the namespace is described. Thread: any; blocks for some calls."""
        if self._clock() < self._next_s:  # read without the lock: the usual case
            return
        with self._lock:
            if self._clock() < self._next_s:
                return
            self._next_s = self._clock() + DESCRIBE_S
        text = f"{identity.name}\n{identity.document}".encode()
        if len(text) > DESCRIPTION_BYTES:
            return
        try:
            self._was_full = not self._put(identity.name, text)
        except TierError:
            return  # words for operators are not worth a failed store

    def _put(self, own_name: str, text: bytes) -> bool:
        """Return whether there was a free name, or need for none."""
        if self._was_full:  # before any look at it, which would lease it
            self._client.remove([DESCRIPTION_NAMES[int(own_name[:8], 16) % MAX_DESCRIPTIONS]])
        found = self._buffer.read_each(self._client)
        if any(namespace == own_name for namespace, _ in found.values()):
            return True
        free = [name for name in DESCRIPTION_NAMES if name not in found]
        for name in free[:MAX_TRIES]:
            if not self._buffer.put(self._client, name, text):
                return True  # the store has no room
            there = self._buffer.read(self._client, name)
            if there is not None and there[0] == own_name:
                return True
        return bool(free[MAX_TRIES:])


class MooncakeSiblings(SiblingPlace):
    """Namespaces beside the own one in a store. A look leases the blocks that it finds, for some seconds.

    Args:
        buffer: registered with the client.
        client: the store.
    """

    fate = "are dropped as the store needs room"

    def __init__(self, buffer: DescriptionBuffer, client: MooncakeClient) -> None:
        self._buffer = buffer
        self._client = client
        self._is_described = False
        self._own_name = ""

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        del max_namespaces  # those that differ least are chosen among more
        found = dict(self._buffer.read_each(self._client).values())
        self._own_name, self._is_described = own_name, own_name in found
        return [(name, document) for name, document in found.items() if name != own_name]

    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        held = {name for name, _ in self._held([(name, key) for name in names for key in keys])}
        return next((name for name in names if name in held), None)

    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        return [key for _, key in self._held([(name, key) for key in keys])]

    def note_siblings(self, siblings: Sequence[Sibling]) -> None:
        # A namespace that has stored blocks is described. Clients cannot count what another one has.
        if not self._is_described:
            log_siblings(TIER_TYPE, self._own_name, siblings[0], "an unknown number of")

    def _held(self, asked: Sequence[tuple[str, OffloadKey]]) -> list[tuple[str, OffloadKey]]:
        answers = self._client.exist([f"{name}/{key.hex()}" for name, key in asked]) if asked else []
        return [one for one, answer in zip(asked, answers, strict=True) if answer == 1]
