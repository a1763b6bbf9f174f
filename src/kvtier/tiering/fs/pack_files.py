"""The files in a tier's directory: what they are called, and walks over them.

``ROOT/<namespace>/<id>.pack`` is a pack and ``<id>.index`` its journal; a pack is ``<id>.new`` while it is made, and a
journal ``<id>.index.tmp`` while it is written again. What does not look like one of these names is not ours: it is
neither counted nor removed. Blocks of the tier that kept a file a block count, and are left alone.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
PACK_NAME = re.compile(r"[0-9a-f]{16}\.pack")

PACK_SUFFIX = ".pack"
NEW_SUFFIX = ".new"
JOURNAL_SUFFIX = ".index"
TEMPORARY_SUFFIX = ".index.tmp"
OLDER_SUFFIX = ".kv"

STAT_BLOCK_BYTES = 512
"""Unit of ``st_blocks``. Source: stat(3type)."""

_DIGIT = re.compile(r"[0-9a-f]")
_FILE = re.compile(r"([0-9a-f]{16})(\.pack|\.new|\.index|\.index\.tmp)")


@dataclass(frozen=True, slots=True)
class FoundPack:
    """The files of one pack, or what is left of them.

    Attributes:
        folder: of its namespace.
        stem: their common name.
        files: their statuses by suffix.
    """

    folder: Path
    stem: str
    files: Mapping[str, os.stat_result]

    @property
    def is_whole(self) -> bool:
        """Whether the pack itself is there."""
        return PACK_SUFFIX in self.files

    @property
    def num_bytes(self) -> int:
        """What the files may take of the disk: a hole that was punched into a pack is written again."""
        return sum(max(one.st_size, one.st_blocks * STAT_BLOCK_BYTES) for one in self.files.values())

    @property
    def used_s(self) -> float:
        """When the pack was last written, or read by a process that does not own it; seconds since 1970."""
        return self.files[PACK_SUFFIX].st_mtime

    def path(self, suffix: str = PACK_SUFFIX) -> Path:
        """Return one of the files."""
        return self.folder / f"{self.stem}{suffix}"


def list_packs(folder: Path) -> list[FoundPack]:
    """Return the packs in the folder of a namespace, and what is left of others."""
    found: dict[str, dict[str, os.stat_result]] = {}
    for entry in _entries(folder):
        name = _FILE.fullmatch(entry.name)
        status = _status(entry) if name is not None else None
        if name is not None and status is not None and stat.S_ISREG(status.st_mode):
            found.setdefault(name[1], {})[name[2]] = status
    return [FoundPack(folder, stem, files) for stem, files in found.items()]


def list_all_packs(root: Path) -> Iterator[FoundPack]:
    """Yield the same of all namespaces."""
    for folder in _folders(root, NAMESPACE_NAME):
        yield from list_packs(folder)


def list_older_blocks(root: Path) -> Iterator[int]:
    """Yield what each block takes of the disk that a version with a file a block has written."""
    for folder in list_older_folders(root):
        for _, num_bytes in older_blocks_in(folder):
            yield num_bytes


def list_older_folders(root: Path) -> Iterator[Path]:
    """Yield the folders in which such a version keeps blocks, two levels below those of namespaces."""
    for namespace in _folders(root, NAMESPACE_NAME):
        for first in _folders(namespace, _DIGIT):
            yield from _folders(first, _DIGIT)


def older_blocks_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the blocks in one of these folders, and what each takes of the disk."""
    for entry in _entries(folder):
        status = _status(entry) if entry.name.endswith(OLDER_SUFFIX) else None
        if status is not None:
            yield Path(entry.path), status.st_blocks * STAT_BLOCK_BYTES


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [
        Path(entry.path)
        for entry in _entries(folder)
        if pattern.fullmatch(entry.name)
        and (found := _status(entry)) is not None
        and stat.S_ISDIR(found.st_mode)
    ]


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # gone meanwhile, or private to another user who shares the directory


def _status(entry: "os.DirEntry[str]") -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
