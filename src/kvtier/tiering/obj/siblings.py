"""The other namespaces under the root of an object store, for the blocks that this engine misses.

A listing of one level finds them, however many objects there are. A block has the same name in every namespace, so
asking for the length of its object says whether it is there.
"""

from collections.abc import Collection, Sequence

from kvtier.base import OffloadKey
from kvtier.tiering.kit.siblings import SiblingPlace
from kvtier.tiering.obj.client import Client
from kvtier.tiering.obj.layout import NAMESPACE_DOCUMENT_NAME, block_path, namespace_path
from kvtier.tiering.obj.place import MAX_DOCUMENT_BYTES, NAMESPACE_CHARS

MAX_READ_DOCUMENTS = 32
"""Documents read in a listing, at once. A bucket has no cheap order by age, so those that differ least are chosen among
these; more are more requests, fewer miss the one that matters in a bucket of many models."""

MAX_ASKED = 64
"""Missing blocks of a lookup that are asked for in the sibling that holds one. Each is a request."""

FIRST_PAUSE_S = 1.0
"""The first pause after a look that found nothing. A look costs a round trip, and some dozen requests."""


class ObjSiblings(SiblingPlace):
    """Namespaces beside the own one in a bucket.

    What has no answer within the client's time-out counts as absent, as in a lookup of the tier's own blocks.

    Args:
        client: the store.
        root: what the names of the tier's objects begin with.
        has_capacity: whether the tier evicts; objects of others go with its own.
    """

    def __init__(self, client: Client, root: str, *, has_capacity: bool = True) -> None:
        if not has_capacity:
            self.fate = "stay until the store's own rules remove them"
        self._client = client
        self._root = root

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        del max_namespaces
        folders = [name for name in self._client.list_folders(self._root) if len(name) == NAMESPACE_CHARS]
        paths = {self._document_path(name): name for name in folders[:MAX_READ_DOCUMENTS] if name != own_name}
        found = self._client.get_each(list(paths), MAX_DOCUMENT_BYTES)
        return [(paths[path], bytes(text).decode("utf-8", "replace")) for path, text in found.items()]

    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        paths = {self._block_path(name, key): name for name in names for key in keys}
        there = {paths[path] for path in self._client.sizes(list(paths))}
        return next((name for name in names if name in there), None)

    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        paths = {self._block_path(name, key): key for key in keys[:MAX_ASKED]}
        return [paths[path] for path in self._client.sizes(list(paths))]

    def _document_path(self, name: str) -> str:
        return f"{namespace_path(self._root, name)}/{NAMESPACE_DOCUMENT_NAME}"

    def _block_path(self, name: str, key: OffloadKey) -> str:
        return block_path(namespace_path(self._root, name), key)
