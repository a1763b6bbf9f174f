"""Moves blocks between rows of the primary tier and objects, and says what becomes of failures.

An object is one block: an envelope, checked before a row is written that is loaded, and the row behind it.
Threads of the tier call it with some blocks of a job. What is wrong with one block costs that block and is counted
with its reason; a store that cannot be reached fails the call.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAILURE_OF_CHECK,
    FAULTS,
    HeaderCheck,
    unpack,
)
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.losses import BackendLosses
from kvtier.tiering.kit.page_guard import MAX_PAGE_BYTES, PageKeeper
from kvtier.tiering.kit.place import name_place
from kvtier.tiering.kit.siblings import SiblingNamespaces
from kvtier.tiering.obj.client import OVER, Client
from kvtier.tiering.obj.evictor import Evictor
from kvtier.tiering.obj.layout import ObjNamespace, namespace_path
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.siblings import FIRST_PAUSE_S, ObjSiblings

logger = logging.getLogger(__name__)


class ObjBlockStore(BlockStore[ObjNamespace], PageKeeper[ObjNamespace]):
    """Stores and loads some blocks at a time; what it knows of a namespace is in its namespace.

    Args:
        client: where to.
        rows: the primary's.
        settings: how.
        evictor: keeps the capacity; None when there is none to keep.
        counters: where everything is counted.
        clock: seconds, monotonic.

    Attributes:
        losses: why blocks are gone.
        siblings: the other namespaces under the root.
    """

    def __init__(
        self,
        client: Client,
        rows: Rows,
        settings: ObjSettings,
        evictor: Evictor | None,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.losses = BackendLosses("obj", clock, settings.ttl_s, renews=False)
        place = ObjSiblings(client, settings.target.root, has_capacity=settings.capacity_bytes is not None)
        where = name_place("obj", "url", settings.list_reach())
        self.siblings = SiblingNamespaces("obj", place, clock, FIRST_PAUSE_S, where=where)
        self._client = client
        self._rows = rows
        self._block_bytes = ENVELOPE_BYTES + rows.row_bytes
        self._root = settings.target.root
        self._evictor = evictor
        self._counters = counters
        self._last_opened: ObjNamespace | None = None

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> ObjNamespace:
        del is_new
        self._last_opened = ObjNamespace(identity, namespace_path(self._root, identity.name))
        if self._evictor is not None:
            self._evictor.on_opened(identity)
        return self._last_opened

    def check_reachable(self) -> None:
        namespace = self._last_opened
        assert namespace is not None, "a tier opens its namespace when it is built"
        self._client.require_bucket(namespace.document_path)
        namespace.drop_description()
        self._describe(namespace)

    def contains_batch(self, namespace: ObjNamespace, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        paths = {key: namespace.block_path(key) for key in keys}
        sizes = self._client.sizes(list(paths.values()))
        size_of = {key: sizes.get(path) for key, path in paths.items()}
        over = [key for key, size in size_of.items() if size == OVER]
        if over:
            self.losses.on_expired(over)
        held = [key for key, size in size_of.items() if size == self._block_bytes]
        if sum(size is not None for size in size_of.values()) > len(held):
            taken = {key for key, size in size_of.items() if size is not None}
            self._remove_damaged(paths[key] for key in taken.difference(held))
        if len(held) < len(keys):
            there = frozenset(held)
            self.siblings.look_for(namespace.identity, [key for key in keys if key not in there])
        return held

    def store(
        self, namespace: ObjNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        self._describe(namespace)
        succeeded = [key for key, slot in zip(keys, slots, strict=True) if self._write(namespace, key, slot)]
        self.losses.on_stored(succeeded)
        if self.siblings.found:
            self.siblings.forget(succeeded)
        return TransferOutcome(succeeded)

    def load(
        self, namespace: ObjNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        failures: dict[OffloadKey, TierFailure] = {}
        for key, slot in zip(keys, slots, strict=True):
            failure = self._read(namespace, key, slot)
            if failure is not None:
                failures[key] = failure
        for failure in failures.values():
            self._counters.add(**{failure.value: 1})
        self.losses.on_damaged([key for key, why in failures.items() if why is TierFailure.DAMAGED])
        self.losses.on_foreign([key for key, why in failures.items() if why is TierFailure.FOREIGN])
        succeeded = [key for key in keys if key not in failures]
        self.losses.on_used(succeeded)
        self._counters.add(hits=len(succeeded), loaded_bytes=len(succeeded) * self._rows.row_bytes)
        return TransferOutcome(succeeded, is_fault=not FAULTS.isdisjoint(failures.values()))

    def restore_description(self, namespace: ObjNamespace) -> bool:
        if not namespace.is_described:
            return False
        return self._client.put_new(namespace.document_path, [namespace.identity.document.encode()])

    def drop(self, namespace: ObjNamespace, keys: Sequence[OffloadKey]) -> None:
        self._client.remove([namespace.block_path(key) for key in keys])

    def read_page(self, namespace: ObjNamespace) -> bytes | None:
        fetched = self._client.get(namespace.page_path, MAX_PAGE_BYTES, is_lasting=True)
        return None if fetched is None else bytes(fetched.body)

    def create_page(self, namespace: ObjNamespace, data: bytes) -> None:
        self._client.put_new(namespace.page_path, [data])

    def remove_page(self, namespace: ObjNamespace) -> None:
        self._counters.add(damaged=1)
        self._client.remove([namespace.page_path])

    def on_purged(self) -> None:
        self.losses.clear()

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot() | ({} if self._evictor is None else self._evictor.stats())

    def close(self) -> None:
        if self._evictor is not None:
            self._evictor.close()

    def _describe(self, namespace: ObjNamespace) -> None:
        if not namespace.begin_description():
            return
        try:
            self._client.put_new(namespace.document_path, [namespace.identity.document.encode()])
        except TierError:
            namespace.drop_description()
            raise

    def _write(self, namespace: ObjNamespace, key: OffloadKey, slot: int) -> bool:
        """Write a block; return whether it is held now."""
        if self._evictor is not None and not self._evictor.admit(self._block_bytes):
            self._counters.add(declined=1)
            return False
        is_written = True  # what fails may have been written
        try:
            sealed = namespace.format.seal(key, self._rows.row(slot), None)
            is_written = self._client.put_new(namespace.block_path(key), sealed)
        finally:
            if self._evictor is not None:
                self._evictor.end_write(self._block_bytes, has_written=is_written)
        if not is_written:
            self._counters.add(existed=1)
            # Its writer may have been cut off: what is not a whole block there is not held.
            return bool(self.contains_batch(namespace, [key]))
        if self._evictor is not None:
            self._evictor.on_stored([key], self._block_bytes)
        self._counters.add(stored_blocks=1, stored_bytes=self._rows.row_bytes)
        return True

    def _read(self, namespace: ObjNamespace, key: OffloadKey, slot: int) -> TierFailure | None:
        """Read a block into its row; return why it is not there, None when it is."""
        path = namespace.block_path(key)
        fetched = self._client.get(path, self._block_bytes)
        if fetched is None:
            return TierFailure.ABSENT
        header_check = self._copy_checked(namespace, fetched.body, key, slot)
        return None if header_check is HeaderCheck.OK else self._explain(path, header_check)

    def _copy_checked(
        self, namespace: ObjNamespace, body: memoryview, key: OffloadKey, slot: int
    ) -> HeaderCheck:
        """Copy what was read into the row if it is what was stored under ``key``, otherwise nothing of it."""
        payload, row = body[ENVELOPE_BYTES:], self._rows.row(slot)
        header_check = namespace.format.open(body, payload, key, row)
        if header_check is not HeaderCheck.OK or namespace.format.is_encrypted:
            return header_check
        if len(payload) != len(row):
            return HeaderCheck.DAMAGED
        # numpy, because it lets other threads run while it copies.
        np.copyto(np.frombuffer(row, np.uint8), np.frombuffer(payload, np.uint8))
        return HeaderCheck.OK

    def _remove_damaged(self, paths: Iterable[str]) -> None:
        """Remove objects that are no whole block: nothing is loaded from them, and new blocks never replace objects."""
        for path in paths:
            fetched = self._client.get(path, ENVELOPE_BYTES)
            if fetched is not None:
                found = unpack(fetched.body)
                failure = self._explain(
                    path, found if isinstance(found, HeaderCheck) else HeaderCheck.DAMAGED
                )
                self._counters.add(**{failure.value: 1})

    def _explain(self, path: str, header_check: HeaderCheck) -> TierFailure:
        """Return why a block is not loaded; what is ours to remove goes."""
        failure = FAILURE_OF_CHECK[header_check]
        logger.warning("tier obj: object %s is %s (%s)", path, failure.value, header_check.value)
        if failure is not TierFailure.FOREIGN:
            self._client.remove([path])
        return failure
