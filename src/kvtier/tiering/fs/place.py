"""A directory of the fs tier without an engine: what is in it, whether it is whole, and its removal.

Engines may use the directory meanwhile. Their shared count stays right: what is about to be removed is announced in it,
as any process does that removes while another one counts. An engine finds removed files gone, which is a miss; it
notices within a second that a folder is gone, and forgets what was in it.

The file of an evicted block is written over and gets another name. A file that does not pass its check is therefore
read again, by its name: only one that fails twice, and is the same file, is damaged.
"""

import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import ConfigError, TierError
from kvtier.settings import parse_settings
from kvtier.tiering.fs.file_check import FileCheck, check_file
from kvtier.tiering.fs.folders import (
    FOLDER_PATTERNS,
    LOCK_NAME,
    NAMES_BESIDE_BLOCKS,
    NAMESPACE_DOCUMENT_NAME,
    PAGE_NAME,
    TEMPORARY_NAME,
    TENANTS_NAME,
    USAGE_NAME,
    BlockFile,
    namespace_of,
    parse_block_name,
    read_document,
    walk_blocks,
)
from kvtier.tiering.fs.settings import NO_LIMIT_BYTES, FSSettings, explain_shrinking
from kvtier.tiering.fs.shared_usage import SharedUsage, UsageRecord, read_record
from kvtier.tiering.fs.system import Owner, current_owner
from kvtier.tiering.fs.tenant_usage import forget_table
from kvtier.tiering.kit.place import (
    FAULTS_OF_PLACE,
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

MAX_ATTEMPTS = 3
"""Readings of a name that leads to another file each time: an engine evicts the block and stores it again all the
time. More would read it for ever."""

OWN_NAMES = frozenset({LOCK_NAME, USAGE_NAME, TENANTS_NAME, TEMPORARY_NAME})


class FSPlace(Place):
    """The directory of one or more engines.

    Args:
        root: an existing directory of the tier.
    """

    tier: ClassVar[str] = TIER_TYPE

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._root = root
        self._usage: SharedUsage | None = None

    def namespaces(self) -> list[PlaceNamespace]:
        found = [path for path in self._list_root() if FOLDER_PATTERNS[0].fullmatch(path.name)]
        folders = [path for path in sorted(found) if path.is_dir() and not path.is_symlink()]
        return [PlaceNamespace(path.name, read_document(path)) for path in folders]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        # A folder that cannot be read is no empty one; engines pass it over, as they share the directory.
        for path in self._list_root():
            if FOLDER_PATTERNS[0].fullmatch(path.name) and (namespaces is None or path.name in namespaces):
                _require_readable(path)
        for block in walk_blocks(self._root, namespaces):
            yield _as_place_block(block)

    def summary(self) -> PlaceSummary:
        here, now_s = current_owner(), time.time()
        record = self._read_record()
        temporary = foreign = Amount()
        for path in self._list_root():
            if path.name == TEMPORARY_NAME:
                temporary = _amount_below(path)
            elif path.name not in OWN_NAMES and not FOLDER_PATTERNS[0].fullmatch(path.name):
                foreign = foreign.plus(*_amount_below(path))
        return PlaceSummary(
            capacity_bytes=record.limit_bytes or None,
            temporary=temporary,
            foreign=foreign,
            users=tuple(
                sorted(
                    {
                        _describe(member.owner, here)
                        for member, state in record.members.items()
                        if not member.owner.is_dead(here, now_s - state.seen_s)
                    }
                )
            ),
        )

    def check(self, block: PlaceBlock) -> BlockState:
        found = self._check_once(block)
        for _ in range(MAX_ATTEMPTS - 1):
            if found.state not in FAULTS_OF_PLACE:
                return found.state
            again = self._check_once(block)
            if again.state not in FAULTS_OF_PLACE or again.inode == found.inode:
                return again.state
            found = again
        return BlockState.BEING_WRITTEN

    def _check_once(self, block: PlaceBlock) -> FileCheck:
        name = parse_block_name(Path(block.address).name)
        return check_file(block.address, block.namespace, name, self.opener)

    def begin_removal(self) -> None:
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise TierError(TIER_TYPE, f"{self._root} is not writable for this user: run as its owner")
        if (self._root / USAGE_NAME).exists():
            mode = stat.S_IMODE((self._root / USAGE_NAME).stat().st_mode)
            usage_path = self._root / USAGE_NAME
            self._usage = SharedUsage(usage_path, current_owner(), NO_LIMIT_BYTES, mode, time.time)

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        announced_bytes = sum(block.num_bytes for block in blocks)
        if self._usage is not None:
            self._usage.begin_removal(announced_bytes)
        removed = Amount()
        try:
            for block in blocks:
                num_bytes = _remove_file(block, unless_changed=unless_changed)
                removed = removed.plus(num_bytes is not None, num_bytes or 0)
        finally:
            if self._usage is not None:
                self._usage.end_removal(announced_bytes, removed.num_bytes)
            if removed.num:
                forget_table(self._root / TENANTS_NAME)
        return removed

    def end_removal(self, namespaces: Collection[str]) -> None:
        for name in namespaces:
            _remove_folders(self._root / name)
        if self._usage is not None:
            self._usage.leave()
            self._usage = None

    def _list_root(self) -> list[Path]:
        try:
            return list(self._root.iterdir())
        except OSError as error:
            raise TierError(TIER_TYPE, f"{self._root} cannot be read: {error.strerror}") from error

    def _read_record(self) -> UsageRecord:
        return read_record(self._root / USAGE_NAME)


def open_fs_place(own: Mapping[str, object]) -> FSPlace:
    """Return the place of a tier's own settings; the capacity need not be among them.

    Raises:
        ConfigError: there is no such directory, it cannot be read, or no tier has used it.
    """
    settings = parse_settings(FSSettings, {"capacity_bytes": NO_LIMIT_BYTES, **own}, f"tier {TIER_TYPE!r}")
    root = settings.root_dir
    try:
        names = {path.name for path in root.iterdir()}
    except OSError as error:
        remedy = f"cannot be read ({error.strerror}): give the root_dir of an fs tier"
        raise ConfigError("PLACE", str(root), remedy) from error
    # A tier that has just begun has made no more than the folder of temporary files.
    is_new = bool(names) and names <= OWN_NAMES
    if not is_new and USAGE_NAME not in names and not any(map(FOLDER_PATTERNS[0].fullmatch, names)):
        remedy = f"no fs tier has used this directory, it has no {USAGE_NAME}: give the root_dir of one"
        raise ConfigError("PLACE", str(root), remedy)
    return FSPlace(root)


def probe_fs_place(own: Mapping[str, object]) -> list[TierFinding]:
    """Return whether a tier could use its directory, which it would make.

    Raises:
        ConfigError: a setting that cannot work.
    """
    settings = parse_settings(FSSettings, own, f"tier {TIER_TYPE!r}")
    root = settings.root_dir
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir():
        return [TierFinding(is_good=False, text=f"{existing} is no directory: give another root_dir")]
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{existing} is not writable for this user: choose another or change its owner"
        return [TierFinding(is_good=False, text=text)]
    is_there = "writable" if existing == root else f"will be made in {existing}"
    findings = [TierFinding(is_good=True, text=f"{root} {is_there}")]
    record = UsageRecord()
    if existing == root:
        record = FSPlace(root)._read_record()  # noqa: SLF001 - this file's class
        findings = _probe_access(root, settings) or findings
    shrinking = None
    if not settings.allow_shrink:
        shrinking = explain_shrinking(settings.capacity_bytes, record, current_owner(), time.time())
    if shrinking is not None:
        text = f"capacity_bytes {settings.capacity_bytes} {shrinking}"
        findings.append(TierFinding(is_good=False, text=text))
    # What the tier has there already is part of its capacity.
    used_bytes = record.used_bytes
    free_bytes = shutil.disk_usage(existing).free
    if settings.capacity_bytes > free_bytes + used_bytes:
        text = (
            f"capacity_bytes is {settings.capacity_bytes}, and its disk has {free_bytes} free: "
            "the tier will hold less, and the disk will be full"
        )
        findings.append(TierFinding(is_good=True, text=text, is_note=True))
    return findings


def _probe_access(root: Path, settings: FSSettings) -> list[TierFinding]:
    """Return for which folders an engine would not use the directory, or stores would fail."""
    folders = [root, *(path for path in root.glob("*") if FOLDER_PATTERNS[0].fullmatch(path.name))]
    links = [path for path in folders[1:] if path.is_symlink()]
    refusals = {path: find_refusal(path, settings.file_mode) for path in folders if path not in links}
    refusals |= dict.fromkeys(links, "it is a symbolic link, behind which bytes are not counted: remove it")
    return [
        TierFinding(is_good=False, text=f"{path} is refused: {refusal}")
        for path, refusal in refusals.items()
        if refusal is not None
    ]


def _as_place_block(block: BlockFile) -> PlaceBlock:
    return PlaceBlock(
        namespace=namespace_of(block.path),
        address=block.path,
        num_bytes=block.num_bytes,
        used_s=block.mtime_ns / 1e9,
        stamp=(block.mtime_ns,),
        tenant=get_offload_tenant(OffloadKey(block.name)),
        name=block.name,
    )


def _remove_file(block: PlaceBlock, *, unless_changed: bool) -> int | None:
    """Remove a block's file and return its length, None when it was gone or has changed.

    Raises:
        TierError: the system refused.
    """
    path = Path(block.address)
    try:
        found = path.lstat()
        if unless_changed and (found.st_mtime_ns,) != block.stamp:
            return None
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TierError(TIER_TYPE, f"{path} cannot be removed: {error.strerror}") from error
    return found.st_size


def _require_readable(folder: Path) -> None:
    try:
        os.scandir(folder).close()
    except PermissionError as error:
        raise TierError(TIER_TYPE, f"{folder} may not be read by this user: run as its owner") from error
    except OSError:
        return  # removed meanwhile, or no folder


def _remove_folders(top: Path) -> None:
    """Remove the folders of a namespace, as far as they are empty; its document and page when nothing else is left."""
    if top.is_symlink():
        return  # what is behind it is not the tier's
    folders: list[Path] = []
    for pattern in ("?/?", "?"):
        with suppress(OSError):  # another purge removes folders beside this one
            folders += top.glob(pattern)
    for folder in folders:
        if folder.parent.is_symlink():
            continue  # as above
        with suppress(OSError):  # an engine has stored a block in it meanwhile
            folder.rmdir()
    document = top / NAMESPACE_DOCUMENT_NAME
    text = read_document(top)
    with suppress(OSError):
        if {path.name for path in top.iterdir()} <= NAMES_BESIDE_BLOCKS:
            (top / PAGE_NAME).unlink(missing_ok=True)
            mode = stat.S_IMODE(document.stat().st_mode) if document.exists() else 0
            document.unlink(missing_ok=True)
            try:
                top.rmdir()
            except OSError:  # an engine has begun a folder in between, and counts on the document
                if text and not document.exists():
                    document.write_text(text, encoding="utf-8")
                    document.chmod(mode)


def _amount_below(path: Path) -> Amount:
    """Return how many files there are at and below ``path``, and their bytes."""
    amount = Amount()
    try:
        if not path.is_dir() or path.is_symlink():
            return Amount(1, path.lstat().st_size)
        for folder, _, names in os.walk(path):
            for name in names:
                with suppress(OSError):
                    amount = amount.plus(1, (Path(folder) / name).lstat().st_size)
    except OSError:
        return amount
    return amount


def _describe(owner: Owner, here: Owner) -> str:
    return f"process {owner.pid}" + ("" if owner.host == here.host else f" on another host ({owner.host})")
