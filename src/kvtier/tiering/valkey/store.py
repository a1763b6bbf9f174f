"""Moves blocks between rows of the primary tier and values of a server, some at a time.

A store looks up first which blocks the server has, because a row costs a million times what the question does. What is
wrong with one block costs that block and is counted with its reason; a damaged value is removed.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows
from kvtier.tiering.kit.block_format import BlockFormat
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAILURE_OF_CHECK,
    FAULTS,
    Buffer,
    HeaderCheck,
    unpack,
)
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.losses import BackendLosses
from kvtier.tiering.kit.page_guard import CHECK_S, MAX_PAGE_BYTES, PageKeeper
from kvtier.tiering.kit.quota_keeper import QuotaKeeper
from kvtier.tiering.kit.siblings import SiblingNamespaces
from kvtier.tiering.valkey.connection import Command, ReplyOrError, error_code, make_command
from kvtier.tiering.valkey.errors import TIER_TYPE
from kvtier.tiering.valkey.names import LIST_NAME, ValkeyNamespace, document_name, page_name
from kvtier.tiering.valkey.resp import Reply, ReplyReader, encode, encode_set, read_value
from kvtier.tiering.valkey.servers import Servers, raise_if_all_refused
from kvtier.tiering.valkey.siblings import FIRST_PAUSE_S, Answer, ValkeySiblings, listing_commands

logger = logging.getLogger(__name__)

MAX_LOOKUPS = 1024
"""Lookups sent before their replies are read. Both sides' buffers take ten times as many; fewer would look up a
long prefix in several turns."""

PAGE_MARGIN_MS = int(4000 * CHECK_S)
"""Milliseconds that a page lives longer than a block, which covers the pause between two looks at it."""

COUNTS = (
    "hits",
    "loaded_bytes",
    "stored_blocks",
    "stored_bytes",
    "held_blocks",
    "declined",
    "store_errors",
    "removed",
)


@dataclass(slots=True)
class ReadTarget:
    """Where the value of one block goes, and whether it was right.

    Attributes:
        key: the block.
        row: its slot.
        format: of the reader's namespace.
        header: room for its envelope.
        header_check: of what was read; damaged before.
    """

    key: OffloadKey
    row: memoryview
    format: BlockFormat
    header: memoryview = field(default_factory=lambda: memoryview(bytearray(ENVELOPE_BYTES)))
    header_check: HeaderCheck = HeaderCheck.DAMAGED

    def read(self, reader: ReplyReader) -> Reply:
        """Read the value into both, and check it while the processor's cache has it and the next one is on its way."""
        reply = read_value(reader, self.header, self.row)
        if reply.kind == "$":
            self.header_check = self._check(reply.number)
        return reply

    def _check(self, num_bytes: int) -> HeaderCheck:
        if num_bytes == ENVELOPE_BYTES + len(self.row):
            return self.format.open(self.header, self.row, self.key, self.row)
        # Of another version, perhaps; one of ours has exactly this length, so otherwise it was cut or replaced.
        envelope = unpack(self.header) if num_bytes >= ENVELOPE_BYTES else HeaderCheck.DAMAGED
        return envelope if isinstance(envelope, HeaderCheck) else HeaderCheck.DAMAGED


@dataclass(frozen=True, slots=True)
class SetRequest:
    """The request that stores a block; its header is made when its pieces are read.

    By then those before it are on their way, so that the server does not wait for the headers of a whole batch.

    Attributes:
        key: the block.
        row: its slot.
        format: of the writer's namespace.
        name: under which the server keeps it.
        ttl_ms: milliseconds until it expires; None for never.
    """

    key: OffloadKey
    row: memoryview
    format: BlockFormat
    name: bytes
    ttl_ms: int | None

    def __iter__(self) -> Iterator[Buffer]:
        """Yield the pieces."""
        header, payload = self.format.seal(self.key, self.row, None)
        yield from encode_set(self.name, header, payload, self.ttl_ms)


class DescribedNamespaces:
    """The namespaces whose description this process has sent; a set whose ``add`` and lookups are atomic.

    It is sent once, with the first blocks: should the server evict it, blocks are found all the same.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def is_first(self, name: str) -> bool:
        """Return whether the description of ``name`` has not been sent; two threads may both send it."""
        if name in self._names:
            return False
        self._names.add(name)
        return True

    def has(self, name: str) -> bool:
        """Return whether the description of ``name`` has been sent."""
        return name in self._names

    def forget(self, name: str) -> None:
        """Have the description of ``name`` sent again: the server was away."""
        self._names.discard(name)


class ValkeyBlockStore(BlockStore[ValkeyNamespace], PageKeeper[ValkeyNamespace]):
    """Stores and loads some blocks at a time; keeps no state but counts, and which namespaces it has described.

    Args:
        servers: where they are kept.
        rows: the primary's.
        ttl_s: seconds after its last use that a block is kept; None for ever.
        renews: whether a use counts; otherwise they count from the store.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, for the order of namespaces.
        quotas: keeps tenants within theirs; None: they have none here.
        where: the server, as commands take it.

    Attributes:
        losses: why blocks are gone.
        siblings: the other namespaces there.
        end_s: deadline of its calls' replies; None: the default deadline.
    """

    def __init__(
        self,
        servers: Servers,
        rows: Rows,
        ttl_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        renews: bool = True,
        wall_clock: Callable[[], float] = time.time,
        quotas: QuotaKeeper | None = None,
        where: str = "PLACE",
    ) -> None:
        self._renews = renews
        self._wall_clock = wall_clock
        self._quotas = quotas
        self.siblings = SiblingNamespaces(
            TIER_TYPE, ValkeySiblings(servers), clock, FIRST_PAUSE_S, where=where
        )
        self.losses = BackendLosses(TIER_TYPE, clock, ttl_s, renews=renews)
        self._servers = servers
        self._rows = rows
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._value_bytes = ENVELOPE_BYTES + rows.row_bytes
        self.end_s: float | None = None
        self._counters = Counters(*COUNTS, *(failure.value for failure in TierFailure))
        self._described = DescribedNamespaces()

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> ValkeyNamespace:
        if self._quotas is not None:
            self._quotas.names.on_opened(identity)
        return ValkeyNamespace(identity)

    def with_deadline(self, end_s: float) -> "ValkeyBlockStore":
        bound = copy.copy(self)
        bound.end_s = end_s
        return bound

    def contains_batch(self, namespace: ValkeyNamespace, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        found: list[OffloadKey] = []
        for begin in range(0, len(keys), MAX_LOOKUPS):
            part = keys[begin : begin + MAX_LOOKUPS]
            found += self._ask(part, [namespace.block_name(key) for key in part])
        if len(found) < len(keys):
            held = frozenset(found)
            self.siblings.look_for(namespace.identity, [key for key in keys if key not in held])
        return found

    def store(
        self, namespace: ValkeyNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        try:
            # A lookup costs some dozen bytes, a block that another engine has written already a million.
            names = [namespace.block_name(key) for key in keys]
            extras = [*self._expiry_commands(names), *self._description(namespace)]
            held = set(self._ask(keys, names, extras))
            blocks = zip(keys, slots, names, strict=True)
            todo = [
                (key, self._set_command(namespace, key, slot, name))
                for key, slot, name in blocks
                if key not in held
            ]
            replies = self._run([command for _, command in todo])
        except TierError:
            self._described.forget(namespace.identity.name)
            self._counters.add(store_errors=len(keys))
            raise
        written = [key for (key, _), reply in zip(todo, replies, strict=True) if _is_done(reply)]
        num_declined = sum(error_code(reply) == "OOM" for reply in replies)
        num_failed = len(todo) - len(written) - num_declined
        self._counters.add(
            held_blocks=len(held),
            stored_blocks=len(written),
            stored_bytes=len(written) * self._rows.row_bytes,
            declined=num_declined,
            store_errors=num_failed,
        )
        self.losses.on_stored([*held, *written])
        if self.siblings.found:
            self.siblings.forget([*held, *written])
        if self._quotas is not None:
            self._quotas.on_stored(written, self._value_bytes)
        faults = [
            key
            for (key, _), reply in zip(todo, replies, strict=True)
            if not _is_done(reply) and error_code(reply) != "OOM" and self._servers.is_fault(reply)
        ]
        return TransferOutcome([*held, *written], is_fault=bool(faults), faults=faults)

    def load(
        self, namespace: ValkeyNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        targets = [
            ReadTarget(key, self._rows.row(slot), namespace.format)
            for key, slot in zip(keys, slots, strict=True)
        ]
        names = [namespace.block_name(key) for key in keys]
        commands = [
            Command(name, (encode(b"GET", name),), target.read)
            for name, target in zip(names, targets, strict=True)
        ]
        try:
            replies = self._run(commands, self._expiry_commands(names))
        except TierError:
            self._counters.add(io_error=len(keys))
            raise
        succeeded: list[OffloadKey] = []
        damaged: list[OffloadKey] = []
        faults: list[OffloadKey] = []
        for target, reply in zip(targets, replies, strict=True):
            failure = _failure_of(target, reply)
            if failure is None:
                succeeded.append(target.key)
                continue
            self._counters.add(**{failure.value: 1})
            is_away = failure is TierFailure.IO_ERROR
            if failure in FAULTS and (not is_away or self._servers.is_fault(reply)):
                faults.append(target.key)
            if failure is TierFailure.DAMAGED:
                damaged.append(target.key)
            elif failure is TierFailure.FOREIGN:
                self.losses.on_foreign([target.key])
        self._counters.add(hits=len(succeeded), loaded_bytes=len(succeeded) * self._rows.row_bytes)
        self.losses.on_used(succeeded)
        self.losses.on_damaged(damaged)
        self._remove(namespace, damaged)
        return TransferOutcome(succeeded, is_fault=bool(faults), faults=faults)

    def check_reachable(self) -> None:
        self._servers.check_reachable()
        if self._quotas is not None:
            self._quotas.check()

    def restore_description(self, namespace: ValkeyNamespace) -> bool:
        if not self._described.has(namespace.identity.name):
            return False
        name, text = document_name(namespace.identity.name), namespace.identity.document.encode()
        expiry = () if self._ttl_ms is None else (b"PX", b"%d" % self._ttl_ms)
        listing = listing_commands(namespace.identity.name, self._wall_clock(), self._ttl_ms)
        (reply,) = self._run([make_command(b"SET", name, text, b"NX", *expiry)], listing)
        return isinstance(reply, Reply) and reply.kind == "+"

    def read_page(self, namespace: ValkeyNamespace) -> bytes | None:
        name = page_name(namespace.identity.name)
        answer = Answer(max_bytes=MAX_PAGE_BYTES)
        get = Command(name, (encode(b"GET", name),), answer.read)
        # Longer than the blocks that are stored until it is read again.
        lives = () if self._ttl_ms is None else (b"%d" % (self._ttl_ms + PAGE_MARGIN_MS),)
        (reply,) = self._run([get], [make_command(b"PEXPIRE", name, *lives)] if lives else [])
        if not isinstance(reply, Reply):
            raise TierError(TIER_TYPE, f"the page of a namespace cannot be read: {reply}")
        if error_code(reply) == "WRONGTYPE":
            return b""
        if reply.kind == "-":
            raise TierError(TIER_TYPE, f"the page of a namespace cannot be read: {error_code(reply)}")
        return answer.tree if isinstance(answer.tree, bytes) else None

    def create_page(self, namespace: ValkeyNamespace, data: bytes) -> None:
        lives = () if self._ttl_ms is None else (b"PX", b"%d" % (self._ttl_ms + PAGE_MARGIN_MS))
        self._run([make_command(b"SET", page_name(namespace.identity.name), data, b"NX", *lives)])

    def remove_page(self, namespace: ValkeyNamespace) -> None:
        self._counters.add(damaged=1)
        self._run([make_command(b"UNLINK", page_name(namespace.identity.name))])

    def drop(self, namespace: ValkeyNamespace, keys: Sequence[OffloadKey]) -> None:
        self._remove(namespace, keys)

    def on_purged(self) -> None:
        self.losses.clear()

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot() | ({} if self._quotas is None else self._quotas.stats())

    def close(self) -> None:
        if self._quotas is not None:
            self._quotas.close()
        self._servers.close()

    def _run(self, commands: Sequence[Command], extras: Sequence[Command] = ()) -> list[ReplyOrError]:
        """Return the replies of ``commands``; those of ``extras``, sent with them, change nothing.

        Raises:
            TierError: no server answered, or each of ``commands`` was refused for one reason that is no block's.
        """
        if not commands:
            return []
        replies = self._servers.run([*commands, *extras], self.end_s)[: len(commands)]
        raise_if_all_refused(self._servers, replies)
        return replies

    def _ask(
        self, keys: Sequence[OffloadKey], names: Sequence[bytes], extras: Sequence[Command] = ()
    ) -> list[OffloadKey]:
        replies = self._run([make_command(b"STRLEN", name) for name in names], extras)
        return [key for key, reply in zip(keys, replies, strict=True) if self._is_held(reply)]

    def _is_held(self, reply: ReplyOrError) -> bool:
        return isinstance(reply, Reply) and reply.kind == ":" and reply.number == self._value_bytes

    def _set_command(self, namespace: ValkeyNamespace, key: OffloadKey, slot: int, name: bytes) -> Command:
        return Command(name, SetRequest(key, self._rows.row(slot), namespace.format, name, self._ttl_ms))

    def _description(self, namespace: ValkeyNamespace) -> list[Command]:
        """Return the commands that keep the readable description of a namespace as long as its newest block."""
        name, text = document_name(namespace.identity.name), namespace.identity.document.encode()
        expiry = () if self._ttl_ms is None else (b"PX", b"%d" % self._ttl_ms)
        if self._described.is_first(namespace.identity.name):
            listing = listing_commands(namespace.identity.name, self._wall_clock(), self._ttl_ms)
            return [make_command(b"SET", name, text, *expiry), *listing]
        return self._pexpire([name, LIST_NAME])

    def _expiry_commands(self, names: Sequence[bytes]) -> list[Command]:
        """Return the commands that count the expiry of blocks in use from now; for absent ones they do nothing."""
        return self._pexpire(names) if self._renews else []

    def _pexpire(self, names: Sequence[bytes]) -> list[Command]:
        if self._ttl_ms is None:
            return []
        ttl = b"%d" % self._ttl_ms
        return [make_command(b"PEXPIRE", name, ttl) for name in names]

    def _remove(self, namespace: ValkeyNamespace, keys: Sequence[OffloadKey]) -> None:
        if not keys:
            return
        try:
            commands = [make_command(b"UNLINK", namespace.block_name(key)) for key in keys]
            replies = self._servers.run(commands, self.end_s)
        except TierError:
            return  # it is found damaged again, and removed then
        self._counters.add(removed=sum(map(_is_done, replies)))


def _failure_of(target: ReadTarget, reply: ReplyOrError) -> TierFailure | None:
    """Return why a block did not arrive, None when it did."""
    if not isinstance(reply, Reply):
        return TierFailure.IO_ERROR
    if reply.kind != "$":
        return TierFailure.FOREIGN if reply.error_code == "WRONGTYPE" else TierFailure.IO_ERROR
    if reply.number < 0:
        return TierFailure.ABSENT
    if target.header_check is HeaderCheck.OK:
        return None
    logger.warning("tier valkey: block %s is %s", target.key.hex(), target.header_check.value)
    return FAILURE_OF_CHECK[target.header_check]


def _is_done(reply: ReplyOrError) -> bool:
    return isinstance(reply, Reply) and reply.kind != "-"
