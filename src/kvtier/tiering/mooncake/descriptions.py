"""What namespaces a store has, in words: a few values of a fixed length under names that every client knows.

Clients cannot list a store, and a value that is there stays as it is. So an engine that has stored blocks looks at all
of these names, and puts its description under the first free one. A store without a free one is full: some minutes
later the engine removes one of them, and takes its place then. The store evicts descriptions as it does blocks; they
are put again after a while.
"""

import json
import re
import time
from collections.abc import Callable, Sequence

from kvtier.errors import TierError
from kvtier.tiering.kit.blobs import Put, PutKind
from kvtier.tiering.mooncake.client import MooncakeClient, ScatterLists
from kvtier.tiering.mooncake.errors import HELD, name_of
from kvtier.tiering.mooncake.memory import allocate

MAX_DESCRIPTIONS = 32
"""Names for descriptions. More are more reads of each engine that looks; fewer are full with fewer models."""

DESCRIPTION_BYTES = 2**14
"""Length of each, filled up with spaces: one call reads all of a known length. A namespace whose document is longer is
not described; those of large models have about 5 KiB."""

DESCRIBE_S = 600.0
"""Seconds after which an engine that stores looks whether its description is still there."""

MAX_TRIES = 4
"""Names that are tried: one may be taken by another engine that has just begun, or by what is no description. More try
for longer in a store that fails."""

DESCRIPTION_NAMES = tuple(f"kvtier/namespaces/{number:02x}" for number in range(MAX_DESCRIPTIONS))

_DESCRIPTION = re.compile(r"([0-9a-f]{32})\n(.*)", re.DOTALL)


class Descriptions:
    """The descriptions in a store. A look leases those that are there, for some seconds.

    Mutable are the descriptions of this process, each with the time of the next look for it, and whether the last try
    to put one found no free name. Two threads that look for one at once put it once: the second finds it.

    Args:
        client: the store.
        clock: seconds, monotonic.
    """

    def __init__(self, client: MooncakeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._own: dict[str, tuple[bytes, float]] = {}
        self._was_full = False

    def read_each(self) -> dict[str, tuple[str, str]]:
        """Return namespaces and documents that are there, by the names of the values.

        Raises:
            TierError: the master does not answer.
        """
        there = self._client.exist(list(DESCRIPTION_NAMES))
        return self._read(
            [name for name, answer in zip(DESCRIPTION_NAMES, there, strict=True) if answer == 1]
        )

    def put(self, namespace: str, document: str) -> Put:
        """Write a description unless it is there; what the master does not answer is an outcome, too.

        Only the first call for a namespace does: later ``keep`` sees to it. That of a reset has none, so that it takes
        no other's room.
        """
        if namespace in self._own or json.loads(document).get("epoch"):
            return Put(PutKind.EXISTED)
        text = f"{namespace}\n{document}".encode()
        if len(text) > DESCRIPTION_BYTES:
            return Put(PutKind.REFUSED, f"it is longer than {DESCRIPTION_BYTES} bytes")
        return self._look_after(namespace, text)

    def keep(self, namespace: str) -> None:
        """Write the description of a namespace that blocks are stored in again, where it is due and has gone."""
        text, due_s = self._own.get(namespace, (b"", 0.0))
        if text and due_s <= self._clock():
            self._look_after(namespace, text)

    def _look_after(self, namespace: str, text: bytes) -> Put:
        self._own[namespace] = text, self._clock() + DESCRIBE_S
        try:
            return self._put(namespace, text)
        except TierError as error:
            return Put(PutKind.FAILED, str(error))  # words for operators are not worth a failed store

    def _put(self, own_name: str, text: bytes) -> Put:
        if self._was_full:  # before any look at it, which would lease it
            self._client.remove([DESCRIPTION_NAMES[int(own_name[:8], 16) % MAX_DESCRIPTIONS]])
            self._was_full = False
        found = self.read_each()
        if any(namespace == own_name for namespace, _ in found.values()):
            return Put(PutKind.EXISTED)
        free = [name for name in DESCRIPTION_NAMES if name not in found]
        for name in free[:MAX_TRIES]:
            memory = allocate(DESCRIPTION_BYTES)
            memory[:] = text.ljust(DESCRIPTION_BYTES)
            (answer,) = self._client.put([name], ScatterLists.over(memory, [DESCRIPTION_BYTES]))
            if answer not in HELD:
                return Put(PutKind.NO_ROOM, name_of(answer))
            if self._read([name]).get(name, ("", ""))[0] == own_name:
                return Put(PutKind.WRITTEN)
        self._was_full = not free[MAX_TRIES:]
        return Put(PutKind.NO_ROOM, "other namespaces have all names for descriptions")

    def _read(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        if not names:
            return {}
        memory = allocate(len(names) * DESCRIPTION_BYTES)
        answers = self._client.get(list(names), ScatterLists.over(memory, [DESCRIPTION_BYTES] * len(names)))
        found: dict[str, tuple[str, str]] = {}
        for number, (name, answer) in enumerate(zip(names, answers, strict=True)):
            value = bytes(memory[number * DESCRIPTION_BYTES : (number + 1) * DESCRIPTION_BYTES])
            match = _DESCRIPTION.fullmatch(value.decode("utf-8", "replace"))
            if answer == DESCRIPTION_BYTES and match is not None:
                found[name] = match[1], match[2].rstrip(" ")
        return found
