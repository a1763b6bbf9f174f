"""What lies beside the packs of a namespace: its identity in words, its page, and what those of other namespaces tell.

``namespace.json`` and ``probe.page`` are in the namespace's folder. Nothing that is loaded depends on either.
"""

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.departed import DepartedBlocks
from kvtier.misses import Miss, MissCause
from kvtier.namespace import Namespace
from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.pack_files import NAMESPACE_NAME
from kvtier.tiering.fs.records import Kind, last_of_each, names_of
from kvtier.tiering.fs.system_calls import write_whole
from kvtier.tiering.kit.page_guard import MAX_PAGE_BYTES
from kvtier.tiering.kit.siblings import (
    SiblingPlace,
    amount_in_words,
    describe_siblings,
    list_older,
    log_older_layouts,
    log_siblings,
)

DOCUMENT_NAME = "namespace.json"
PAGE_NAME = "probe.page"
TEMPORARY_NAME = "beside.tmp"
NAMES_BESIDE = (DOCUMENT_NAME, PAGE_NAME, TEMPORARY_NAME)

MAX_DOCUMENT_BYTES = 2**20

MAX_READ_DOCUMENTS = 32
"""Documents of other namespaces that are read in a listing, a small file each. Fewer miss the sibling that matters
where resets have made many."""

MAX_SIBLING_PACKS = 64
"""Journals of one sibling that are read to look for blocks. More take longer, once a minute; fewer see less of it."""

MAX_SIBLING_BLOCKS = 2**20
"""Blocks of all siblings that are remembered, 16 bytes each."""


def write_beside(
    directory: PackDirectory, namespace_name: str, name: str, data: bytes, *, replaces: bool
) -> None:
    """Write a small file whole or not at all; not while another process keeps the directory's lock.

    Args:
        directory: where the namespace is; its folder is made if it is missing.
        namespace_name: whose file it is.
        name: the file's.
        data: what stands in it.
        replaces: whether one that is there goes.

    Raises:
        OSError: the system refused.
    """
    with directory.locked() as is_held:
        if not is_held:
            return
        path = directory.make_folder(namespace_name) / name
        if replaces or not os.path.lexists(path):
            # The lock leaves the temporary name to one process, and the next one removes what a dead one left there.
            write_whole(path.with_name(TEMPORARY_NAME), path, data, directory.file_mode)


def read_beside(folder: Path, name: str, max_bytes: int) -> bytes | None:
    """Return the beginning of a small file; None where there is none, it is no regular file, or it cannot be read."""
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            return file.read(max_bytes) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError:
        return None


def write_document(directory: PackDirectory, identity: Namespace) -> None:
    """Make the folder of a namespace and put its identity there in words, unless that is there.

    Raises:
        OSError: the system refused.
    """
    data = identity.document.encode()
    if read_beside(directory.folder_of(identity.name), DOCUMENT_NAME, MAX_DOCUMENT_BYTES) != data:
        with suppress(IsADirectoryError):  # words alone are missing then
            write_beside(directory, identity.name, DOCUMENT_NAME, data, replaces=True)


def list_namespaces(root: Path) -> list[str]:
    """Return the names of the namespaces below a directory, those changed last first."""
    found = []
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if NAMESPACE_NAME.fullmatch(entry.name):
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        found.append((status.st_mtime, entry.name))
    return [name for _, name in sorted(found, reverse=True)]


class PackPages:
    """The pages of namespaces, which say what model their blocks are of.

    Args:
        directory: where the namespaces are.
    """

    def __init__(self, directory: PackDirectory) -> None:
        self._directory = directory

    def read(self, name: str) -> bytes | None:
        """Return the page of a namespace, None where there is none."""
        return read_beside(self._directory.folder_of(name), PAGE_NAME, MAX_PAGE_BYTES)

    def create(self, identity: Namespace, data: bytes) -> None:
        """Keep a page, whole or not at all, unless there is one.

        Raises:
            OSError: it cannot be written.
        """
        write_beside(self._directory, identity.name, PAGE_NAME, data, replaces=False)

    def remove(self, name: str) -> None:
        """Remove a page that is damaged."""
        with suppress(OSError):
            (self._directory.folder_of(name) / PAGE_NAME).unlink(missing_ok=True)


class PackSiblings:
    """The blocks of other namespaces of the directory, for those that this engine misses.

    They are what journals say, read at the start and at times.

    Mutable is what the last reading found: the keeper's thread puts a whole one there, and the scheduler's thread alone
    looks into it.

    Args:
        directory: where they are.
        tier: type of the tier, for the log.
    """

    def __init__(self, directory: PackDirectory, tier: str) -> None:
        self._directory = directory
        self._tier = tier
        self._blocks: DepartedBlocks | None = None
        self._suspected: Miss | None = None
        self._is_first = True

    def refresh(self, own: Namespace, *, is_empty: bool) -> None:
        """Read what other namespaces hold; says once in the log that this one is empty where another is not.

        Args:
            own: this namespace.
            is_empty: whether it holds nothing.
        """
        names = [name for name in list_namespaces(self._directory.root) if name != own.name]
        documents = [(name, self._read_document(name)) for name in names[:MAX_READ_DOCUMENTS]]
        siblings = describe_siblings(self._tier, own, documents)
        blocks = DepartedBlocks(MAX_SIBLING_BLOCKS)
        num_blocks = 0
        found: list[tuple[list[OffloadKey], int]] = []
        for sibling in siblings:
            kind = blocks.add_kind(sibling.miss)
            num_before = num_blocks
            for keys in self._read_packs(sibling.name):
                found.append((keys[: MAX_SIBLING_BLOCKS - num_blocks], kind))
                num_blocks += len(keys)
            if is_empty and self._is_first and num_blocks > num_before and not sibling.has_other_layout:
                log_siblings(self._tier, own.name, sibling, str(num_blocks - num_before))
                is_empty = False
        for keys, kind in reversed(found):  # of a block that several hold, the nearest is said last and stays
            blocks.report(keys, kind)
        other_keys = [sibling.miss for sibling in siblings if sibling.has_other_keys]
        self._suspected = other_keys[0]._replace(cause=MissCause.NEVER_SEEN) if other_keys else None
        self._blocks = blocks if num_blocks else None
        if self._is_first and (older := list_older(documents)):
            amount, where = self._measure({name for name, _ in older}), str(self._directory.root)
            log_older_layouts(self._tier, amount, len(older), SiblingPlace.fate, where)
        self._is_first = False

    def explain(self, key: OffloadKey) -> Miss | None:
        """Return in what the namespace differs that holds ``key``, or that would have it under another key."""
        blocks = self._blocks
        found = None if blocks is None else blocks.find(key)
        return self._suspected if found is None else found.miss

    def clear(self) -> None:
        """Forget what was found."""
        self._blocks = self._suspected = None

    def _measure(self, names: Collection[str]) -> str:
        packs = self._directory.list_packs()
        return amount_in_words(sum(pack.num_bytes for pack in packs if pack.namespace_name in names))

    def _read_document(self, name: str) -> str:
        found = read_beside(self._directory.folder_of(name), DOCUMENT_NAME, MAX_DOCUMENT_BYTES)
        return "" if found is None else found.decode("utf-8", "replace")

    def _read_packs(self, namespace_name: str) -> Iterator[list[OffloadKey]]:
        """Yield the blocks of each pack of a namespace. Encrypted ones have names that are no engine's keys."""
        for name in sorted(self._directory.names(namespace_name))[:MAX_SIBLING_PACKS]:
            pack = self._directory.open(namespace_name, name, has_own_rows=False)
            if pack is None:
                continue
            try:
                with suppress(OSError):
                    held = last_of_each(pack.journal.tail().records)
                    yield [OffloadKey(name) for name in names_of(held[held["kind"] == Kind.STORED])]
            finally:
                pack.close()
