"""The values of a Mooncake store without an engine: what is there, whether it is whole, and its removal.

The names come from the master's page. What a namespace is in words stands in values that only a client can read: the
store is joined where there are any. A value that a reader has leased, for some seconds after each look, is not removed
before its lease ends.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.blobs import BlobKind, BlobPlace
from kvtier.tiering.kit.place import PlaceNamespace, PlaceSummary
from kvtier.tiering.mooncake.blobs import MooncakeBlobs
from kvtier.tiering.mooncake.native import TIER_TYPE
from kvtier.tiering.mooncake.settings import SCHEME, MooncakeSettings


class MooncakePlace(BlobPlace):
    """The values of a store.

    Args:
        blobs: the store; removals wait for the end of leases.
    """

    def __init__(self, blobs: MooncakeBlobs) -> None:
        super().__init__(TIER_TYPE, blobs)
        self._store = blobs

    def namespaces(self) -> list[PlaceNamespace]:
        names = (
            self._store.list_names()
        )  # without their lengths, which take a request for some hundred of them
        parsed = map(self._store.names.parse, names)
        found = {one.namespace for one in parsed if one is not None and one.kind is BlobKind.BLOCK}
        documents = self._store.read_documents(names)
        return [PlaceNamespace(name, documents.get(name, "")) for name in sorted(found)]

    def summary(self) -> PlaceSummary:
        return replace(super().summary(), capacity_bytes=self._store.read_capacity_bytes())

    def begin_removal(self) -> None:
        self._store.check()

    def end_removal(self, namespaces: Collection[str]) -> None:
        super().end_removal(namespaces)
        num_leased = self._store.num_deferred
        if num_leased:
            text = (
                f"{num_leased} blocks are in use by readers and stay, the others are removed: try again later"
            )
            raise TierError(TIER_TYPE, text)


def open_mooncake_place(own: Mapping[str, object]) -> MooncakePlace:
    """Return the place of a tier's own settings; ``master`` may begin with ``mooncake://``.

    A URL alone is refused: a client listens on every interface, which ``allow_any_interface`` has to allow.

    Raises:
        ConfigError: a setting that cannot work.
        TierError: the master's page does not answer.
    """
    master = own.get("master")
    if isinstance(master, str):
        own = {**own, "master": master.removeprefix(SCHEME).rstrip("/")}
    blobs = MooncakeBlobs(parse_settings(MooncakeSettings, own, f"tier {TIER_TYPE!r}"), waits_for_leases=True)
    blobs.list_names()  # the page answers
    return MooncakePlace(blobs)
