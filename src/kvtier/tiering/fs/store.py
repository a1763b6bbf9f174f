"""Moves blocks between rows of the primary tier and files: which are to be stored, and what a load says of each.

``block_writer`` writes. A load reads some blocks at a time and checks their headers. A damaged or expired file is
removed, one of another namespace or version is left alone, and what is no regular file goes too.
"""

import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.departed import Loss, make_losses
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.fs.block_file import name_file, plan_batch_files
from kvtier.tiering.fs.block_writer import BlockWriter
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.expiry import BlockExpiry
from kvtier.tiering.fs.external_deletions import forget_missing
from kvtier.tiering.fs.folders import (
    PAGE_NAME,
    TEMPORARY_NAME,
    FSNamespace,
    FSSiblings,
    make_namespace_folder,
    namespace_path,
)
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.permissions import find_link
from kvtier.tiering.fs.recycled_files import RecycledFiles, StoreOutcome
from kvtier.tiering.fs.system import FileStatus
from kvtier.tiering.kit.backend import BlockStore, Rows, ThreadPages
from kvtier.tiering.kit.envelope import FAILURE_OF_CHECK, FAULTS, HeaderCheck, check_block
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.page_guard import MAX_PAGE_BYTES, PageKeeper
from kvtier.tiering.kit.siblings import SiblingNamespaces
from kvtier.tiering.kit.tenant_counts import TenantCounts

logger = logging.getLogger(__name__)

HELD = (StoreOutcome.WRITTEN, StoreOutcome.EXISTED)

CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the evicting thread is waited for. It touches no row: nothing depends on its end."""


class FSBlockStore(BlockStore[FSNamespace], PageKeeper[FSNamespace]):
    """Stores and loads some blocks at a time in files; keeps no state of its own.

    Args:
        directory: where to.
        rows: the primary's.
        evictor: makes room.
        recycled: files of evicted blocks, to be written over.
        max_keys: blocks of a namespace that the index has room for.
        emit_events: whether evictions are recorded.
        clock: seconds, monotonic.
        make_counts: gives what counts the blocks of a namespace by tenant; None where there are no tenants.

    Attributes:
        losses: why blocks are gone.
        siblings: the other namespaces of the directory.
    """

    def __init__(
        self,
        directory: FSDirectory,
        rows: Rows,
        evictor: Evictor,
        recycled: RecycledFiles,
        max_keys: int,
        *,
        emit_events: bool,
        clock: Callable[[], float] = time.monotonic,
        make_counts: Callable[[], TenantCounts | None] = lambda: None,
    ) -> None:
        self._make_counts = make_counts
        self.losses = make_losses("fs", max_keys, clock)
        self.siblings = SiblingNamespaces("fs", FSSiblings(directory.root), clock, where=str(directory.root))
        self._directory = directory
        self._row_bytes = rows.row_bytes
        self._files = directory.files
        self._counters = directory.counters
        self._evictor = evictor
        self._writer = BlockWriter(directory, rows, evictor, recycled)
        self._reader = BlockReader(directory, rows)
        self._max_keys = max_keys
        self._emit_events = emit_events

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> FSNamespace:
        index = KeyIndex(
            self._max_keys,
            is_complete=is_new,
            emit_events=self._emit_events,
            losses=self.losses,
            tenant_counts=self._make_counts(),
        )
        name = identity.name
        path = namespace_path(self._directory.root, name)
        namespace = FSNamespace(identity, name, path, index)
        self._evictor.set_namespace(namespace)
        return namespace

    def contains_batch(self, namespace: FSNamespace, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        if self._evictor.deletions.refusal is not None:
            return []
        # A tenth of what making a Path of each costs; what cannot be looked at cannot be loaded either.
        found = [
            key
            for key in keys
            if os.access(namespace.block_path(key), os.F_OK) and find_link(namespace, key) is None
        ]
        if (expiry := self._directory.expiry) is not None:
            found = [key for key in found if not expiry.is_path_over(namespace.block_path(key))]
        namespace.index.add(found)
        if len(found) < len(keys):
            held = frozenset(found)
            self.siblings.look_for(namespace.identity, [key for key in keys if key not in held])
        return found

    def store(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        if self._directory.expiry is not None:
            self._remove_expired(namespace, keys, self._directory.expiry)
        held: list[OffloadKey] = []
        todo: list[tuple[OffloadKey, int]] = []
        for key, slot in zip(keys, slots, strict=True):
            if key in namespace.index and self._files.touch(namespace.block_path(key)):
                held.append(key)
            else:
                todo.append((key, slot))
        if not todo:
            return TransferOutcome(held)
        if self._directory.tenants is None:
            outcomes = self._writer.write(namespace, todo)
        else:
            with self._directory.tenants.counting([key for key, _ in todo]) as written:
                outcomes = self._writer.write(namespace, todo)
                written += [key for key, outcome in outcomes.items() if outcome is StoreOutcome.WRITTEN]
        stored = [key for key, outcome in outcomes.items() if outcome in HELD]
        namespace.index.add(stored)
        if self.siblings.found:
            self.siblings.forget(stored)
        reached = list(outcomes.values())
        num_written = reached.count(StoreOutcome.WRITTEN)
        failed = [key for key, outcome in outcomes.items() if outcome is StoreOutcome.FAILED]
        self._counters.add(
            stored_blocks=num_written,
            stored_bytes=num_written * self._row_bytes,
            declined=len(reached) - len(stored) - len(failed),
            store_errors=len(failed),
        )
        return TransferOutcome(held + stored, is_fault=bool(failed), faults=failed)

    def load(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        failures = self._reader.read(namespace, keys, slots)
        succeeded = [key for key in keys if key not in failures]
        namespace.known_folders.update(map(namespace.folder_prefix, succeeded))
        for failure in failures.values():
            self._counters.add(**{failure.value: 1})
        absent = [key for key, failure in failures.items() if failure is TierFailure.ABSENT]
        if absent:
            self._check_folders_of(namespace, absent)
        self._counters.add(hits=len(succeeded), loaded_bytes=len(succeeded) * self._row_bytes)
        faults = [key for key, failure in failures.items() if failure in FAULTS]
        return TransferOutcome(succeeded, is_fault=bool(faults), faults=faults)

    def _remove_expired(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], expiry: BlockExpiry
    ) -> None:
        """Remove those of ``keys`` that are over, so that they can be stored again."""
        for key in keys:
            path = namespace.block_path(key)
            if expiry.is_path_over(path):
                try:
                    self._directory.remove_block(key, path)
                except OSError as error:
                    logger.warning("tier fs: expired block %s cannot be removed: %s", path, error)

    def _check_folders_of(self, namespace: FSNamespace, absent: Sequence[OffloadKey]) -> None:
        """Forget every block in the folders of ``absent`` that are gone: an eviction leaves the folder."""
        by_folder: dict[str, list[OffloadKey]] = {}
        for key in absent:
            by_folder.setdefault(namespace.block_path(key).rpartition("/")[0], []).append(key)
        for folder, keys in by_folder.items():
            if os.access(folder, os.F_OK):
                continue
            prefix = namespace.folder_prefix(keys[0])
            namespace.known_folders.discard(prefix)
            self.losses.report(keys, Loss.REMOVED)  # the failed reads have taken them out of the index
            namespace.unlinked_folders.discard(prefix)
            namespace.synced_folders.discard(prefix)
            has_lost_any = forget_missing(namespace, prefix) > 0
            self._evictor.deletions.on_deleted(folder if has_lost_any else None)

    def drop(self, namespace: FSNamespace, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            path = namespace.block_path(key)
            try:
                self._directory.remove_block(key, path)
            except OSError as error:
                logger.warning("tier fs: wrong block %s cannot be removed: %s", path, error)
        namespace.index.evict(keys, Loss.DAMAGED)

    def read_page(self, namespace: FSNamespace) -> bytes | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with _explained():
            try:
                with os.fdopen(os.open(f"{namespace.path}/{PAGE_NAME}", flags), "rb") as file:
                    return file.read(MAX_PAGE_BYTES) or b""
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                return b""  # a link is no page of ours

    def create_page(self, namespace: FSNamespace, data: bytes) -> None:
        directory = self._directory
        if (refusal := directory.find_refusal()) is not None:
            raise TierError("fs", refusal)
        temporary = directory.root / TEMPORARY_NAME / f"{directory.owner}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _explained():
            make_namespace_folder(directory.root, namespace, directory.file_mode, str(directory.owner))
            try:
                with os.fdopen(os.open(temporary, flags, directory.file_mode), "wb") as file:
                    os.fchmod(file.fileno(), directory.file_mode)
                    file.write(data)
                    file.flush()
                    name_file(temporary, Path(namespace.path) / PAGE_NAME)
            finally:
                temporary.unlink(missing_ok=True)

    def remove_page(self, namespace: FSNamespace) -> None:
        self._counters.add(damaged=1)
        with _explained():
            (Path(namespace.path) / PAGE_NAME).unlink(missing_ok=True)

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot()

    def close(self) -> None:
        self._evictor.shutdown(CLOSE_TIMEOUT_S)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what the system says of a page into the error of a tier."""
    try:
        yield
    except OSError as error:
        raise TierError("fs", f"the page of a namespace cannot be read or written: {error}") from error


class BlockReader:
    """Reads some blocks at a time; keeps no state but header pages per thread.

    Args:
        directory: where from.
        rows: the primary's.
    """

    def __init__(self, directory: FSDirectory, rows: Rows) -> None:
        self._block_bytes = directory.block_bytes
        self._rows = rows
        self._files = directory.files
        self._expiry = directory.expiry
        self._failed = FailedReads(directory)
        self._batch_blocks = plan_batch_files(rows.row_bytes)
        self._pages = ThreadPages(self._batch_blocks)
        self._outage = directory.outage

    def read(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> dict[OffloadKey, TierFailure]:
        """Read blocks into slots; return what is wrong with those that failed.

        Thread: any of the pool's; blocks.
        """
        failures: dict[OffloadKey, TierFailure] = {}
        pages = self._pages.of_this_thread()
        digest, block_format = namespace.identity.digest, namespace.format
        for start in range(0, len(keys), self._batch_blocks):
            batch = keys[start : start + self._batch_blocks]
            files = []
            for key, slot, page in zip(batch, slots[start:], pages, strict=False):
                files.append((namespace.block_path(key), (page, self._rows.row(slot))))
            for key, (path, (page, row)), status in zip(batch, files, self._files.read(files), strict=True):
                found = HeaderCheck.DAMAGED
                if isinstance(status, FileStatus) and status.num_bytes >= self._block_bytes:
                    found = (
                        block_format.open(page, row, key, row)
                        if block_format.is_encrypted
                        else check_block(page, row, key, digest)
                    )
                if (
                    self._expiry is not None
                    and isinstance(status, FileStatus)
                    and self._expiry.is_over(status.modified_s)
                ):
                    self._failed.remove(namespace, key, path, status, Loss.EXPIRED)
                    failures[key] = TierFailure.ABSENT
                elif found is not HeaderCheck.OK:
                    failures[key] = self._failed.explain(namespace, key, path, status, found)
        if self._outage.is_out and TierFailure.IO_ERROR not in failures.values():
            self._outage.on_success("load")
        return failures


class FailedReads:
    """Deals with blocks that could not be read; keeps no state.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: FSDirectory) -> None:
        self._directory = directory
        self._files = directory.files
        self._outage = directory.outage

    def explain(
        self,
        namespace: FSNamespace,
        key: OffloadKey,
        path: str,
        status: FileStatus | OSError,
        found: HeaderCheck,
    ) -> TierFailure:
        """Return why a block was not loaded; one that cannot be loaded again leaves the index."""
        if isinstance(status, FileStatus) and self._files.is_still(path, status):
            failure = FAILURE_OF_CHECK[found]
            logger.warning("tier fs: block %s is %s (%s)", path, failure.value, found.value)
            if failure is TierFailure.DAMAGED:
                self.remove(namespace, key, path, status, Loss.DAMAGED)
        elif isinstance(status, FileStatus | FileNotFoundError):
            failure = TierFailure.ABSENT  # or evicted, and its file written over, while it was read
        elif self._files.is_irregular(path):
            logger.warning("tier fs: %s is no regular file, as a block is one: it is removed", path)
            failure = TierFailure.DAMAGED
            self._remove_irregular(path)
        else:
            self._outage.on_failure("load", f"a block was not loaded: {status}")
            return TierFailure.IO_ERROR
        namespace.index.discard((key,), Loss.FOREIGN if failure is TierFailure.FOREIGN else None)
        return failure

    def remove(
        self, namespace: FSNamespace, key: OffloadKey, path: str, status: FileStatus, why: Loss
    ) -> None:
        """Remove a block that was read, unless its file was replaced since, and remember ``why``."""
        try:
            self._directory.remove_block(key, path, status)
            namespace.index.evict((key,), why)
        except OSError as error:
            logger.warning("tier fs: block %s (%s) cannot be removed: %s", path, why.name.lower(), error)

    def _remove_irregular(self, path: str) -> None:
        """Remove what is not counted; a folder only when it is empty."""
        try:
            if Path(path).is_dir() and not Path(path).is_symlink():
                Path(path).rmdir()
            else:
                Path(path).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("tier fs: %s cannot be removed: %s", path, error)
