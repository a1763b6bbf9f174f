"""One namespace of the tier: its identity, its names, and what is known of blocks that share an object."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.obj import layout
from kvtier.tiering.obj.pointer import Location

MAX_LOCATIONS = 65_536
"""Pointers remembered, about 300 bytes each; as many as verdicts are. One that is forgotten is read again."""


class Space:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Mutable are the locations and whether somebody has begun to write the description. ``_lock`` guards both.

    Args:
        namespace: the identity of its blocks.
        path: what its objects' names begin with.
    """

    def __init__(self, namespace: Namespace, path: str) -> None:
        self.namespace = namespace
        self.path = path
        self._lock = threading.Lock()
        self._is_described = False
        self._locations: OrderedDict[OffloadKey, Location] = OrderedDict()

    @property
    def document_path(self) -> str:
        """Name of the readable description."""
        return f"{self.path}/{layout.NAMESPACE_DOCUMENT_NAME}"

    def block_path(self, key: OffloadKey) -> str:
        """Return the name of the block of ``key``, or of the pointer to it."""
        return layout.block_path(self.path, key)

    def group_path(self, group_id: bytes) -> str:
        """Return the name of an object of several blocks."""
        return layout.group_path(self.path, group_id)

    def begin_description(self) -> bool:
        """Return whether the caller is the one to write the readable description; True once.

        Servers are slow when many create one object at once, and blocks need not wait for it.
        """
        with self._lock:
            is_first, self._is_described = not self._is_described, True
            return is_first

    def drop_description(self) -> None:
        """Leave the description to the next one, as it could not be written."""
        with self._lock:
            self._is_described = False

    def location(self, key: OffloadKey) -> Location | None:
        """Return where the block of ``key`` is known to share an object."""
        with self._lock:
            return self._locations.get(key)

    def note_locations(self, locations: Iterable[tuple[OffloadKey, Location]]) -> None:
        """Remember where blocks are; the oldest are forgotten first."""
        with self._lock:
            self._locations.update(locations)
            while len(self._locations) > MAX_LOCATIONS:
                self._locations.popitem(last=False)

    def forget_locations(self, keys: Iterable[OffloadKey]) -> None:
        """Forget where blocks were."""
        with self._lock:
            for key in keys:
                self._locations.pop(key, None)
