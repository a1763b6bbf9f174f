"""A directory of packs without an engine: what is in it, whether it is whole, and its removal.

Blocks are what the journals say. Engines may use the directory meanwhile: a slot is written over after its journal has
said that it holds nothing. So a block that does not pass its check is damaged only if the journal, read afterwards,
still says that the slot holds it, and a second reading fails as well. An engine finds removed blocks gone, a miss.
"""

import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from kvtier.errors import ConfigError, NamespaceDocumentError, PlaceError, TierError
from kvtier.namespace import parse_document
from kvtier.settings import parse_settings
from kvtier.tiering.fs import purge_requests
from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.directory_lock import LOCK_NAME
from kvtier.tiering.fs.documents import (
    DOCUMENT_NAME,
    MAX_DOCUMENT_BYTES,
    NAMES_BESIDE,
    list_namespaces,
    read_beside,
)
from kvtier.tiering.fs.file_systems import require_unshared
from kvtier.tiering.fs.notes import NOTES_SUFFIX, OthersNotes, list_capacities
from kvtier.tiering.fs.pack_files import (
    NAMESPACE_NAME,
    NEW_SUFFIX,
    STAT_BLOCK_BYTES,
    TEMPORARY_SUFFIX,
    FoundPack,
    list_all_packs,
    list_older_blocks,
    list_older_folders,
    list_packs,
    older_blocks_in,
)
from kvtier.tiering.fs.pack_view import PackReader, PackView
from kvtier.tiering.fs.removal import BlockRemoval, describe_process
from kvtier.tiering.fs.settings import PackSettings, explain_shrinking
from kvtier.tiering.fs.system_calls import PRIVATE_MODE, REAL_CALLS
from kvtier.tiering.kit.place import (
    FAULTS_OF_PLACE,
    NOTHING,
    Amount,
    BlockState,
    Place,
    PlaceBlock,
    PlaceNamespace,
    PlaceSummary,
    TierFinding,
)
from kvtier.tiering.kit.private_folders import find_refusal

TIER_TYPE = "fs"

NO_LIMIT_BYTES = 2**63 - 1

MAX_ATTEMPTS = 3
"""Readings of a slot to which the same block returns each time. More would read it for ever."""

OWN_NAMES = frozenset({LOCK_NAME, purge_requests.FILE_NAME, purge_requests.TEMPORARY_NAME})

OLDER_NAMES = frozenset({".usage", ".tenants"})
OLDER_TEMPORARY_NAME = "tmp"
"""What the tier that kept a file a block has beside its blocks."""

OLDER_SLAB_MAGIC = b"kvtier-slab\r\n\x1a\n\xf3"
"""What the file of the slab tier of older versions begins with."""


class PackPlace(Place):
    """The directory of one or more engines.

    Args:
        root: an existing directory of the tier.
        file_mode: permissions of files in it, which say whether those of other users count.
        clock: seconds, monotonic.
        pause: waits so many seconds.
    """

    tier: ClassVar[str] = TIER_TYPE

    def __init__(
        self,
        root: Path,
        file_mode: int = PRIVATE_MODE,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(str(root))
        self._root = root
        process = f"{os.getpid()}x{secrets.token_hex(4)}"
        self._directory = PackDirectory(
            root, 1, NO_LIMIT_BYTES, process=process, file_mode=file_mode, clock=clock, pause=pause
        )
        self._notes = OthersNotes(root, process, file_mode=file_mode)
        self._reader = PackReader(self._directory)
        self._removal = BlockRemoval(TIER_TYPE, self._directory, self._reader, self._notes, clock, pause)
        self._other_format = NOTHING
        self._is_forced = False

    def namespaces(self) -> list[PlaceNamespace]:
        self._list_root()
        return [PlaceNamespace(name, self._document(name)) for name in sorted(list_namespaces(self._root))]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        self._list_root()
        self._other_format = NOTHING
        for name in sorted(list_namespaces(self._root)):
            if namespaces is None or name in namespaces:
                is_encrypted = _is_encrypted(self._document(name))
                for found in self._list_packs(name):
                    yield from self._blocks_in(found, is_encrypted=is_encrypted)

    def summary(self) -> PlaceSummary:
        temporary = foreign = NOTHING
        other_format = self._other_format
        for path in self._list_root():
            if path.name in OWN_NAMES | OLDER_NAMES or path.suffix == NOTES_SUFFIX:
                continue
            if NAMESPACE_NAME.fullmatch(path.name) and not path.is_symlink():
                continue
            amount = _amount_below(path)
            if path.name == OLDER_TEMPORARY_NAME:
                temporary = temporary.plus(*amount)
            elif self._is_slab(path):
                other_format = other_format.plus(*amount)
            else:
                foreign = foreign.plus(*amount)
        for found in list_all_packs(self._root):
            for suffix in found.files.keys() & {NEW_SUFFIX, TEMPORARY_SUFFIX}:
                temporary = temporary.plus(1, found.files[suffix].st_size)
        for num_bytes in list_older_blocks(self._root):
            other_format = other_format.plus(1, num_bytes)
        states = [one.state for one in self._notes.poll()]
        return PlaceSummary(
            capacity_bytes=min((state.capacity_bytes for state in states), default=None),
            temporary=temporary,
            foreign=foreign,
            other_format=other_format,
            users=tuple(sorted(set(map(describe_process, states)))),
        )

    def check(self, block: PlaceBlock) -> BlockState:
        stored_s: int | None = None
        for _ in range(MAX_ATTEMPTS):
            view = self._reader.find(block)
            if view is None:
                return BlockState.GONE
            state = view.check(block, self.opener)
            if state not in FAULTS_OF_PLACE:
                return state
            view.refresh()
            found = view.find(block)
            if found is None:
                return BlockState.GONE
            if found.stored_s == stored_s:
                return state
            stored_s = found.stored_s
        return BlockState.BEING_WRITTEN

    def begin_removal(self, *, is_forced: bool = False) -> None:
        self._is_forced = is_forced
        refusal = find_refusal(self._root, self._directory.file_mode)
        if refusal is not None:
            raise TierError(TIER_TYPE, f"{self._root} is refused: {refusal}")
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise TierError(TIER_TYPE, f"{self._root} is not writable for this user: run as its owner")

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        try:
            return self._removal.remove(blocks, unless_changed=unless_changed, is_forced=self._is_forced)
        except OSError as error:
            raise TierError(TIER_TYPE, f"{self._root} cannot be changed: {error}") from error

    def end_removal(self, namespaces: Collection[str]) -> None:
        try:
            self._removal.close()
            for name in namespaces:
                self._removal.remove_namespace(name)
        except OSError as error:
            raise TierError(TIER_TYPE, f"{self._root} cannot be changed: {error}") from error

    def remove_older_formats(self, *, is_dry_run: bool) -> Amount:
        if not is_dry_run:
            self.begin_removal()
        try:
            removed = self._remove_older_blocks(is_dry_run=is_dry_run)
            for path in filter(self._is_slab, self._list_root()):
                removed = removed.plus(1, path.lstat().st_blocks * STAT_BLOCK_BYTES)
                if not is_dry_run:
                    path.unlink()
            for name in () if is_dry_run else OLDER_NAMES:
                (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            raise TierError(TIER_TYPE, f"{self._root} cannot be changed: {error}") from error
        return removed

    def _remove_older_blocks(self, *, is_dry_run: bool) -> Amount:
        """Remove the files of blocks, and the folders that are empty then."""
        removed, namespaces = NOTHING, set()
        for folder in list_older_folders(self._root):
            for path, num_bytes in older_blocks_in(folder):
                removed = removed.plus(1, num_bytes)
                if not is_dry_run:
                    path.unlink(missing_ok=True)
            namespaces.add(folder.parents[1].name)
            for emptied in () if is_dry_run else (folder, folder.parent):
                with suppress(OSError):  # there is something else in it
                    emptied.rmdir()
        for name in () if is_dry_run else namespaces:
            self._directory.remove_folder(name, NAMES_BESIDE)
        return removed

    def close(self) -> None:
        with suppress(OSError):  # ``end_removal`` tells
            self._removal.close()
        self._reader.close()
        self._notes.close()

    def _list_root(self) -> list[Path]:
        try:
            return list(self._root.iterdir())
        except OSError as error:
            raise TierError(TIER_TYPE, f"{self._root} cannot be read: {error.strerror}") from error

    def _is_slab(self, path: Path) -> bool:
        """Return whether this is the file of a slab tier of an older version."""
        return read_beside(self._root, path.name, len(OLDER_SLAB_MAGIC)) == OLDER_SLAB_MAGIC

    def _list_packs(self, name: str) -> list[FoundPack]:
        """Return the packs of a namespace. A folder that may not be read is no empty one.

        Raises:
            TierError: it may not.
        """
        folder = self._directory.folder_of(name)
        refusal = find_refusal(folder, self._directory.file_mode)
        if refusal is not None:
            raise TierError(TIER_TYPE, f"{folder} is refused: {refusal}")
        try:
            os.scandir(folder).close()
        except PermissionError as error:
            message = f"{folder} may not be read by this user: run as its owner"
            raise TierError(TIER_TYPE, message) from error
        except OSError:
            return []  # removed meanwhile
        return [found for found in list_packs(folder) if found.is_whole]

    def _blocks_in(self, found: FoundPack, *, is_encrypted: bool) -> Iterator[PlaceBlock]:
        path = found.path()
        pack = self._directory.open(found.folder.name, path.name, has_own_rows=False)
        if pack is not None:
            try:
                yield from PackView(pack).blocks(is_encrypted=is_encrypted)
            finally:
                pack.close()
        elif path.exists():
            # Its first page is damaged or says more than this version understands.
            self._other_format = self._other_format.plus(1, found.num_bytes)

    def _document(self, name: str) -> str:
        found = read_beside(self._directory.folder_of(name), DOCUMENT_NAME, MAX_DOCUMENT_BYTES)
        return "" if found is None else found.decode("utf-8", "replace")


def open_pack_place(own: Mapping[str, object]) -> PackPlace:
    """Return the place of a tier's own settings; the capacity need not be among them.

    Raises:
        ConfigError: there is no such directory, it cannot be read, or no tier has used it.
    """
    settings = parse_settings(PackSettings, {"capacity_bytes": NO_LIMIT_BYTES, **own}, f"tier {TIER_TYPE!r}")
    root = settings.root_dir
    try:
        names, mode = [path.name for path in root.iterdir()], root.stat().st_mode
    except OSError as error:
        remedy = f"cannot be read ({error.strerror}): give the root_dir of an fs tier"
        raise ConfigError("PLACE", str(root), remedy) from error
    if not any(
        name in OWN_NAMES | OLDER_NAMES or name.endswith(NOTES_SUFFIX) or NAMESPACE_NAME.fullmatch(name)
        for name in names
    ):
        remedy = "no fs tier has used this directory: give the root_dir of one"
        raise ConfigError("PLACE", str(root), remedy)
    # A directory that its users share with a group says so itself.
    shared_mode = PRIVATE_MODE | (mode & (stat.S_IRGRP | stat.S_IWGRP))
    return PackPlace(root, settings.file_mode if "file_mode" in own else shared_mode)


def probe_pack_place(own: Mapping[str, object]) -> list[TierFinding]:
    """Return whether a tier could use its directory, which it would make.

    Raises:
        ConfigError: a setting that cannot work.
    """
    settings = parse_settings(PackSettings, own, f"tier {TIER_TYPE!r}")
    root = settings.root_dir
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir():
        return [TierFinding(is_good=False, text=f"{existing} is no directory: give another root_dir")]
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{existing} is not writable for this user: choose another or change its owner"
        return [TierFinding(is_good=False, text=text)]
    try:
        require_unshared(root, REAL_CALLS)
    except PlaceError as error:
        return [TierFinding(is_good=False, text=str(error))]
    is_there = "writable" if existing == root else f"will be made in {existing}"
    findings = _probe_access(root, settings.file_mode)
    findings = findings or [TierFinding(is_good=True, text=f"{root} {is_there}")]
    used_bytes = sum(found.num_bytes for found in list_all_packs(root)) + sum(list_older_blocks(root))
    shrinking = explain_shrinking(settings, used_bytes, list_capacities(root, settings.file_mode))
    if shrinking is not None:
        text = f"capacity_bytes {settings.capacity_bytes} {shrinking}"
        findings.append(TierFinding(is_good=False, text=text))
    # What the tier has there already is part of its capacity.
    free_bytes = shutil.disk_usage(existing).free
    if settings.capacity_bytes > free_bytes + used_bytes:
        text = (
            f"capacity_bytes is {settings.capacity_bytes}, and its disk has {free_bytes} free: "
            "the tier will hold less, and the disk will be full"
        )
        findings.append(TierFinding(is_good=True, text=text, is_note=True))
    return findings


def _probe_access(root: Path, file_mode: int) -> list[TierFinding]:
    """Return for which folders an engine would not use the directory, or stores would fail."""
    found = [path for path in root.glob("*") if NAMESPACE_NAME.fullmatch(path.name)]
    links = [path for path in found if path.is_symlink()]
    refusals = {path: find_refusal(path, file_mode) for path in (root, *found) if path not in links}
    refusals |= dict.fromkeys(links, "it is a symbolic link, behind which bytes are not counted: remove it")
    return [
        TierFinding(is_good=False, text=f"{path} is refused: {refusal}")
        for path, refusal in refusals.items()
        if refusal is not None
    ]


def _is_encrypted(document: str) -> bool:
    with suppress(NamespaceDocumentError):
        return bool(parse_document(document).get("encryption"))
    return False


def _amount_below(path: Path) -> Amount:
    """Return how many files there are at and below ``path``, and their bytes."""
    amount = NOTHING
    with suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            return Amount(1, path.lstat().st_size)
        for folder, _, names in os.walk(path):
            for name in names:
                with suppress(OSError):
                    amount = amount.plus(1, (Path(folder) / name).lstat().st_size)
    return amount
