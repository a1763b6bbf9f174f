"""Names of the tier's objects.

``<root>/<namespace>/<two digits>/<name>.kv`` is a block or, where blocks share an object, the small
pointer to it; its name is its key, or keyed bytes where blocks are encrypted. The digits are the name's first two in
hex, so that a store that partitions by name sees 256 starts of names.
``<root>/<namespace>/groups/<number>.kvg`` holds several blocks, its number is drawn at random.
``<root>/<namespace>/namespace.json`` says for people what the blocks are of, and ``probe.page`` beside it, where
there is one, for engines.

Whatever does not look like the first two is not ours to count or to remove.
"""

import re
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.block_format import BlockFormat, BlockName, format_of
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, POINTER_CODEC, HeaderCheck

NAMESPACE_DOCUMENT_NAME = "namespace.json"
PAGE_NAME = "probe.page"
GROUP_ID_BYTES = 16

_OWN = re.compile(
    r"[0-9a-f]{32}/(?:([0-9a-f]{2})/\1(?:[0-9a-f]{2}){0,39}\.kv|groups/[0-9a-f]{32}\.kvg)",
)


def namespace_path(root: str, namespace_name: str) -> str:
    """Return the start of a namespace's names. Pure."""
    return f"{root}/{namespace_name}" if root else namespace_name


def block_path(namespace_path: str, name: BlockName) -> str:
    """Return the object of the block of that name, the key itself where blocks are plain, or of its pointer. Pure."""
    digits = name.hex()
    return f"{namespace_path}/{digits[:2]}/{digits}.kv"


def group_path(namespace_path: str, group_id: bytes) -> str:
    """Return the name of an object of several blocks. Pure."""
    return f"{namespace_path}/groups/{group_id.hex()}.kvg"


def draw_group_id() -> bytes:
    """Return a random number, long enough to be unique."""
    return secrets.token_bytes(GROUP_ID_BYTES)


def is_own(root: str, path: str) -> bool:
    """Return whether ``path`` is a name that some instance of this tier gives under ``root``. Pure."""
    start = f"{root}/" if root else ""
    return path.startswith(start) and _OWN.fullmatch(path, len(start)) is not None


_PAYLOAD = struct.Struct(f"<{GROUP_ID_BYTES}sI")
POINTER_BYTES = ENVELOPE_BYTES + _PAYLOAD.size


class Location(NamedTuple):
    """Where in which group a block is.

    Attributes:
        group_id: number of the group's object.
        position: how many blocks stand before it.
    """

    group_id: bytes
    position: int


def pack_pointer(location: Location, key: OffloadKey, block_format: BlockFormat) -> bytes:
    """Return the bytes of the pointer to the block of ``key``."""
    row = memoryview(bytearray(_PAYLOAD.pack(*location)))
    header, payload = block_format.seal(key, row, None, codec=POINTER_CODEC)
    return header + payload


def unpack_pointer(body: memoryview, key: OffloadKey, block_format: BlockFormat) -> Location | HeaderCheck:
    """Return where the block of ``key`` is, or what is wrong with its pointer."""
    payload = memoryview(bytearray(body[ENVELOPE_BYTES:]))
    header_check = block_format.open(body, payload, key, payload, codec=POINTER_CODEC)
    if header_check is not HeaderCheck.OK:
        return header_check
    if len(payload) != _PAYLOAD.size:
        return HeaderCheck.DAMAGED
    return Location(*_PAYLOAD.unpack(payload))


MAX_LOCATIONS = 65_536
"""Pointers remembered, about 300 bytes each; as many as verdicts are. One that is forgotten is read again."""


class ObjNamespace:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Mutable are the locations and whether the description is being written or there. ``_lock`` guards both.

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
        self._locations: OrderedDict[OffloadKey, Location] = OrderedDict()

    @property
    def document_path(self) -> str:
        """Name of the readable description."""
        return f"{self.path}/{NAMESPACE_DOCUMENT_NAME}"

    @property
    def page_path(self) -> str:
        """Name of the page."""
        return f"{self.path}/{PAGE_NAME}"

    def block_path(self, key: OffloadKey) -> str:
        """Return the name of the block of ``key``, or of the pointer to it."""
        return block_path(self.path, self.format.name(key))

    def group_path(self, group_id: bytes) -> str:
        """Return the name of an object of several blocks."""
        return group_path(self.path, group_id)

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

    def location(self, key: OffloadKey) -> Location | None:
        """Return where the block of ``key`` is known to share an object."""
        with self._lock:
            return self._locations.get(key)

    def on_locations(self, locations: Iterable[tuple[OffloadKey, Location]]) -> None:
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
