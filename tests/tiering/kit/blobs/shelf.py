"""A backend of named bytes that is a dictionary, and a tier on it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf

from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.blobs import (
    Blob,
    Blobs,
    BlobSettings,
    BlobTier,
    FolderNames,
    Got,
    GotKind,
    Listed,
    Put,
    PutKind,
    Size,
    Target,
)

NOW_S = 1_800_000_000.0


class Shelf(Blobs):
    """Values in a dictionary, with outcomes that a test sets by name."""

    def __init__(self) -> None:
        self.names = FolderNames()
        self.where = "the shelf"
        self.values: dict[str, tuple[bytes, float]] = {}
        self.puts: dict[str, Put] = {}
        self.gots: dict[str, Got] = {}
        self.sent: list[str] = []
        self.is_away = False
        self.cannot_remove = False
        self.cannot_read = False
        self.namespaces: list[str] = []
        self.now_s = NOW_S

    def name_of(self, number: int) -> str:
        """Return the name of a block, of whatever namespace has it or is spoken of."""
        suffix = f"/{key_of(number).hex()}.kv"
        return next(name for name in self.values if name.endswith(suffix))

    def put_new(self, blobs: Sequence[Blob], end_s: float | None) -> list[Put]:
        self._require_here()
        return [self._put(blob) for blob in blobs]

    def get_into(self, targets: Sequence[Target], end_s: float | None) -> list[Got]:
        self._require_here()
        return [self._get(target) for target in targets]

    def sizes(self, names: Sequence[str], *, is_lookup: bool) -> dict[str, Size]:
        self._require_here()
        found = {name: self.values[name] for name in names if name in self.values}
        return {name: Size(len(value), written_s) for name, (value, written_s) in found.items()}

    def read_each(self, names: Sequence[str], max_bytes: int, start: int = 0) -> dict[str, memoryview]:
        there = () if self.cannot_read else [name for name in names if name in self.values]
        return {name: memoryview(self.values[name][0])[start : start + max_bytes] for name in there}

    def remove(
        self, names: Sequence[str], unless_used_since: Mapping[str, float] | None = None
    ) -> Collection[str]:
        if self.cannot_remove:
            raise TierError("shelf", "nothing can be removed now")
        since = unless_used_since or {}
        old = [one for one in names if one in self.values and self.values[one][1] <= since.get(one, inf)]
        return [name for name in old if self.values.pop(name, None) is not None]

    def list_all(self, namespace: str | None = None) -> Iterator[Listed]:
        for name, (value, written_s) in list(self.values.items()):
            yield Listed(written_s, name, len(value))

    def list_namespaces(self) -> Sequence[str]:
        return self.namespaces

    def check(self) -> None:
        self._require_here()

    def _put(self, blob: Blob) -> Put:
        self.sent.append(blob.name)
        outcome = next((put for end, put in self.puts.items() if blob.name.endswith(end)), None)
        if outcome is not None:
            return outcome
        if blob.name in self.values:
            return Put(PutKind.EXISTED)
        self.values[blob.name] = b"".join(blob.parts), self.now_s
        return Put(PutKind.WRITTEN)

    def _get(self, target: Target) -> Got:
        outcome = next((got for end, got in self.gots.items() if target.name.endswith(end)), None)
        if outcome is not None:
            return outcome
        if target.name not in self.values:
            return Got(GotKind.ABSENT)
        value, written_s = self.values[target.name]
        target.take(memoryview(value))
        return Got(GotKind.READ, len(value), written_s)

    def _require_here(self) -> None:
        if self.is_away:
            raise TierError("shelf", "nobody answers")


class ShelfTier(BlobTier):
    """A tier on the shelf of the test."""

    own_settings = BlobSettings
    place_setting = "num_threads"
    shelf: Shelf

    @staticmethod
    def get_tier_type() -> str:
        return "shelf"

    @classmethod
    def open_blobs(cls, own: Mapping[str, object], clock: Callable[[], float], rows: Rows | None) -> Shelf:
        del clock, rows
        cls.shelf.settings = parse_settings(BlobSettings, own)
        return cls.shelf
