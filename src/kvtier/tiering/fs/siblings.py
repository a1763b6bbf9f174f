"""The other namespaces of a directory, for the blocks that this engine misses: each is a folder."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.tiering.fs.folders import (
    block_path,
    count_blocks,
    list_namespaces,
    namespace_path,
    read_document,
)
from kvtier.tiering.kit.siblings import Sibling, SiblingPlace, log_siblings

MAX_COUNTED_BLOCKS = 1000
"""Blocks of a sibling that are counted for the line in the log. More list more folders of a large directory at the
start; fewer say less of how much is lost."""


class FSSiblings(SiblingPlace):
    """Folders beside the namespace's own, those changed last first.

    Args:
        root: the tier's directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._own_name = ""

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        self._own_name = own_name
        names = [name for name in list_namespaces(self._root) if name != own_name][:max_namespaces]
        return [(name, read_document(self._root / name)) for name in names]

    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        return next((name for name in names if any(self._has(name, key) for key in keys)), None)

    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        return [key for key in keys if self._has(name, key)]

    def note_siblings(self, siblings: Sequence[Sibling]) -> None:
        # Only an empty namespace suggests a mistake: one with blocks of its own shares the place with other models.
        if count_blocks(namespace_path(self._root, self._own_name), 1):
            return
        num_blocks = count_blocks(namespace_path(self._root, siblings[0].name), MAX_COUNTED_BLOCKS)
        number = str(num_blocks) if num_blocks < MAX_COUNTED_BLOCKS else f"{num_blocks} or more"
        log_siblings("fs", self._own_name, siblings[0], number)

    def _has(self, name: str, key: OffloadKey) -> bool:
        return os.access(block_path(namespace_path(self._root, name), key), os.F_OK)
