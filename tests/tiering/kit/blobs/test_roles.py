"""The roles of a tier over named bytes, on a dictionary that lists more than it is asked for."""

import time
from collections.abc import Sequence
from typing import ClassVar

import pytest
from tests.tiering.kit.blobs.shelf import Shelf, ShelfTier
from tests.tiering.roles.bench import RawBackend
from tests.tiering.roles.every_role import EveryRole

from kvtier.tiering.kit.blobs import Blob, Put


class TimedShelf(Shelf):
    """Knows the time, and which namespaces it has; its listing of one is that of all."""

    def put_new(self, blobs: Sequence[Blob], end_s: float | None) -> list[Put]:
        self.now_s = time.time()
        return super().put_new(blobs, end_s)

    def list_namespaces(self) -> list[str]:
        parsed = map(self.names.parse, list(self.values))
        return sorted({one.namespace for one in parsed if one is not None})


class Values(RawBackend):
    """The values of a shelf.

    Args:
        shelf: the shelf.
    """

    def __init__(self, shelf: TimedShelf) -> None:
        self._shelf = shelf

    def name_of(self, namespace: str, name: bytes) -> str:
        return self._shelf.names.block(namespace, name)

    def document_name(self, namespace: str) -> str:
        return self._shelf.names.document(namespace)

    def strange_names(self, namespace: str) -> list[str]:
        return ["notes.txt", f"{namespace}/notes.txt", f"{namespace}/ab/cdef.kv", f"{namespace}x/ab/abcd.kv"]

    def names(self) -> list[str]:
        return list(self._shelf.values)

    def read(self, name: str) -> bytes | None:
        return self._shelf.values.get(name, (None, 0.0))[0]

    def write(self, name: str, value: bytes) -> None:
        self._shelf.values[name] = value, time.time()

    def remove(self, name: str) -> None:
        del self._shelf.values[name]

    def add_age(self, name: str, seconds: float) -> None:
        value, written_s = self._shelf.values[name]
        self._shelf.values[name] = value, written_s - seconds


class TestShelf(EveryRole):
    """Values of this process."""

    tier_class = ShelfTier
    lacks: ClassVar = {
        "evictions": "what is beyond a quota is removed by whichever engine lists it, and named by none",
        "counts": "it does not count its blocks",
    }

    @pytest.fixture(autouse=True)
    def _use_shelf(self) -> None:
        self.shelf = ShelfTier.shelf = TimedShelf()

    def own_settings(self) -> dict[str, object]:
        return {"num_threads": 2}

    def get_backend(self) -> Values:
        return Values(self.shelf)
