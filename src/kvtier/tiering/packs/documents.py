"""What lies beside the packs of a namespace: its identity in words, its page, and what those of other namespaces tell.

``namespace.json`` and ``probe.page`` are in the namespace's folder. Nothing that is loaded depends on either.
"""

import os
import secrets
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.page_guard import MAX_PAGE_BYTES
from kvtier.tiering.kit.siblings import Sibling, SiblingPlace, amount_in_words, log_siblings
from kvtier.tiering.packs.directory import PackDirectory
from kvtier.tiering.packs.pack_files import NAMESPACE_NAME
from kvtier.tiering.packs.records import Kind, names_of

DOCUMENT_NAME = "namespace.json"
PAGE_NAME = "probe.page"

MAX_DOCUMENT_BYTES = 2**20

MAX_READ_DOCUMENTS = 32
"""Documents of other namespaces that are read in a listing, a small file each. Fewer miss the sibling that matters
where resets have made many."""

MAX_SIBLING_PACKS = 64
"""Journals of one sibling that are read to look for blocks. More take longer, once a minute; fewer see less of it."""

MAX_SIBLING_NAMES = 2**20
"""Names of blocks of all siblings that are kept for a minute, about 100 bytes each."""


def write_beside(folder: Path, name: str, data: bytes, file_mode: int) -> None:
    """Write a small file whole or not at all.

    Raises:
        OSError: the system refused.
    """
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, file_mode)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, file_mode)
            file.write(data)
        temporary.rename(folder / name)
    finally:
        temporary.unlink(missing_ok=True)


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
    folder, data = directory.make_folder(identity.name), identity.document.encode()
    if read_beside(folder, DOCUMENT_NAME, MAX_DOCUMENT_BYTES) != data:
        write_beside(folder, DOCUMENT_NAME, data, directory.file_mode)


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
        folder = self._directory.make_folder(identity.name)
        temporary = f"{PAGE_NAME}.{secrets.token_hex(4)}"
        write_beside(folder, temporary, data, self._directory.file_mode)
        try:
            with suppress(FileExistsError):
                os.link(folder / temporary, folder / PAGE_NAME, follow_symlinks=False)
        finally:
            (folder / temporary).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a page that is damaged."""
        with suppress(OSError):
            (self._directory.folder_of(name) / PAGE_NAME).unlink(missing_ok=True)


class PackSiblings(SiblingPlace):
    """The other namespaces of a directory, for blocks that this engine misses: their journals, read now and then.

    Mutable are the names of blocks that the last reading found. One thread alone uses it.

    Args:
        directory: where they are.
        tier: type of the tier, for the log.
    """

    def __init__(self, directory: PackDirectory, tier: str) -> None:
        self._directory = directory
        self._tier = tier
        self._own_name = ""
        self._names: dict[str, set[bytes]] = {}

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        self._own_name = own_name
        self._names = {}
        del max_namespaces  # those that differ least are chosen among more
        names = [name for name in list_namespaces(self._directory.root) if name != own_name]
        return [(name, self._read_document(name)) for name in names[:MAX_READ_DOCUMENTS]]

    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        return next((name for name in names if not self._names_in(name).isdisjoint(keys)), None)

    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        names = self._names_in(name)
        return [key for key in keys if key in names]

    def note_siblings(self, siblings: Sequence[Sibling]) -> None:
        # Only an empty namespace suggests a mistake: one with blocks of its own shares the place with other models.
        if not self._names_in(self._own_name) and (num := len(self._names_in(siblings[0].name))):
            log_siblings(self._tier, self._own_name, siblings[0], str(num))

    def measure_older(self, documents: Sequence[tuple[str, str]]) -> str:
        older = {name for name, _ in documents}
        packs = self._directory.list_packs()
        return amount_in_words(sum(pack.num_bytes for pack in packs if pack.namespace_name in older))

    def _read_document(self, name: str) -> str:
        found = read_beside(self._directory.folder_of(name), DOCUMENT_NAME, MAX_DOCUMENT_BYTES)
        return "" if found is None else found.decode("utf-8", "replace")

    def _names_in(self, name: str) -> set[bytes]:
        """Return the names of the blocks of a namespace, read once a listing. Encrypted ones match no key."""
        if name not in self._names:
            room = MAX_SIBLING_NAMES - sum(map(len, self._names.values()))
            found: set[bytes] = set()
            for names in self._read_packs(name):
                if len(found) >= room:
                    break
                found.update(names)
            self._names[name] = found
        return self._names[name]

    def _read_packs(self, namespace_name: str) -> Iterator[list[bytes]]:
        for name in sorted(self._directory.names(namespace_name))[:MAX_SIBLING_PACKS]:
            pack = self._directory.open(namespace_name, name)
            if pack is None:
                continue
            try:
                with suppress(OSError):
                    records = pack.journal.tail().records
                    yield names_of(records[records["kind"] == Kind.STORED])
            finally:
                pack.close()
