"""The readable descriptions of the namespaces in a slab, in a file beside it, and what they say of others' blocks.

It is one JSON object: the document of each namespace under its name, the one of the last engine at the end. Nothing
depends on it. An older version kept the document of the last engine alone, which is read too. The page of a namespace,
which says what model its blocks are of, is a file of its own beside it.
"""

import hashlib
import json
import logging
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.departed import DepartedBlocks
from kvtier.misses import Miss
from kvtier.namespace import Namespace
from kvtier.tiering.kit.page_guard import MAX_PAGE_BYTES
from kvtier.tiering.kit.siblings import (
    SiblingPlace,
    amount_in_words,
    describe_siblings,
    list_older,
    log_older_layouts,
    log_siblings,
)

logger = logging.getLogger(__name__)

FILE_MODE = 0o600
"""Permissions of the file."""

MAX_DOCUMENTS = 16
"""Namespaces described; a slab has had as many models only on a machine that tries them. More make a larger file."""

MAX_FILE_BYTES = 2**24

PAGE_SUFFIX = ".probe.page"


def document_path(slab_path: Path) -> Path:
    """Return where the documents of the slab at ``slab_path`` are. Pure."""
    return slab_path.with_name(f"{slab_path.name}.namespace.json")


def read_documents(path: Path) -> dict[str, str]:
    """Return the documents in a file by the names of their namespaces; none where it cannot be read."""
    try:
        text = _read_regular(path).decode("utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    if (
        "layout_version" in found
    ):  # the form of an older version, where the document was what the digest is of
        name = hashlib.sha256(text.removesuffix("\n").encode()).hexdigest()[:32]
        return {name: text.removesuffix("\n")}
    return {
        name: json.dumps(document, sort_keys=True, indent=1)
        for name, document in found.items()
        if isinstance(document, dict)
    }


def write_document(slab_path: Path, namespace: Namespace) -> None:
    """Put the document of ``namespace`` beside a slab; one that cannot be written is named in the log."""
    path = document_path(slab_path)
    documents = read_documents(path)
    documents.pop(namespace.name, None)
    others = list(documents.items())[-(MAX_DOCUMENTS - 1) :]
    try:
        _replace(path, dict(others) | {namespace.name: namespace.document})
    except OSError as error:
        logger.warning("tier slab: %s was not written: %s", path, error)


class SlabSiblings:
    """The blocks of other namespaces that a slab had at the start, for the blocks that this engine misses.

    Mutable is the memory of them: the thread that scans the slab puts a whole one there, and the scheduler's thread
    alone uses it afterwards. It is true of the start: such blocks are the first to be written over.

    Args:
        slab_path: the slab.
        slot_bytes: what a block takes in it.
    """

    def __init__(self, slab_path: Path, slot_bytes: int) -> None:
        self._slab_path = slab_path
        self._slot_bytes = slot_bytes
        self._blocks: DepartedBlocks | None = None

    def adopt(
        self, own: Namespace, keys_by_name: Mapping[str, Sequence[OffloadKey]], *, is_empty: bool
    ) -> None:
        """Take over what was found; says once in the log that this namespace is empty where another is not."""
        documents = read_documents(document_path(self._slab_path))
        there = [(name, documents[name]) for name in keys_by_name if name in documents]
        siblings = describe_siblings("slab", own, there)
        if not siblings:
            return
        blocks = DepartedBlocks(sum(len(keys_by_name[sibling.name]) for sibling in siblings))
        for sibling in siblings:
            blocks.report(keys_by_name[sibling.name], blocks.add_kind(sibling.miss))
        self._blocks = blocks
        current = [sibling for sibling in siblings if not sibling.has_other_layout]
        if is_empty and current:
            log_siblings("slab", own.name, current[0], str(len(keys_by_name[current[0].name])))
        if older := list_older(there):
            num_bytes = self._slot_bytes * sum(len(keys_by_name[name]) for name, _ in older)
            amount, where = amount_in_words(num_bytes), str(self._slab_path)
            log_older_layouts("slab", amount, len(older), SiblingPlace.fate, where)

    def explain(self, key: OffloadKey) -> Miss | None:
        """Return in what the namespace differs that held ``key`` at the start; None when none did."""
        blocks = self._blocks
        found = None if blocks is None else blocks.find(key)
        return None if found is None else found.miss

    def clear(self) -> None:
        """Forget what was found."""
        self._blocks = None


class SlabPages:
    """The pages of the namespaces of a slab, files beside it.

    Where none can be written, one WARNING says so and this process goes on with a page that no later one finds.

    Args:
        slab_path: the slab.
    """

    def __init__(self, slab_path: Path) -> None:
        self._slab_path = slab_path
        self._unwritten: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        """Return the page of the namespace of that name, None where there is none."""
        try:
            return _read_regular(self._path_of(name), MAX_PAGE_BYTES)
        except FileNotFoundError:
            return self._unwritten.get(name)
        except OSError:
            return self._unwritten.get(name, b"")

    def create(self, name: str, data: bytes) -> None:
        """Write a page unless there is one; the oldest of too many go."""
        path = self._path_of(name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, FILE_MODE), "wb") as file:
                file.write(data)
            # Its engine locks the slab, so that no other writes one meanwhile.
            temporary.rename(path)
            for old in sorted(self._paths(), key=lambda found: found.stat().st_mtime)[:-MAX_DOCUMENTS]:
                old.unlink(missing_ok=True)
        except OSError as error:
            self._unwritten[name] = data
            logger.warning("tier slab: %s was not written: %s", path, error)

    def remove(self, names: Collection[str] | None = None) -> None:
        """Remove the pages of some namespaces; None: all. One that cannot be removed is read like any other."""
        paths = [] if names is None else [self._path_of(name) for name in names]
        if names is None:
            with suppress(OSError):
                paths = self._paths()
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _path_of(self, name: str) -> Path:
        return self._slab_path.with_name(f"{self._slab_path.name}.{name}{PAGE_SUFFIX}")

    def _paths(self) -> list[Path]:
        start, folder = f"{self._slab_path.name}.", self._slab_path.parent
        return [path for path in folder.glob(f"*{PAGE_SUFFIX}") if path.name.startswith(start)]


def drop_documents(path: Path, names: Collection[str]) -> None:
    """Take the documents of some namespaces out of a file; without one left the file goes.

    Raises:
        OSError: the system refused.
    """
    documents = read_documents(path)
    left = {name: text for name, text in documents.items() if name not in names}
    if len(left) == len(documents):
        return
    if left:
        _replace(path, left)
    else:
        path.unlink(missing_ok=True)


def _read_regular(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the beginning of a file; what is none, a pipe for example, is not waited for.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        return file.read(max_bytes) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _replace(path: Path, documents: Mapping[str, str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump({name: json.loads(text) for name, text in documents.items()}, file, indent=1)
        file.write("\n")
    temporary.replace(path)
