"""Names of the tier's objects.

``<root>/<namespace>/<two digits>/<name>.kv`` is a block; its name is its key, or keyed bytes where blocks are
encrypted. The digits are the name's first two in hex, so that a store that partitions by name sees 256 starts of names.
``<root>/<namespace>/namespace.json`` says for people what the blocks are of, and ``probe.page`` beside it, where
there is one, for engines.

Earlier versions could put several blocks into ``<root>/<namespace>/groups/<number>.kvg``, and a small pointer under the
name of each. Such objects are counted, evicted and purged by their names. No block is read from them.

Whatever looks like neither a block nor a group is not ours to count or to remove.
"""

import re
import threading

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.block_format import BlockName, format_of

NAMESPACE_DOCUMENT_NAME = "namespace.json"
PAGE_NAME = "probe.page"
GROUP_SUFFIX = ".kvg"

_OWN = re.compile(
    r"[0-9a-f]{32}/(?:([0-9a-f]{2})/\1(?:[0-9a-f]{2}){0,39}\.kv|groups/[0-9a-f]{32}\.kvg)",
)


def namespace_path(root: str, namespace_name: str) -> str:
    """Return the start of a namespace's names. Pure."""
    return f"{root}/{namespace_name}" if root else namespace_name


def block_path(namespace_path: str, name: BlockName) -> str:
    """Return the object of the block of that name, the key itself where blocks are plain. Pure."""
    digits = name.hex()
    return f"{namespace_path}/{digits[:2]}/{digits}.kv"


def is_own(root: str, path: str) -> bool:
    """Return whether ``path`` is a name that some version of this tier gives under ``root``. Pure."""
    start = f"{root}/" if root else ""
    return path.startswith(start) and _OWN.fullmatch(path, len(start)) is not None


class ObjNamespace:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Mutable is whether the description is being written or there. ``_lock`` guards it.

    Args:
        identity: what makes its blocks its own: model, layout, epoch.
        path: what its objects' names begin with.
    """

    def __init__(self, identity: Namespace, path: str) -> None:
        self.identity = identity
        self.format = format_of(identity)
        self.path = path
        self._lock = threading.Lock()
        self._is_described = False

    @property
    def document_path(self) -> str:
        """Name of the readable description."""
        return f"{self.path}/{NAMESPACE_DOCUMENT_NAME}"

    @property
    def page_path(self) -> str:
        """Name of the page."""
        return f"{self.path}/{PAGE_NAME}"

    def block_path(self, key: OffloadKey) -> str:
        """Return the name of the block of ``key``."""
        return block_path(self.path, self.format.name(key))

    def begin_description(self) -> bool:
        """Return whether the caller is the one to write the readable description; True once.

        Servers are slow when many create one object at once, and blocks need not wait for it.
        """
        with self._lock:
            is_first, self._is_described = not self._is_described, True
            return is_first

    @property
    def is_described(self) -> bool:
        """Whether the readable description has been written, or is about to be."""
        with self._lock:
            return self._is_described

    def drop_description(self) -> None:
        """Leave the description to the next one, as it could not be written."""
        with self._lock:
            self._is_described = False
