"""The layout of the tier's directory: names, folders, walks over them.

``ROOT/<namespace>/<digit>/<digit>/<name>.kv`` is a block, its name being its key, or keyed bytes where blocks are
encrypted, and the digits the first two of it in hex: 256 folders of a namespace hold 4,000 files each at a million
blocks, which is little for a file system of today, and a new namespace is not busy making folders for its first
thousands of blocks. Beside the namespaces stand ``.lock``, whose holder evicts, ``.usage``, the shared count of bytes,
and ``tmp``. In a namespace's folder there may be a page, which says what model its blocks are of.

What does not look like one of these names is not ours: it is neither counted nor removed.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.shared_usage import open_shared_file
from kvtier.tiering.fs.system import Owner, parse_owner
from kvtier.tiering.kit.block_format import BlockFormat, BlockName, format_of
from kvtier.tiering.kit.private_folders import make_folder, make_folders
from kvtier.tiering.kit.siblings import Sibling, SiblingPlace, amount_in_words, log_siblings

LOCK_NAME = ".lock"
USAGE_NAME = ".usage"
TENANTS_NAME = ".tenants"
TEMPORARY_NAME = "tmp"
NAMESPACE_DOCUMENT_NAME = "namespace.json"
PAGE_NAME = "probe.page"
NAMES_BESIDE_BLOCKS = frozenset({NAMESPACE_DOCUMENT_NAME, PAGE_NAME})
MAX_DOCUMENT_BYTES = 2**20

MAX_COUNTED_BLOCKS = 1000
"""Blocks of a sibling that are counted for the line in the log. More list more folders of a large directory at the
start; fewer say less of how much is lost."""

MAX_READ_DOCUMENTS = 32
"""Documents of other namespaces that are read in a listing, a small file each. Fewer miss the sibling that matters
where resets have made many."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_DIGIT = re.compile(r"[0-9a-f]")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){1,40})\.kv")

FOLDER_PATTERNS = (_NAMESPACE, _DIGIT, _DIGIT)
"""What folders are called, from the root downwards to those that hold blocks."""


def block_path(namespace_path: str, name: BlockName) -> str:
    """Return where a namespace keeps the block of that name, the key itself where blocks are plain. Pure."""
    digits = name.hex()
    return f"{namespace_path}/{digits[0]}/{digits[1]}/{digits}.kv"


def parse_block_name(file_name: str) -> BlockName | None:
    """Return the name of the block in a file called so, None when it is no block. Pure."""
    found = _BLOCK.fullmatch(file_name)
    return bytes.fromhex(found[1]) if found else None


def namespace_path(root: Path, namespace_name: str) -> str:
    """Return the folder of a namespace. Pure."""
    return f"{root}/{namespace_name}"


def namespace_of(path: str) -> str:
    """Return the namespace's name in the path of a block. Pure."""
    return path.split("/")[-4]


@dataclass(frozen=True, slots=True)
class FSNamespace:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Attributes:
        identity: what makes its blocks its own: model, layout, epoch.
        name: of its folder.
        path: its folder.
        index: which blocks of it are on the disk.
        known_folders: by what the names in them begin with, the folders that this process has made, or has written a
            block to or read one from; one of them that is missing was removed. Adding and discarding are atomic.
        unlinked_folders: likewise, those that are no symbolic links, nor those above them; forgotten every second.
        synced_folders: likewise, the folders whose own names outlive a loss of power where blocks do.
        format: how its blocks are written.
        block_path: where the block of a key is.
    """

    identity: Namespace
    name: str
    path: str
    index: KeyIndex
    known_folders: set[bytes] = field(default_factory=set, compare=False)
    unlinked_folders: set[bytes] = field(default_factory=set, compare=False)
    synced_folders: set[bytes] = field(default_factory=set, compare=False)
    format: BlockFormat = field(init=False, compare=False)
    block_path: Callable[[OffloadKey], str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_of(self.identity))
        is_plain = not self.format.is_encrypted
        path_of = partial(block_path, self.path) if is_plain else self._path_of_name
        object.__setattr__(self, "block_path", path_of)

    def folder_prefix(self, key: OffloadKey) -> bytes:
        """Return what all names begin with whose blocks are in the same folder as that of ``key``."""
        return self.format.name(key)[:1]

    def forget_folders(self) -> None:
        """Forget what is known of the folders: another program has deleted or replaced some."""
        self.known_folders.clear()
        self.unlinked_folders.clear()
        self.synced_folders.clear()

    def _path_of_name(self, key: OffloadKey) -> str:
        return block_path(self.path, self.format.name(key))


EMPTY_FOLDER_TTL_S = 3600.0
"""Seconds a folder must have been empty to be removed. Shorter makes writers create again what was just
removed; longer keeps a few MiB of folders of models that are gone."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A block's file, as a walk saw it.

    Attributes:
        mtime_ns: when it was last used, nanoseconds since 1970; first, so that blocks sort by age.
        path: the file.
        num_bytes: its length.
        name: what its namespace calls it.
        atime_ns: when it was last accessed, which tells its last use where blocks have a time to live.
    """

    mtime_ns: int
    path: str
    num_bytes: int
    name: BlockName
    atime_ns: int = 0


def make_root(root: Path, file_mode: int) -> None:
    """Make the tier's directory and the folder of temporary files in it, unless they exist.

    Parents of the directory that are missing are made too, private but for those that ``file_mode`` lets read; no
    folder in it is made on the way to another: one that another program removes meanwhile would come back open to
    others.

    Raises:
        OSError: the system refused.
    """
    make_folders(root, file_mode)
    make_folder(root / TEMPORARY_NAME, file_mode)


def make_block_folder(
    root: Path, namespace: FSNamespace, block_path: str, file_mode: int, owner_name: str
) -> bool:
    """Make the folders above a block, the tier's directory included, and the readable description of its namespace.

    Return whether the folder that the block is in was missing.

    Args:
        root: the tier's directory.
        namespace: whose block it is.
        block_path: the block's file.
        file_mode: permissions of files.
        owner_name: this process, as text; what it leaves half written is known as its own.

    Raises:
        OSError: the system refused.
    """
    leaf = Path(block_path).parent
    make_namespace_folder(root, namespace, file_mode, owner_name, (leaf.parent, leaf))
    make_folder(leaf.parent, file_mode)
    return make_folder(leaf, file_mode)


def make_namespace_folder(
    root: Path, namespace: FSNamespace, file_mode: int, owner_name: str, below: Sequence[Path] = ()
) -> None:
    """Make the tier's directory, the folder of a namespace, and the namespace's readable description.

    Args:
        root: the tier's directory.
        namespace: whose folder it is.
        file_mode: permissions of files.
        owner_name: this process, as text.
        below: folders that will be made in it, which must be no links either.

    Raises:
        OSError: the system refused.
    """
    make_root(root, file_mode)
    top = Path(namespace.path)
    for folder in (top, *below):
        if folder.is_symlink():
            raise OSError(
                errno.ELOOP, "is a link, behind which bytes are not counted: remove it", str(folder)
            )
    make_folder(top, file_mode)
    if not (top / NAMESPACE_DOCUMENT_NAME).exists():
        write_document(root, namespace, file_mode, owner_name)


def refresh_document(root: Path, namespace: FSNamespace, file_mode: int, owner_name: str) -> None:
    """Replace the readable description of a namespace that an older version has written, if there is one.

    Args:
        root: the tier's directory.
        namespace: whose description it is.
        file_mode: permissions of files.
        owner_name: this process, as text.
    """
    document = Path(namespace.path) / NAMESPACE_DOCUMENT_NAME
    try:
        if document.exists() and read_document(document.parent) != namespace.identity.document:
            write_document(root, namespace, file_mode, owner_name)
    except OSError:
        return  # there is none yet, or it is another user's: nothing depends on it


def read_document(top: Path) -> str:
    """Return the readable description in a namespace's folder, "" where there is none or it cannot be read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with os.fdopen(os.open(top / NAMESPACE_DOCUMENT_NAME, flags), "rb") as file:
            return (file.read(MAX_DOCUMENT_BYTES) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def write_document(root: Path, namespace: FSNamespace, file_mode: int, owner_name: str) -> None:
    """Write the readable description of a namespace, whose folder exists.

    Args:
        root: the tier's directory.
        namespace: whose description it is.
        file_mode: permissions of files.
        owner_name: this process, as text.

    Raises:
        OSError: the system refused.
    """
    temporary = root / TEMPORARY_NAME / f"{owner_name}-{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode)
    try:
        os.fchmod(fd, file_mode)
        os.write(fd, namespace.identity.document.encode())
        temporary.rename(Path(namespace.path) / NAMESPACE_DOCUMENT_NAME)
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def walk_blocks(root: Path, namespaces: Collection[str] | None = None) -> Iterator[BlockFile]:
    """Yield the blocks of every namespace, in no order.

    Args:
        root: the tier's directory.
        namespaces: names of those that count; None: all.
    """
    folders = (
        _walk_folders(root, len(FOLDER_PATTERNS)) if namespaces is None else _folders_of(root, namespaces)
    )
    for folder in folders:
        for entry in _entries(folder):
            name = parse_block_name(entry.name)
            status = _status(entry) if name is not None else None
            if name is not None and status is not None and stat.S_ISREG(status.st_mode):
                times = status.st_mtime_ns, status.st_atime_ns
                yield BlockFile(times[0], entry.path, status.st_size, name, times[1])


def list_namespaces(root: Path) -> list[str]:
    """Return the names of the namespaces of a directory, those changed last first."""
    found = [
        (status.st_mtime, entry.name)
        for entry in _entries(str(root))
        if _NAMESPACE.fullmatch(entry.name) and (status := _status(entry)) is not None
    ]
    return [name for _, name in sorted(found, reverse=True)]


def count_blocks(path: str, max_blocks: int) -> int:
    """Return how many blocks the folder of a namespace holds, counted up to ``max_blocks``."""
    num_blocks = 0
    for folder in _walk_folders(path, depth=2, first_level=1):
        num_blocks += sum(parse_block_name(entry.name) is not None for entry in _entries(folder))
        if num_blocks >= max_blocks:
            return max_blocks
    return num_blocks


def estimate_bytes(path: str) -> tuple[int, bool]:
    """Return the bytes of the blocks in the folder of a namespace, and whether all of them were counted.

    Blocks lie in folders by their hash, so a part of the folders tells of the rest.
    """
    folders = list(_walk_folders(path, depth=2, first_level=1))
    num_bytes = num_blocks = 0
    for number, folder in enumerate(folders, 1):
        for entry in _entries(folder):
            status = _status(entry) if parse_block_name(entry.name) is not None else None
            num_bytes += 0 if status is None else status.st_size
            num_blocks += status is not None
        if num_blocks >= MAX_COUNTED_BLOCKS and number < len(folders):
            return num_bytes * len(folders) // number, False
    return num_bytes, True


def sweep_temporaries(temporary_path: Path, here: Owner, now_s: float) -> int:
    """Remove files that dead processes were writing; return the bytes of those that stay.

    Args:
        temporary_path: the folder of such files.
        here: this process.
        now_s: wall clock.
    """
    kept_bytes = 0
    for entry in _entries(str(temporary_path)):
        owner, status = parse_owner(entry.name), _status(entry)
        if owner is None or status is None:
            continue
        is_gone = owner.is_dead(here, now_s - status.st_mtime) and _is_removed(entry.path)
        kept_bytes += 0 if is_gone else status.st_size
    return kept_bytes


def remove_empty_folders(root: Path, now_s: float) -> None:
    """Give back folders that have long been empty, and namespaces of which nothing else is left."""
    for depth in range(len(FOLDER_PATTERNS), 0, -1):
        for folder in list(_walk_folders(root, depth)):
            _remove_if_long_empty(Path(folder), now_s)


def _folders_of(root: Path, namespaces: Collection[str]) -> Iterator[str]:
    for name in namespaces:
        if FOLDER_PATTERNS[0].fullmatch(name) and not (root / name).is_symlink():
            yield from _walk_folders(root / name, len(FOLDER_PATTERNS), 1)


def _walk_folders(folder: Path | str, depth: int, level: int = 0, *, first_level: int = 0) -> Iterator[str]:
    if level == depth:
        yield str(folder)
        return
    for entry in _entries(str(folder)):
        if FOLDER_PATTERNS[first_level + level].fullmatch(entry.name) and _is_folder(entry):
            yield from _walk_folders(entry.path, depth, level + 1, first_level=first_level)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # gone meanwhile, private to another user who shares the directory, or on a bad sector


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _is_removed(path: str) -> bool:
    try:
        Path(path).unlink(missing_ok=True)
    except OSError:
        return False  # another user's, who shares the directory, or no file at all
    return True


def _remove_if_long_empty(folder: Path, now_s: float) -> None:
    try:
        if now_s - folder.stat().st_mtime < EMPTY_FOLDER_TTL_S:
            return
        if {entry.name for entry in _entries(str(folder))} <= NAMES_BESIDE_BLOCKS:
            for name in NAMES_BESIDE_BLOCKS:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return  # not empty, or gone, or made again meanwhile: another process is at work


@contextmanager
def eviction_lock(root: Path, file_mode: int) -> Iterator[bool]:
    """Hold the directory's eviction lock, if it is free; gives whether it is ours.

    Args:
        root: the directory.
        file_mode: permissions of the lock's file when it is made.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = open_shared_file(root / LOCK_NAME, file_mode)
    has_lock = False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_lock = True
        except BlockingIOError:
            pass
        yield has_lock
    finally:
        # Closing alone would not do: a child that was forked meanwhile has the same lock.
        if has_lock:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


class FSSiblings(SiblingPlace):
    """The other namespaces of a directory, for blocks that this engine misses: folders, those changed last first.

    Args:
        root: the tier's directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._own_name = ""

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        self._own_name = own_name
        del max_namespaces  # those that differ least are chosen among more
        names = [name for name in list_namespaces(self._root) if name != own_name][:MAX_READ_DOCUMENTS]
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

    def measure_older(self, documents: Sequence[tuple[str, str]]) -> str:
        sizes = [estimate_bytes(namespace_path(self._root, name)) for name, _ in documents]
        about = "" if all(is_exact for _, is_exact in sizes) else "about "
        return about + amount_in_words(sum(num_bytes for num_bytes, _ in sizes))

    def _has(self, name: str, key: OffloadKey) -> bool:
        return os.access(block_path(namespace_path(self._root, name), key), os.F_OK)
