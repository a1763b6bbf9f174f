"""Moves blocks between rows of the primary tier and blobs, and says what becomes of failures.

A blob is one block: an envelope, checked before a row counts as loaded, and the row behind it. Threads of the tier call
this with some blocks of a job. What is wrong with one block costs that block and is counted with its reason; a backend
that answers for none fails the call.
"""

import copy
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows
from kvtier.tiering.kit.blobs.contract import Blob, Blobs, Got, GotKind, Put, PutKind
from kvtier.tiering.kit.blobs.evictor import Evictor
from kvtier.tiering.kit.blobs.moving_blocks import BlockTarget, BlockToStore, SealedBlock, check_header
from kvtier.tiering.kit.blobs.recent import RecentBlobs
from kvtier.tiering.kit.block_format import format_of
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAILURE_OF_CHECK,
    FAULTS,
    HeaderCheck,
)
from kvtier.tiering.kit.health import FailureLog
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.lifetime import Lifetime
from kvtier.tiering.kit.losses import BackendLosses
from kvtier.tiering.kit.page_guard import MAX_PAGE_BYTES, PageKeeper
from kvtier.tiering.kit.siblings import SiblingNamespaces

logger = logging.getLogger(__name__)

COUNTS = (
    "hits",
    "loaded_bytes",
    "stored_blocks",
    "stored_bytes",
    "existed",
    "declined",
    "store_errors",
    "absent",
    "damaged",
    "foreign",
    "io_error",
    "removed",
)
CAPACITY_COUNTS = ("evicted", "evicted_bytes", "failed_passes")

COUNT_OF_PUT = {
    PutKind.WRITTEN: "stored_blocks",
    PutKind.EXISTED: "existed",
    PutKind.NO_ROOM: "declined",
    PutKind.REFUSED: "store_errors",
    PutKind.FAILED: "store_errors",
    PutKind.AWAY: "store_errors",
}

HELD = frozenset({PutKind.WRITTEN, PutKind.EXISTED})
DECLINED = Put(PutKind.NO_ROOM)


MAX_ASKED = 64
"""Remembered blobs that are asked for when a description is missing. Fewer may all have been evicted one by one."""


class BlobNamespace:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Mutable is whether the description was written. ``_lock`` guards it.

    Args:
        identity: what makes its blocks its own: model, layout, epoch.

    Attributes:
        is_described: whether the readable description has been written, or is about to be.
    """

    def __init__(self, identity: Namespace) -> None:
        self.identity = identity
        self.name = identity.name
        self.format = format_of(identity)
        self.is_described = False
        self._lock = threading.Lock()

    def begin_description(self) -> bool:
        """Return whether the caller is the one to write the readable description.

        Servers are slow when many create one blob at once, and blocks need not wait for it.
        """
        with self._lock:
            is_due, self.is_described = not self.is_described, True
            return is_due

    def drop_description(self) -> None:
        """Leave the description to the next one, as it could not be written."""
        self.is_described = False


class BlobStore(BlockStore[BlobNamespace], PageKeeper[BlobNamespace]):
    """Stores and loads some blocks at a time.

    Args:
        tier: type of the tier, for messages.
        blobs: the backend.
        rows: the primary's.
        siblings: the other namespaces there.
        evictor: keeps capacity, quotas and the time to live; None when there is none to keep.
        counters: where everything is counted.
        lifetime: how long blocks live; None: without an end, or the backend keeps it.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, for the ages of blobs.

    Attributes:
        losses: why blocks are gone.
        siblings: as given.
        end_s: deadline of its calls; None: the backend's own time-outs must do.
    """

    def __init__(
        self,
        tier: str,
        blobs: Blobs,
        rows: Rows,
        siblings: SiblingNamespaces,
        evictor: Evictor | None,
        counters: Counters,
        lifetime: Lifetime | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.losses = BackendLosses(tier, clock, blobs.settings.ttl_s, renews=blobs.renews)
        self.siblings = siblings
        self.end_s: float | None = None
        self._tier = tier
        self._blobs = blobs
        self._names = blobs.names
        self._rows = rows
        self._block_bytes = ENVELOPE_BYTES + rows.row_bytes
        self._evictor = evictor
        self._counters = counters
        self._lifetime = lifetime
        self._wall_clock = wall_clock
        self._recent = RecentBlobs(clock, blobs.settings.ttl_s)
        self._failures = FailureLog(tier, clock)
        self._last_opened: BlobNamespace | None = None

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> BlobNamespace:
        del is_new
        self._last_opened = BlobNamespace(identity)
        if self._evictor is not None:
            self._evictor.on_opened(identity)
        return self._last_opened

    def with_deadline(self, end_s: float) -> "BlobStore":
        bound = copy.copy(self)
        bound.end_s = end_s
        return bound

    def check_reachable(self) -> None:
        namespace = self._last_opened
        assert namespace is not None, "a tier opens its namespace when it is built"
        has_written = self._blobs.check_writing()
        if self._evictor is not None:
            self._evictor.check()
        if not has_written:
            namespace.drop_description()
            self._describe(namespace)

    def contains_batch(self, namespace: BlobNamespace, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        names = self._names_of(namespace, keys)
        found = self._blobs.sizes(names, is_lookup=True)
        held: list[OffloadKey] = []
        expired: list[OffloadKey] = []
        unsound: list[str] = []
        for key, name in zip(keys, names, strict=True):
            size = found.get(name)
            if size is None:
                continue
            if self._is_over(size.written_s):
                expired.append(key)
            elif size.num_bytes in (None, self._block_bytes):
                held.append(key)
            else:
                unsound.append(name)
        if expired:
            self.losses.on_expired(expired)
        if unsound:
            self._remove_unsound(unsound)
        if len(held) < len(keys):
            there = frozenset(held)
            self._recent.discard(name for key, name in zip(keys, names, strict=True) if key not in there)
            self.siblings.look_for(namespace.identity, [key for key in keys if key not in there])
        return held

    def store(
        self, namespace: BlobNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        blocks = list(map(BlockToStore, keys, slots, self._names_of(namespace, keys)))
        todo = [block for block in blocks if not self._recent.has(block.name)]
        try:
            self._describe(namespace)
            puts = list(zip(todo, self._put(namespace, todo), strict=True))
        except TierError:
            self._counters.add(store_errors=len(keys))
            self._recent.clear()  # a server that was away may have lost what it had
            raise
        # The writer of what existed may have been cut off: what is no whole block is not held.
        unsure = [
            block for block, put in puts if put.kind is PutKind.EXISTED and put.num_bytes != self._block_bytes
        ]
        if unsure:
            whole, again = self._settle(namespace, unsure)
            puts = [(block, again.get(block.key, put)) for block, put in puts]
            lost = {block.key for block in unsure} - whole - again.keys()
        else:
            lost = set()
        there = [
            block
            for block, put in puts
            # An enumeration's member is slow to hash, and this is done for each block.
            if (put.kind is PutKind.WRITTEN or put.kind is PutKind.EXISTED) and block.key not in lost
        ]
        held = [block.key for block in there]
        self._count_stored(puts, len(blocks) - len(todo))
        if there:
            self._recent.add(block.name for block in there)
        if len(todo) < len(blocks):
            asked = {block.key for block in todo}
            held += [key for key in keys if key not in asked]
        self.losses.on_stored(held)
        if self.siblings.found:
            self.siblings.forget(held)
        faults = [block.key for block, put in puts if put.kind is PutKind.FAILED]
        return TransferOutcome(held, is_fault=bool(faults), faults=faults)

    def load(
        self, namespace: BlobNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        names = self._names_of(namespace, keys)
        with self._blobs.lend_headers(len(keys), has_scratch=False) as lent:
            targets = [
                BlockTarget(name, key, namespace.format, each.header, self._rows.row(slot))
                for name, key, slot, each in zip(names, keys, slots, lent, strict=True)
            ]
            try:
                found = self._blobs.get_into(targets, self.end_s)
            except TierError:
                self._counters.add(io_error=len(keys))
                self._recent.clear()
                raise
        failures: dict[OffloadKey, TierFailure] = {}
        away: set[OffloadKey] = set()
        for target, got in zip(targets, found, strict=True):
            if target.check is HeaderCheck.OK and got.kind is GotKind.READ and got.written_s is None:
                continue
            failure = self._failure_of(target, got)
            if failure is not None:
                failures[target.key] = failure
            if got.kind is GotKind.AWAY:
                away.add(target.key)
        if failures:
            self._counters.add(**Counter(failure.value for failure in failures.values()))
            self._recent.discard(name for key, name in zip(keys, names, strict=True) if key in failures)
            self.losses.on_damaged([key for key, why in failures.items() if why is TierFailure.DAMAGED])
            self.losses.on_foreign([key for key, why in failures.items() if why is TierFailure.FOREIGN])
        succeeded = [key for key in keys if key not in failures]
        if not failures:
            self._recent.add(names[:1])  # one of each call shows later that not everything is gone
        self.losses.on_used(succeeded)
        self._counters.add(hits=len(succeeded), loaded_bytes=len(succeeded) * self._rows.row_bytes)
        faults = [key for key, failure in failures.items() if failure in FAULTS and key not in away]
        return TransferOutcome(succeeded, is_fault=bool(faults), faults=faults)

    def restore_description(self, namespace: BlobNamespace) -> bool:
        if not namespace.is_described or self._put_document(namespace) is not PutKind.WRITTEN:
            return False
        # It may have been evicted alone: a store that evicts by use sees no use of it.
        if self._blobs.sizes(self._recent.choose(MAX_ASKED), is_lookup=False):
            return False
        self._recent.clear()
        return True

    def drop(self, namespace: BlobNamespace, keys: Sequence[OffloadKey]) -> None:
        self._remove(self._names_of(namespace, keys))

    def read_page(self, namespace: BlobNamespace) -> bytes | None:
        name = self._names.page(namespace.name)
        found = self._blobs.read_each([name], MAX_PAGE_BYTES).get(name)
        return None if found is None else bytes(found)

    def create_page(self, namespace: BlobNamespace, data: bytes) -> None:
        self._blobs.put_new([Blob(self._names.page(namespace.name), [data], len(data))], None)

    def remove_page(self, namespace: BlobNamespace) -> None:
        self._counters.add(damaged=1)
        self._blobs.remove([self._names.page(namespace.name)])

    def on_purged(self) -> None:
        self.losses.clear()
        self._recent.clear()

    def stats(self) -> dict[str, float]:
        evictor = {} if self._evictor is None else self._evictor.stats()
        return self._counters.snapshot() | evictor | self._blobs.stats()

    def close(self) -> None:
        if self._evictor is not None:
            self._evictor.close()
        self._blobs.close()

    def _names_of(self, namespace: BlobNamespace, keys: Iterable[OffloadKey]) -> list[str]:
        block, space, name = self._names.block, namespace.name, namespace.format.name
        return [block(space, name(key)) for key in keys]

    def _is_over(self, written_s: float | None) -> bool:
        lifetime = self._lifetime
        return (
            lifetime is not None and written_s is not None and lifetime.is_over(written_s, self._wall_clock())
        )

    def _describe(self, namespace: BlobNamespace) -> None:
        if not namespace.begin_description():
            return
        is_there = False
        try:
            is_there = self._put_document(namespace) in HELD
        finally:
            if not is_there:
                namespace.drop_description()

    def _put_document(self, namespace: BlobNamespace) -> PutKind:
        return self._blobs.put_document(namespace.name, namespace.identity.document).kind

    def _put(self, namespace: BlobNamespace, blocks: Sequence[BlockToStore]) -> list[Put]:
        """Write blocks as far as there is room for them; return the outcomes in their order."""
        if self._evictor is None:
            return self._put_admitted(namespace, blocks) if blocks else []
        admitted = [block for block in blocks if self._evictor.admit(self._block_bytes)]
        kinds = dict.fromkeys(admitted, PutKind.FAILED)
        puts: dict[BlockToStore, Put] = {}
        try:
            if admitted:
                puts = dict(zip(admitted, self._put_admitted(namespace, admitted), strict=True))
                kinds = {block: put.kind for block, put in puts.items()}
        finally:
            for kind in kinds.values():
                # What fails may have been written.
                is_written = kind in (PutKind.WRITTEN, PutKind.FAILED)
                self._evictor.end_write(self._block_bytes, has_written=is_written)
        written = [block.key for block, kind in kinds.items() if kind is PutKind.WRITTEN]
        self._evictor.on_stored(written, self._block_bytes)
        return [puts.get(block, DECLINED) for block in blocks]

    def _put_admitted(self, namespace: BlobNamespace, blocks: Sequence[BlockToStore]) -> list[Put]:
        is_encrypted = namespace.format.is_encrypted
        with self._blobs.lend_headers(len(blocks), has_scratch=is_encrypted) as lent:
            sealed = [
                Blob(
                    block.name,
                    SealedBlock(namespace.format, block.key, self._rows.row(block.slot), each),
                    self._block_bytes,
                )
                for block, each in zip(blocks, lent, strict=True)
            ]
            return self._blobs.put_new(sealed, self.end_s)

    def _settle(
        self, namespace: BlobNamespace, unsure: Sequence[BlockToStore]
    ) -> tuple[set[OffloadKey], dict[OffloadKey, Put]]:
        """Return which blocks are whole of those that existed, and the outcomes of those that were over.

        What is neither makes room for its block: the next store writes it.
        """
        whole = set(self.contains_batch(namespace, [block.key for block in unsure]))
        if self._lifetime is None or len(whole) == len(unsure):
            return whole, {}
        sizes = self._blobs.sizes([block.name for block in unsure], is_lookup=False)
        # One that is gone was over too: the evictor has removed it meanwhile.
        over = [
            one for one in unsure if (size := sizes.get(one.name)) is None or self._is_over(size.written_s)
        ]
        if not over:
            return whole, {}
        self._blobs.remove([block.name for block in over])
        return whole, {block.key: put for block, put in zip(over, self._put(namespace, over), strict=True)}

    def _count_stored(self, puts: Sequence[tuple[BlockToStore, Put]], num_recent: int) -> None:
        counts = {"existed": num_recent}
        kinds = [put.kind for _, put in puts]
        for kind, name in COUNT_OF_PUT.items():
            counts[name] = counts.get(name, 0) + kinds.count(kind)
        for block, put in puts:
            if put.words:
                self._failures.on_failure("stored", block.name, self._block_bytes, put.words)
        counts["stored_bytes"] = counts["stored_blocks"] * self._rows.row_bytes
        self._counters.add(**counts)

    def _failure_of(self, target: BlockTarget, got: Got) -> TierFailure | None:
        """Return why a block did not arrive, None when it did; what is ours and cannot be read again goes."""
        if got.words:
            self._failures.on_failure("loaded", target.name, self._block_bytes, got.words)
        if got.kind is GotKind.ABSENT:
            return TierFailure.ABSENT
        if got.kind is not GotKind.READ:
            return TierFailure.FOREIGN if got.kind is GotKind.REFUSED else TierFailure.IO_ERROR
        if self._is_over(got.written_s):
            self.losses.on_expired([target.key])
            return TierFailure.ABSENT
        return None if target.check is HeaderCheck.OK else self._explain(target.name, target.check)

    def _remove_unsound(self, names: Sequence[str]) -> None:
        """Remove blobs that are no whole block: nothing is loaded from them, and new blocks never replace blobs."""
        for name, head in self._blobs.read_each(names, ENVELOPE_BYTES).items():
            failure = self._explain(name, check_header(head, len(head)))
            self._counters.add(**{failure.value: 1})

    def _explain(self, name: str, found: HeaderCheck) -> TierFailure:
        """Return why a block is not loaded; what is ours to remove goes."""
        failure = FAILURE_OF_CHECK[found]
        logger.warning("tier %s: %s is %s (%s)", self._tier, name, failure.value, found.value)
        if failure is not TierFailure.FOREIGN:
            with suppress(TierError):  # it is found damaged again, and removed then
                self._remove([name])
        return failure

    def _remove(self, names: Sequence[str]) -> None:
        self._recent.discard(names)
        self._counters.add(removed=len(self._blobs.remove(names)))
