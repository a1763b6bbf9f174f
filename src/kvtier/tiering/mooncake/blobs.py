"""The values of a Mooncake store as blobs, many in one call.

Bytes go straight from and into the primary's rows where a block is moved; other values, which are few, are copied. A
value that is leased to a reader cannot be removed: its name waits, and is neither looked for nor written until its
removal succeeds.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress

from kvtier.errors import TierError
from kvtier.tiering.kit.backend import Counters, Rows
from kvtier.tiering.kit.blobs import (
    Blob,
    BlobKind,
    BlobName,
    BlobNames,
    Blobs,
    Got,
    GotKind,
    Lent,
    Listed,
    Put,
    PutKind,
    Size,
    Target,
)
from kvtier.tiering.kit.block_format import BlockName
from kvtier.tiering.kit.envelope import Buffer
from kvtier.tiering.kit.purging import Batches, Removed
from kvtier.tiering.mooncake.client import MooncakeClient, ScatterLists
from kvtier.tiering.mooncake.descriptions import DESCRIPTION_BYTES, DESCRIPTION_NAMES, Descriptions
from kvtier.tiering.mooncake.errors import ABSENT, NO_ROOM, Code, name_of
from kvtier.tiering.mooncake.listing import MasterPage
from kvtier.tiering.mooncake.memory import HeaderPool, address_of, allocate
from kvtier.tiering.mooncake.native import TIER_TYPE, NativeStore, open_native
from kvtier.tiering.mooncake.settings import SCHEME, MooncakeSettings

logger = logging.getLogger(__name__)

MAX_TASK_BYTES = 16 * 2**20
"""Bytes that a thread moves in one call. Less pays for the master's answers more often; more keeps a load waiting
behind a store, and the time limit of a transfer is for all of them."""

MAX_TASK_BLOCKS = 64
"""The same for very small blocks."""

LEASE_S = 6.0
"""Seconds after which a lease has ended that nothing renews: 5, unless the master says otherwise. So long after a try
to remove what is leased comes the next."""

MAX_DEFERRED = 4096
"""Names that wait for their removal. One that is dropped is found damaged again by the next load."""

RETRY_S = 1.0
"""Seconds between tries where a caller waits for the end of leases: a purge."""

GONE = frozenset({Code.OK, Code.OBJECT_NOT_FOUND})
"""Answers to a removal after which there is no value."""

WRITTEN = Put(PutKind.WRITTEN)
DECLINED = Put(PutKind.NO_ROOM)

COUNTS = ("removed_damaged", "lookup_errors")

REACHABILITY_NAME = "kvtier/reachable"
"""A name that is never stored: looking it up shows that the master answers."""


def plan_task_blocks(row_bytes: int) -> int:
    """Return how many blocks of this length a thread moves in one call. Pure."""
    return min(MAX_TASK_BLOCKS, max(1, MAX_TASK_BYTES // max(1, row_bytes)))


class MooncakeNames(BlobNames):
    """What values are called: ``<namespace>/<name in hex>`` is a block.

    A document has no name of its own in the store: ``Descriptions`` keeps it under one that every client knows. What is
    called its name here ends with the namespace's.
    """

    _NAME = re.compile(r"([0-9a-f]{32})/(?:((?:[0-9a-f]{2}){1,40})|probe\.page)")
    _DOCUMENT = re.compile(r"kvtier/namespaces/([0-9a-f]{32})")

    def block(self, namespace: str, name: BlockName) -> str:
        return f"{namespace}/{name.hex()}"

    def document(self, namespace: str) -> str:
        return f"kvtier/namespaces/{namespace}"

    def page(self, namespace: str) -> str:
        return f"{namespace}/probe.page"

    def parse(self, name: str) -> BlobName | None:
        if document := self._DOCUMENT.fullmatch(name):
            return BlobName(BlobKind.DOCUMENT, document[1])
        found = self._NAME.fullmatch(name)
        if found is None:
            return None
        if found[2] is None:
            return BlobName(BlobKind.PAGE, found[1])
        return BlobName(BlobKind.BLOCK, found[1], bytes.fromhex(found[2]))


class MooncakeBlobs(Blobs):
    """The values of one store.

    Mutable are the names that wait for their removal, each with the time of the next try. ``_lock`` guards changes.

    Args:
        settings: which store.
        rows: the primary's, to register with it; None: a command without an engine, which joins the store only where
            its page is not enough, and whose removals wait until the leases of now have ended.
        clock: seconds, monotonic.
        open_store: joins the store, when it is first called.
        pause: waits for that many seconds.
    """

    has_times = False
    fate = "are dropped as the store needs room"

    def __init__(
        self,
        settings: MooncakeSettings,
        rows: Rows | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_store: Callable[[MooncakeSettings], NativeStore] = open_native,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.names = MooncakeNames()
        self.settings = settings
        self.where = f"{SCHEME}{settings.master}"
        self._pool: HeaderPool | None = None
        memories: list[memoryview] = []
        if rows is not None:
            self._pool = HeaderPool(settings.num_threads, plan_task_blocks(rows.row_bytes), rows.row_bytes)
            memories = [rows.flat, self._pool.memory]
        self._registered = [range(begin := address_of(one), begin + len(one)) for one in memories]
        self._client = MooncakeClient(settings, memories, clock, open_store)
        self._descriptions = Descriptions(self._client, clock)
        self._listing = MasterPage(settings)
        self._lock = threading.Lock()
        self._deferred: dict[str, float] = {}
        self._counters = Counters(*COUNTS)
        self._clock = clock
        self._pause = pause
        self._num_tries = int(LEASE_S / RETRY_S) if rows is None else 0

    def put_new(self, blobs: Sequence[Blob], end_s: float | None) -> list[Put]:
        del end_s  # the library's time-outs bound each call
        self._remove_again(self._waiting(blob.name for blob in blobs))
        waiting = self._waiting(blob.name for blob in blobs)
        todo = [blob for blob in blobs if blob.name not in waiting]
        if not todo:
            return [DECLINED] * len(blobs)
        parsed = self.names.parse(todo[0].name)
        if parsed is not None:
            self._descriptions.keep(parsed.namespace)
        names = [blob.name for blob in todo]
        answers = self._client.put(names, self._gather([list(blob.parts) for blob in todo]))
        puts = dict(zip(names, map(_put_of, answers), strict=True))
        return [puts.get(blob.name, DECLINED) for blob in blobs]

    def get_into(self, targets: Sequence[Target], end_s: float | None) -> list[Got]:
        del end_s
        names = [target.name for target in targets]
        lists = self._list_addresses([[target.header, target.row] for target in targets])
        values: list[memoryview | None] = [None] * len(targets)
        if lists is None:
            lengths = [len(target.header) + len(target.row) for target in targets]
            memory = allocate(sum(lengths))
            lists = ScatterLists.over(memory, lengths)
            values = list(_cut(memory, lengths))
        return list(map(self._land, targets, self._client.get(names, lists), values))

    def sizes(self, names: Sequence[str], *, is_lookup: bool) -> dict[str, Size]:
        self._remove_due()
        waiting = self._waiting(names)
        asked = [name for name in names if name not in waiting]
        if not asked:
            return {}
        answers = self._client.exist(asked)
        self._counters.add(lookup_errors=sum(answer < 0 for answer in answers))
        there = [name for name, answer in zip(asked, answers, strict=True) if answer == 1]
        if is_lookup:  # a length takes a call for each
            return dict.fromkeys(there, Size(None))
        lengths = {name: self._client.size(name) for name in there}
        return {name: Size(num_bytes) for name, num_bytes in lengths.items() if num_bytes >= 0}

    def read_each(self, names: Sequence[str], max_bytes: int, start: int = 0) -> dict[str, memoryview]:
        self._remove_due()
        waiting = self._waiting(names)
        described = self._namespaces_of(names)
        texts = dict(self._descriptions.read_each().values()) if described else {}
        found = {
            name: memoryview(texts[namespace].encode())[start : start + max_bytes]
            for name, namespace in described.items()
            if namespace in texts
        }
        for name in names:
            if name not in described and name not in waiting:
                value = self._read(name, start, max_bytes)
                if value is not None:
                    found[name] = value
        return found

    def remove(
        self, names: Sequence[str], unless_used_since: Mapping[str, float] | None = None
    ) -> Collection[str]:
        del unless_used_since  # a value tells no use
        described = self._namespaces_of(names)
        slots = (
            {space: slot for slot, (space, _) in self._descriptions.read_each().items()} if described else {}
        )
        stored = {slots.get(described[name], "") if name in described else name: name for name in names}
        stored.pop("", None)
        removed = self._try_remove(list(stored))
        for _ in range(self._num_tries):
            left = self._waiting(stored)
            if not left:
                break
            self._pause(RETRY_S)
            removed += self._try_remove(left)
        return [stored[name] for name in removed]

    def check(self) -> None:
        if self._pool is None:
            self._listing.list_names()
        else:
            self._client.exist([REACHABILITY_NAME])

    def check_writing(self) -> bool:
        self.check()
        return True  # there is room for few documents: one is written with the first blocks, not to try

    def list_all(self, namespace: str | None = None) -> Iterator[Listed]:
        names = self._listing.list_names()
        own: list[str] = []
        for name in names:
            parsed = self.names.parse(name)
            if parsed is not None and namespace in (None, parsed.namespace):
                own.append(name)
            elif parsed is None and namespace is None and name not in DESCRIPTION_NAMES:
                yield Listed(0.0, name, 0)
        for name, num_bytes in self._listing.measure(own):
            yield Listed(0.0, name, num_bytes)
        if set(names).isdisjoint(DESCRIPTION_NAMES):
            return
        with suppress(TierError):  # the page answers, and the store lets no client in
            for one in self.list_namespaces():
                if namespace in (None, one):
                    yield Listed(0.0, self.names.document(one), DESCRIPTION_BYTES)

    def read_capacity_bytes(self) -> int | None:
        return self._listing.read_capacity_bytes()

    def list_namespaces(self) -> list[str]:
        return [namespace for namespace, _ in self._descriptions.read_each().values()]

    def put_document(self, namespace: str, document: str) -> Put:
        return self._descriptions.put(namespace, document)

    def remove_namespace(self, namespace: str, tenant: int | None) -> Batches:
        if tenant is not None:
            raise TierError(TIER_TYPE, "this tier removes only whole namespaces: purge it without --tenant")
        return self._remove_namespace(namespace)

    def lend_headers(self, num_blocks: int, *, has_scratch: bool) -> AbstractContextManager[Sequence[Lent]]:
        if self._pool is None:
            return super().lend_headers(num_blocks, has_scratch=has_scratch)
        return self._pool.lend(num_blocks, has_scratch=has_scratch)

    @property
    def num_deferred(self) -> int:
        """How many values wait for the end of a lease to be removed."""
        return len(self._deferred)

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot() | {"deferred_deletes": len(self._deferred)}

    def close(self) -> None:
        self._client.close()

    def _gather(self, values: Sequence[Sequence[Buffer]]) -> ScatterLists:
        """Return where values are; those of a call that do not stand in registered memory are copied together."""
        lists = self._list_addresses(values)
        if lists is not None:
            return lists
        joined = [b"".join(parts) for parts in values]
        memory = allocate(sum(map(len, joined)))
        memory[:] = b"".join(joined)
        return ScatterLists.over(memory, list(map(len, joined)))

    def _list_addresses(self, values: Sequence[Sequence[Buffer]]) -> ScatterLists | None:
        """Return where the pieces of values are; None where one of them is not in registered memory."""
        all_addresses: list[list[int]] = []
        for pieces in values:
            addresses: list[int] = []
            for piece in pieces:
                if not isinstance(piece, memoryview) or piece.readonly:
                    return None
                address = address_of(piece)
                for memory in self._registered:
                    if address in memory:
                        break
                else:
                    return None
                addresses.append(address)
            all_addresses.append(addresses)
        return ScatterLists(all_addresses, [list(map(len, pieces)) for pieces in values])

    def _land(self, target: Target, answer: int, value: memoryview | None) -> Got:
        """Return the outcome of one value, which stands in ``value``, or where the target wants it."""
        expected = len(target.header) + len(target.row)
        if answer == expected and value is None:  # the usual case
            target.landed(expected)
            return Got(GotKind.READ, expected)
        # A value whose lease ran out during the transfer may have been written over meanwhile: its envelope knows.
        if answer in (expected, Code.LEASE_EXPIRED):
            is_right = target.landed(expected) if value is None else target.take(value)
            if is_right or answer == expected:
                return Got(GotKind.READ, expected)
        if answer in ABSENT:
            return Got(GotKind.ABSENT)
        # A value of another length is refused as a bad parameter when it is longer, as a failed transfer when it is
        # shorter; only its length tells it from a provider that is away.
        if answer in (Code.INVALID_PARAMS, Code.TRANSFER_FAIL) or answer >= 0:
            with suppress(TierError):
                num_bytes = self._client.size(target.name)
                is_other = 0 <= num_bytes != expected
                # Its beginning says whether another version wrote it, which is then left alone.
                head = self._read(target.name, 0, len(target.header)) if is_other else None
                if head is not None:
                    target.header[:] = bytes(head).ljust(len(target.header), b"\0")
                    target.landed(num_bytes)
                    return Got(GotKind.READ, num_bytes)
        return Got(GotKind.FAILED, words=name_of(answer))

    def _read(self, name: str, start: int, num_bytes: int) -> memoryview | None:
        """Return part of a value, less where it ends before; None where it cannot be read."""
        whole_bytes = self._client.size(name)
        if whole_bytes < 0:
            return None
        length = min(num_bytes, whole_bytes - start)
        if length <= 0:
            return memoryview(b"")
        memory = allocate(length)
        # What was written over after its lease is found out by its reader, as above.
        is_read = self._client.get_part(name, start, memory) in (length, Code.LEASE_EXPIRED)
        return memory if is_read else None

    def _namespaces_of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the documents among some names, with their namespaces."""
        parsed = {name: self.names.parse(name) for name in names}
        return {
            name: one.namespace
            for name, one in parsed.items()
            if one is not None and one.kind is BlobKind.DOCUMENT
        }

    def _waiting(self, names: Iterable[str]) -> list[str]:
        """Return which of some values wait for their removal."""
        return [name for name in names if name in self._deferred] if self._deferred else []

    def _remove_due(self) -> None:
        if self._deferred:
            now_s = self._clock()
            self._remove_again([name for name, due_s in self._deferred.copy().items() if due_s <= now_s])

    def _remove_again(self, names: Sequence[str]) -> None:
        try:
            self._try_remove(names)
        except TierError as error:
            logger.warning("tier mooncake: %d damaged blocks are not removed yet: %s", len(names), error)

    def _try_remove(self, names: Sequence[str]) -> list[str]:
        """Remove values, and return which; what is leased, or has no answer, waits for its next try.

        Raises:
            TierError: the master does not answer.
        """
        if not names:
            return []
        self._defer(names)  # before the answer: other threads do not try these meanwhile
        answers = dict(zip(names, self._client.remove(list(names)), strict=True))
        with self._lock:
            for name, answer in answers.items():
                if answer in GONE:
                    self._deferred.pop(name, None)
        removed = [name for name, answer in answers.items() if answer == Code.OK]
        self._counters.add(removed_damaged=len(removed))
        return removed

    def _defer(self, names: Iterable[str]) -> None:
        due_s = self._clock() + LEASE_S
        with self._lock:
            for name in names:
                self._deferred.pop(name, None)  # the one that waits longest is the first
                self._deferred[name] = due_s
            while len(self._deferred) > MAX_DEFERRED:
                del self._deferred[next(iter(self._deferred))]

    def _remove_namespace(self, namespace: str) -> Generator[Removed, None, None]:
        """Remove its blocks as far as no reader has leased them, until none has come free for a lease.

        The master does it by a pattern, so its page is not needed; it does not say which values there were.
        """
        num_idle = 0
        while num_idle * RETRY_S < LEASE_S:
            num_removed = self._client.remove_by_pattern(f"^{namespace}/[0-9a-f]+$")
            if num_removed < 0:
                raise TierError(TIER_TYPE, f"removing by a pattern failed: {name_of(num_removed)}")
            num_idle = 0 if num_removed else num_idle + 1
            yield Removed(num_removed, [])
            self._pause(RETRY_S)


def _put_of(answer: int) -> Put:
    if answer == Code.OK:
        return WRITTEN
    if answer == Code.OBJECT_ALREADY_EXISTS:
        return Put(PutKind.EXISTED)
    return Put(PutKind.NO_ROOM if answer in NO_ROOM else PutKind.FAILED, name_of(answer))


def _cut(memory: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    begin = 0
    for length in lengths:
        yield memory[begin : begin + length]
        begin += length
