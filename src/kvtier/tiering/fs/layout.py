"""Names of everything in the tier's directory.

It touches no file. ``ROOT/<namespace>/<digit>/<digit>/<key>.kv`` is a block, the digits being the key's first two in
hex: 256 folders of a namespace hold 4,000 files each at a million blocks, which is little for a file system of
today, and a new namespace is not busy making folders for its first thousands of blocks. Beside the namespaces
stand ``.lock``, whose holder evicts, ``.usage``, the shared count of bytes, and ``tmp``.

Whatever does not look like one of these names is not ours: it is neither counted nor removed.
"""

import re
from pathlib import Path

from kvtier.base import OffloadKey

LOCK_NAME = ".lock"
USAGE_NAME = ".usage"
TEMPORARY_NAME = "tmp"
NAMESPACE_DOCUMENT_NAME = "namespace.json"

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_DIGIT = re.compile(r"[0-9a-f]")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){1,40})\.kv")

FOLDER_PATTERNS = (_NAMESPACE, _DIGIT, _DIGIT)
"""What folders are called, from the root downwards to those that hold blocks."""


def block_path(namespace_path: str, key: OffloadKey) -> str:
    """Return where a namespace keeps the block of ``key``. Pure."""
    digits = key.hex()
    return f"{namespace_path}/{digits[0]}/{digits[1]}/{digits}.kv"


def parse_block_name(file_name: str) -> OffloadKey | None:
    """Return the key of the block in a file called so, None when it is no block. Pure."""
    found = _BLOCK.fullmatch(file_name)
    return OffloadKey(bytes.fromhex(found[1])) if found else None


def namespace_path(root: Path, namespace_name: str) -> str:
    """Return the folder of a namespace. Pure."""
    return f"{root}/{namespace_name}"


def namespace_of(path: str) -> str:
    """Return the namespace's name in the path of a block. Pure."""
    return path.split("/")[-4]
