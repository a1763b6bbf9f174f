"""Moves blocks between rows of the primary tier and objects, and says what becomes of failures.

Threads of the tier call it with some blocks of a job. What is wrong with one block costs that block and is counted
with its reason; a store that cannot be reached fails the call.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Counters
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAILURE_OF_CHECK,
    FAULTS,
    POINTER_CODEC,
    Envelope,
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
from kvtier.tiering.obj.group import Block, GroupMember, Groups, RowsWithHeaders
from kvtier.tiering.obj.layout import (
    POINTER_BYTES,
    Location,
    ObjNamespace,
    namespace_path,
    unpack_pointer,
)
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
        rows: RowsWithHeaders,
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
        self._root = settings.target.root
        self._blocks_per_object = settings.blocks_per_object
        self._groups = Groups(client, rows)
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
        pointed = {key for key, size in size_of.items() if size == POINTER_BYTES}
        unread = {key for key in pointed if namespace.location(key) is None}
        unsound = unread.difference(self._groups.read_pointers(namespace, unread))
        sound = pointed.difference(unsound)
        held = [key for key, size in size_of.items() if size == self._rows.block_bytes or key in sound]
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
        blocks = list(zip(keys, slots, strict=True))
        succeeded: set[OffloadKey] = set()
        if self._blocks_per_object > 1 and len(blocks) > 1:
            # A group is a new object whatever others hold: a lookup first keeps bytes from being stored twice.
            succeeded.update(self.contains_batch(namespace, keys))
            blocks = [block for block in blocks if block[0] not in succeeded]
        for begin in range(0, len(blocks), self._blocks_per_object):
            succeeded.update(self._write(namespace, blocks[begin : begin + self._blocks_per_object]))
        self.losses.on_stored(list(succeeded))
        if self.siblings.found:
            self.siblings.forget(list(succeeded))
        return TransferOutcome(succeeded)

    def load(
        self, namespace: ObjNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        blocks = list(zip(keys, slots, strict=True))
        known = [
            GroupMember(at, block) for block in blocks if (at := namespace.location(block[0])) is not None
        ]
        # What is remembered of a group may be older than the pointer: who is not found there is looked up afresh.
        missed = self._groups.load(namespace, known)
        there = {member.block[0] for member in known}.difference(missed)
        failures = self._load_named(namespace, [block for block in blocks if block[0] not in there])
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
        # The block, or its pointer into a group, which may hold others and ages by itself.
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

    def _write(self, namespace: ObjNamespace, blocks: Sequence[Block]) -> Collection[OffloadKey]:
        """Write blocks as one object; return which are held now."""
        is_group = len(blocks) > 1
        num_bytes = len(blocks) * (self._rows.block_bytes + (POINTER_BYTES if is_group else 0))
        if self._evictor is not None and not self._evictor.admit(num_bytes):
            self._counters.add(declined=len(blocks))
            return ()
        num_written = len(blocks)  # what fails may have been written
        try:
            if is_group:
                succeeded: Collection[OffloadKey] = self._groups.write(namespace, blocks)
            else:
                succeeded = (blocks[0][0],)
                with_headers = self._rows.with_headers(blocks, namespace.format)
                num_written = int(self._client.put_new(namespace.block_path(blocks[0][0]), with_headers))
        finally:
            if self._evictor is not None:
                self._evictor.end_write(num_bytes, has_written=num_written > 0)
        if not num_written:
            # Its writer may have been cut off: what is not a whole block there is not held.
            succeeded = self.contains_batch(namespace, [blocks[0][0]])
        elif self._evictor is not None and not is_group:
            self._evictor.on_stored(succeeded, num_bytes)
        num_existed = len(blocks) - num_written
        stored_bytes = num_written * self._rows.row_bytes
        self._counters.add(stored_blocks=num_written, stored_bytes=stored_bytes, existed=num_existed)
        return succeeded

    def _load_named(self, namespace: ObjNamespace, blocks: Sequence[Block]) -> dict[OffloadKey, TierFailure]:
        """Read the objects that have the blocks' names, and the groups that they point into."""
        failures: dict[OffloadKey, TierFailure] = {}
        members = []
        for block in blocks:
            found = self._load_single(namespace, block)
            if isinstance(found, Location):
                members.append(GroupMember(found, block))
            elif found is not None:
                failures[block[0]] = found
        for key, header_check in self._groups.load(namespace, members).items():
            # Its pointer goes and not the group: that may hold others, and ages by itself.
            failures[key] = self._explain(namespace.block_path(key), header_check)
        return failures

    def _load_single(self, namespace: ObjNamespace, block: Block) -> TierFailure | Location | None:
        """Read the object of a block's name: the block, which is landed, or a pointer, which is returned."""
        key = block[0]
        path = namespace.block_path(key)
        fetched = self._client.get(path, self._rows.block_bytes)
        if fetched is None:
            return TierFailure.ABSENT
        envelope = unpack(fetched.body)
        if isinstance(envelope, Envelope) and envelope.codec == POINTER_CODEC:
            pointed = unpack_pointer(fetched.body, key, namespace.format)
            if isinstance(pointed, Location):
                namespace.on_locations([(key, pointed)])
                return pointed
            return self._explain(path, pointed)
        header_check = self._rows.copy_checked(fetched.body, block, namespace.format)
        return None if header_check is HeaderCheck.OK else self._explain(path, header_check)

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

    def _explain(self, path: str, header_check: HeaderCheck | None) -> TierFailure:
        """Return why a block is not loaded, None being a group that is gone; what is ours to remove goes."""
        failure = TierFailure.ABSENT if header_check is None else FAILURE_OF_CHECK[header_check]
        if header_check is not None:
            logger.warning("tier obj: object %s is %s (%s)", path, failure.value, header_check.value)
        if failure is not TierFailure.FOREIGN:
            self._client.remove([path])
        return failure
