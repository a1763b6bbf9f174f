"""The tier's directory, made ready: folders, permissions, what its file system can do.

Whether the directory can be written is found out once, by writing, because permissions alone do not say it.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import ConfigError, PlaceError
from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.expiry import BlockExpiry
from kvtier.tiering.fs.file_support import FileSupport, detect_file_support
from kvtier.tiering.fs.folders import TEMPORARY_NAME, TENANTS_NAME, USAGE_NAME, make_root
from kvtier.tiering.fs.settings import FSSettings, explain_shrinking
from kvtier.tiering.fs.shared_usage import SharedUsage, read_record
from kvtier.tiering.fs.system import FileStatus, Owner, SystemCalls, current_owner
from kvtier.tiering.fs.tenant_usage import UNREPORTED_SHARE, Excesses, TenantUsage
from kvtier.tiering.kit.backend import Counters
from kvtier.tiering.kit.disk import ALIGNMENT_BYTES, Durability, is_aligned
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.health import OutageLog
from kvtier.tiering.kit.lifetime import make_lifetime
from kvtier.tiering.kit.mount import MountPoint
from kvtier.tiering.kit.private_folders import find_refusal

logger = logging.getLogger(__name__)

COUNTER_NAMES = (
    "hits", "loaded_bytes", "absent", "damaged", "foreign", "io_error",
    "stored_blocks", "stored_bytes", "declined", "store_errors", "evicted_blocks", "evicted_bytes",
)  # fmt: skip
"""Counts that are there from the beginning; the first row is about loads, with the reasons of misses."""


@dataclass(frozen=True, slots=True)
class FSDirectory:
    """A directory that is ready, with what the store and the evictor share.

    Attributes:
        root: the directory.
        file_mode: permissions of files in it.
        block_bytes: length of a block's file.
        has_direct_io: whether blocks bypass the page cache.
        files: reads, publishes and removes them.
        usage: the shared count of bytes.
        owner: this process.
        counters: what happened.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, comparable with the file system's times.
        expiry: which blocks are over; None: none ever is.
        tenants: what tenants keep, where they have quotas.
        mount: where its file system is mounted.
        device: number of its file system at the start.
        outage: says once that the directory cannot be used.
        full_disk: says once that the disk is full.
    """

    root: Path
    file_mode: int
    block_bytes: int
    has_direct_io: bool
    files: BlockFiles
    usage: SharedUsage
    owner: Owner
    counters: Counters
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    mount: MountPoint
    device: int
    outage: OutageLog
    full_disk: OutageLog
    expiry: BlockExpiry | None = None
    tenants: TenantUsage | None = None

    def remove_block(self, key: OffloadKey, path: str, status: FileStatus | None = None) -> None:
        """Remove a block's file and count it out; with ``status`` only if it is still the file that had it.

        Raises:
            OSError: the system refused.
        """
        num_bytes = self.files.remove(path, status)
        self.usage.remove(num_bytes)
        if self.tenants is not None:
            self.tenants.remove(get_offload_tenant(key), num_bytes)

    def find_refusal(self) -> str | None:
        """Return why the directory must not be used now; None where it may, or is missing and may be made."""
        if self.mount.is_away():
            return f"nothing is mounted at {self.mount.path} any more"
        return find_refusal(self.root, self.file_mode)


def open_directory(
    settings: FSSettings,
    rows: memoryview,
    calls: SystemCalls,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    excesses: Excesses | None = None,
) -> FSDirectory:
    """Make the directory ready for rows such as these.

    Args:
        settings: where it is and who may read it.
        rows: shape (num_blocks, row_stride).
        calls: the system.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
        excesses: compares what tenants keep with their quotas; None: they have none.

    Raises:
        ConfigError: it cannot be written, others may write to it, it holds more than twice the capacity, or direct I/O
            is insisted on and impossible.
    """
    require_private(settings)
    owner = current_owner()
    temporary_path = settings.root_dir / TEMPORARY_NAME
    try:
        make_root(settings.root_dir, settings.file_mode)
        scratch_path = temporary_path / f"{owner}-{secrets.token_hex(8)}"
        support = detect_file_support(settings.root_dir, scratch_path, settings.file_mode, calls)
    except OSError as error:
        remedy = f"cannot be written ({error}): give a directory that this user may write"
        raise PlaceError("root_dir", str(settings.root_dir), remedy) from error
    require_private(settings)
    require_no_shrinking(settings, owner, wall_clock())
    support = choose_support(settings, support, are_rows_aligned=is_aligned(rows))
    lifetime = make_lifetime(settings.ttl_s)
    files = BlockFiles(
        support,
        temporary_path,
        owner,
        settings.file_mode,
        calls,
        wall_clock,
        keeps_modified=lifetime is not None,
    )
    usage_path = settings.root_dir / USAGE_NAME
    where = f"tier fs at {settings.root_dir}"
    outage = OutageLog(where)
    block_bytes = HEADER_PAGE_BYTES + (rows.shape or (0, 0))[1]
    tenants = None
    if excesses is not None:
        tenants_path = settings.root_dir / TENANTS_NAME
        unreported_bytes = settings.capacity_bytes // UNREPORTED_SHARE
        tenants = TenantUsage(
            tenants_path, settings.file_mode, block_bytes, excesses, outage, unreported_bytes
        )
    return FSDirectory(
        root=settings.root_dir,
        file_mode=settings.file_mode,
        block_bytes=block_bytes,
        has_direct_io=support.has_direct_io,
        files=files,
        usage=SharedUsage(usage_path, owner, settings.capacity_bytes, settings.file_mode, wall_clock, outage),
        owner=owner,
        counters=Counters(*COUNTER_NAMES),
        clock=clock,
        wall_clock=wall_clock,
        mount=MountPoint(settings.root_dir),
        device=settings.root_dir.stat().st_dev,
        outage=outage,
        full_disk=OutageLog(where),
        expiry=None if lifetime is None else BlockExpiry(lifetime, wall_clock, clock),
        tenants=tenants,
    )


def require_private(settings: FSSettings) -> None:
    """Refuse a directory that others may change.

    Raises:
        ConfigError: they may; the message says what to do.
    """
    for folder in (settings.root_dir, settings.root_dir / TEMPORARY_NAME):
        refusal = find_refusal(folder, settings.file_mode)
        if refusal is not None:
            raise PlaceError("root_dir", str(folder), refusal)


def require_no_shrinking(settings: FSSettings, here: Owner, now_s: float) -> None:
    """Refuse to empty in silence what other engines have stored, or will store, by a capacity that counts for all.

    Raises:
        ConfigError: the capacity is less than half of theirs, and ``allow_shrink`` is not set.
    """
    if settings.allow_shrink:
        return
    record = read_record(settings.root_dir / USAGE_NAME)
    reason = explain_shrinking(settings.capacity_bytes, record, here, now_s)
    if reason is not None:
        raise PlaceError("capacity_bytes", settings.capacity_bytes, reason)


def choose_support(settings: FSSettings, found: FileSupport, *, are_rows_aligned: bool) -> FileSupport:
    """Decide how blocks are written, given what the file system can do; logs once what it lacks.

    Raises:
        ConfigError: direct I/O is insisted on and impossible.
    """
    reason = None
    if not found.has_direct_io:
        reason = f"the file system of {settings.root_dir} refuses it"
    elif not are_rows_aligned:
        reason = (
            f"rows of the primary tier are not multiples of {ALIGNMENT_BYTES} bytes in address and length"
        )
    if reason is not None and settings.direct_io:
        raise ConfigError("direct_io", value=True, remedy=f'{reason}: say "auto" to go without')
    if reason is not None and settings.direct_io is None:
        logger.info("tier fs: no direct I/O, %s; blocks go through the page cache", reason)
    if not found.has_unnamed_files:
        logger.info("tier fs: %s has no unnamed files; a crash leaves temporary ones", settings.root_dir)
    has_direct_io = reason is None and settings.direct_io is not False
    is_durable = settings.durability is Durability.FDATASYNC
    return FileSupport(has_direct_io, found.has_unnamed_files, is_durable=is_durable)
