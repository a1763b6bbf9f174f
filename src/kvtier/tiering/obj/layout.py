"""Names of the tier's objects.

It asks no store. ``<root>/<namespace>/<two digits>/<key>.kv`` is a block or, where blocks share an object, the small
pointer to it; the digits are the key's first two in hex, so that a store that partitions by name sees 256 starts of
names. ``<root>/<namespace>/groups/<number>.kvg`` holds several blocks, its number is drawn at random.
``<root>/<namespace>/namespace.json`` says for people what the blocks are of.

Whatever does not look like the first two is not ours to count or to remove.
"""

import re
import secrets

from kvtier.base import OffloadKey

NAMESPACE_DOCUMENT_NAME = "namespace.json"
GROUP_ID_BYTES = 16

_OWN = re.compile(
    r"[0-9a-f]{32}/(?:([0-9a-f]{2})/\1(?:[0-9a-f]{2}){0,39}\.kv|groups/[0-9a-f]{32}\.kvg)",
)


def namespace_path(root: str, namespace_name: str) -> str:
    """Return the start of a namespace's names. Pure."""
    return f"{root}/{namespace_name}" if root else namespace_name


def block_path(space_path: str, key: OffloadKey) -> str:
    """Return the name of the block of ``key``, or of the pointer to it. Pure."""
    digits = key.hex()
    return f"{space_path}/{digits[:2]}/{digits}.kv"


def group_path(space_path: str, group_id: bytes) -> str:
    """Return the name of an object of several blocks. Pure."""
    return f"{space_path}/groups/{group_id.hex()}.kvg"


def draw_group_id() -> bytes:
    """Return a number that nobody else draws."""
    return secrets.token_bytes(GROUP_ID_BYTES)


def is_own(root: str, path: str) -> bool:
    """Return whether ``path`` is a name that some instance of this tier gives under ``root``. Pure."""
    start = f"{root}/" if root else ""
    return path.startswith(start) and _OWN.fullmatch(path, len(start)) is not None
