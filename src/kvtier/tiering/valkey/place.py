"""The values of a server or cluster without an engine: what is there, whether it is whole, and its removal.

The names are found with SCAN, which does not hold up other commands, and removed with UNLINK in batches. A server
evicts by use, so nothing that is read here may look like one: the connection says so (CLIENT NO-TOUCH) where the server
knows that. Where it does not, only the reading of whole blocks is a use.
"""

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, TypeAlias

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.place import (
    FAULTS_OF_PLACE,
    Amount,
    BlockState,
    Place,
    PlaceBlock,
    PlaceNamespace,
    PlaceSummary,
    TierFinding,
    check_value,
)
from kvtier.tiering.valkey.cluster import Cluster
from kvtier.tiering.valkey.connection import PlainConnection, ServerConnections, TLSConnection
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import TIER_TYPE, refused, unreachable
from kvtier.tiering.valkey.names import (
    LIST_NAME,
    ServerName,
    document_name,
    is_beside_blocks,
    page_name,
    parse_block_name,
    parse_document_name,
)
from kvtier.tiering.valkey.resp import Deadline, Reply, ReplyReader, Tree, encode, read_tree, send_all
from kvtier.tiering.valkey.servers import MAX_EXCHANGE_S, SingleServer
from kvtier.tiering.valkey.settings import ValkeySettings
from kvtier.tiering.valkey.siblings import MAX_DOCUMENT_BYTES
from kvtier.tiering.valkey.slot_map import fetch_slot_map

SCAN_NAMES = 1000
"""Names that one SCAN goes through. More keep the server's one thread busy longer; fewer make more round trips."""

BATCH_NAMES = 500
"""Names asked about or removed with one round trip."""

OWN_NAMES = "kvtier:*"

NAMED_VERBS = frozenset({"GET", "GETRANGE", "MEMORY USAGE", "OBJECT IDLETIME", "STRLEN", "UNLINK"})
"""Commands about one name. Each node of a cluster is asked about the names that it lists, and where one of its slots is
just arriving it answers only those that say ASKING; to other nodes that word means nothing."""

MAX_ANSWER_BYTES = 2**30
"""Bytes of an answer here, at most: a value may be half of that, and a pipeline of short answers is each far less."""

Word: TypeAlias = bytes | str | int
"""A part of a command."""


class RefusedError(TierError):
    """A server is there and refuses a command."""


class PlaceNode:
    """One server, and commands to it; used by one thread.

    Args:
        settings: how to connect.
        address: where to.

    Attributes:
        length_command: tells the length of a value without being a use of it, of the whole entry on older servers.
    """

    def __init__(self, settings: ValkeySettings, address: Address) -> None:
        self.length_command = "MEMORY USAGE"
        self._address = address
        self._is_of_cluster = settings.cluster
        self._connections = ServerConnections(settings, address)
        # One connection for all commands: what ``greet`` says holds for it alone.
        self._connection: PlainConnection | TLSConnection | None = None

    def __str__(self) -> str:
        return str(self._address)

    def greet(self) -> None:
        """Connect, and say that what follows is no use of a value.

        Raises:
            TierError: the server does not answer, or does not let us in.
        """
        self.execute("PING")
        with suppress(RefusedError):  # older than 7.2
            self.execute("CLIENT NO-TOUCH", "ON")
            self.length_command = "STRLEN"

    def execute(self, *command: Word) -> Tree:
        """Return the reply to one command.

        Raises:
            RefusedError: the server refuses it.
            TierError: the server does not answer.
        """
        (reply,) = self.execute_all([command])
        if isinstance(reply, Reply) and reply.kind == "-":
            code = refused(self._address, reply.error_code)
            raise RefusedError(TIER_TYPE, str(code).removeprefix(f"tier {TIER_TYPE!r}: "))
        return reply

    def execute_all(self, commands: Sequence[tuple[Word, ...]]) -> list[Tree]:
        """Return the reply to each command, in one round trip; errors of single ones are among them.

        Raises:
            TierError: the server does not answer.
        """
        if not commands:
            return []
        try:
            if self._connection is None:
                self._connection = self._connections.take()
            sock = self._connection.lend_socket()
            deadline = Deadline(time.monotonic, time.monotonic() + MAX_EXCHANGE_S)
            is_asking = [self._is_of_cluster and command[0] in NAMED_VERBS for command in commands]
            pairs = list(zip(commands, is_asking, strict=True))
            requests = [
                _encoded(one)
                for command, asks in pairs
                for one in ((("ASKING",),) if asks else ()) + (command,)
            ]
            send_all(sock, requests, deadline)
            reader = ReplyReader(sock, deadline)
            replies: list[Tree] = []
            for asks in is_asking:
                if asks:
                    read_tree(reader, MAX_ANSWER_BYTES)
                replies.append(read_tree(reader, MAX_ANSWER_BYTES))
            return replies
        except Exception as error:  # noqa: BLE001  # foreign: a client library may raise anything
            self._drop()
            raise unreachable(self._address, error) from None

    def scan(self) -> Iterator[list[bytes]]:
        """Yield our names, a page at a time; some twice when the server grows meanwhile."""
        cursor: Tree = b"0"
        while isinstance(cursor, bytes):
            answer = self.execute("SCAN", cursor, "MATCH", OWN_NAMES, "COUNT", SCAN_NAMES)
            if not isinstance(answer, list) or len(answer) != 2:
                raise self._nonsense("SCAN")
            cursor, page = answer
            if not isinstance(cursor, bytes) or not isinstance(page, list):
                raise self._nonsense("SCAN")
            yield [name for name in page if isinstance(name, bytes)]
            if cursor == b"0":
                return

    def max_memory_bytes(self) -> int:
        """Return the limit of the server's memory, 0 where it has none."""
        answer = self.execute("INFO", "memory")
        text = answer if isinstance(answer, bytes) else b""
        found = re.search(rb"^maxmemory:([0-9]{1,19})\r?$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        self._connections.close()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._connections.give_back(connection, is_clean=False)

    def _nonsense(self, command: str) -> TierError:
        return TierError(TIER_TYPE, f"{self._address} answers {command} with something else")


def _encoded(command: tuple[Word, ...]) -> bytes:
    """Return the request; a verb of two words is two. Pure."""
    verb, *arguments = command
    words = [*str(verb).split(), *arguments]
    return encode(*(word if isinstance(word, bytes) else str(word).encode() for word in words))


class ValkeyPlace(Place):
    """The values of our names on one or more servers.

    Args:
        where: the place, for messages; without credentials.
        nodes: the servers that have values.
    """

    tier: ClassVar[str] = TIER_TYPE

    def __init__(self, where: str, nodes: Sequence[PlaceNode]) -> None:
        super().__init__(where)
        self._nodes = {str(node): node for node in nodes}
        self._foreign = Amount()

    def namespaces(self) -> list[PlaceNamespace]:
        documents: dict[str, str] = {}
        names: set[str] = set()
        for node in self._nodes.values():
            for page in node.scan():
                names.update(block.namespace for name in page if (block := parse_block_name(name)))
                for name in page:
                    if (namespace := parse_document_name(name)) is not None:
                        last = MAX_DOCUMENT_BYTES - 1
                        documents[namespace] = _as_text(node.execute("GETRANGE", name, 0, last))
        return [PlaceNamespace(name, documents.get(name, "")) for name in sorted(names | documents.keys())]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        self._foreign = Amount()
        for node in self._nodes.values():
            for page in node.scan():
                wanted = []
                for name in page:
                    found = parse_block_name(name)
                    if found is None:
                        self._foreign = self._foreign.plus(not is_beside_blocks(name), 0)
                    elif namespaces is None or found.namespace in namespaces:
                        wanted.append((name, found))
                yield from _ask(node, wanted)

    def summary(self) -> PlaceSummary:
        limits = [node.max_memory_bytes() for node in self._nodes.values()]
        return PlaceSummary(capacity_bytes=sum(limits) if all(limits) else None, foreign=self._foreign)

    def check(self, block: PlaceBlock) -> BlockState:
        state = self._check_once(block)
        return self._check_once(block) if state in FAULTS_OF_PLACE else state

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        removed = Amount()
        for address, node in self._nodes.items():
            own = [block for block in blocks if _node_of(block) == address]
            if unless_changed:
                own = _without_used(node, own)
            for begin in range(0, len(own), BATCH_NAMES):
                batch = own[begin : begin + BATCH_NAMES]
                counts = node.execute_all([("UNLINK", _name_of(block)) for block in batch])
                for block, count in zip(batch, counts, strict=True):
                    if count == 1:  # another purge has removed the others, or they have expired
                        removed = removed.plus(1, block.num_bytes)
        return removed

    def end_removal(self, namespaces: Collection[str]) -> None:
        if not namespaces:
            return
        left = {block.namespace for block in self.blocks(namespaces)}
        gone = [name for name in namespaces if name not in left]
        commands: list[tuple[Word, ...]] = [("UNLINK", document_name(name)) for name in gone]
        commands += [("UNLINK", page_name(name)) for name in gone]
        commands += [("ZREM", LIST_NAME, *gone)] if gone else []
        for node in self._nodes.values():
            node.execute_all(commands)  # a node that has it not refuses, and no more

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()

    def _check_once(self, block: PlaceBlock) -> BlockState:
        name = _name_of(block)
        found = parse_block_name(name.encode())
        assert found is not None, "only names of blocks are listed"
        try:
            value = self._nodes[_node_of(block)].execute("GET", name)
        except RefusedError:
            return BlockState.UNREADABLE  # it is no string, or has moved to another node
        if value is None:
            return BlockState.GONE
        if not isinstance(value, bytes):
            return BlockState.UNREADABLE
        return check_value(memoryview(value), found.namespace, found.name, self.opener)


def _ask(node: PlaceNode, wanted: Sequence[tuple[bytes, ServerName]]) -> Iterator[PlaceBlock]:
    """Yield the blocks of some names, with their length and last use; those that are gone are left out."""
    for begin in range(0, len(wanted), BATCH_NAMES):
        batch = wanted[begin : begin + BATCH_NAMES]
        idle = node.execute_all([("OBJECT IDLETIME", name) for name, _ in batch])
        sizes = node.execute_all([(node.length_command, name) for name, _ in batch])
        now_s = time.time()
        for (name, parsed), idle_s, num_bytes in zip(batch, idle, sizes, strict=True):
            if isinstance(num_bytes, int) and num_bytes:
                used_s = now_s - idle_s if isinstance(idle_s, int) else None
                key = OffloadKey(parsed.name)
                address, tenant = f"{node} {name.decode()}", get_offload_tenant(key)
                yield PlaceBlock(
                    parsed.namespace, address, num_bytes, used_s, tenant=tenant, key=key, name=key
                )


def _without_used(node: PlaceNode, blocks: Sequence[PlaceBlock]) -> list[PlaceBlock]:
    """Return the blocks that were not used since they were listed.

    Servers tell the time of a use in whole seconds, counted back from now: within one second it may differ.
    """
    idle = node.execute_all([("OBJECT IDLETIME", _name_of(block)) for block in blocks])
    now_s = time.time()
    return [
        block
        for block, idle_s in zip(blocks, idle, strict=True)
        if block.used_s is None or not isinstance(idle_s, int) or int(now_s - idle_s) <= int(block.used_s) + 1
    ]


def open_valkey_place(own: Mapping[str, object]) -> ValkeyPlace:
    """Return the place of a tier's own settings.

    Raises:
        ConfigError: a setting that cannot work.
        TierError: no server answers, or it does not let us in.
    """
    settings = parse_settings(ValkeySettings, own, f"tier {TIER_TYPE!r}")
    address = settings.url.address
    addresses = [address]
    if settings.cluster:
        addresses = sorted(set(fetch_slot_map(settings, [address]).values()))
    nodes = [PlaceNode(settings, node_address) for node_address in addresses]
    place = ValkeyPlace(f"{address}/{settings.url.database}", nodes)
    try:
        for node in nodes:
            node.greet()
    except TierError:
        place.close()
        raise
    return place


def probe_valkey_place(own: Mapping[str, object]) -> list[TierFinding]:
    """Return whether a tier could use its servers; for a second they have a value of ours.

    Raises:
        ConfigError: a setting that cannot work.
    """
    settings = parse_settings(ValkeySettings, own, f"tier {TIER_TYPE!r}")
    servers = (Cluster if settings.cluster else SingleServer)(settings, time.monotonic)
    try:
        servers.check_reachable()
    except TierError as error:
        return [TierFinding(is_good=False, text=str(error))]
    finally:
        servers.close()
    return [TierFinding(is_good=True, text=f"{settings.url.address} answers and lets us write")]


def _as_text(value: Tree) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _node_of(block: PlaceBlock) -> str:
    return block.address.partition(" ")[0]


def _name_of(block: PlaceBlock) -> str:
    return block.address.partition(" ")[2]
