"""The other namespaces of a server or cluster, for the blocks that this engine misses.

Names of a server cannot be listed cheaply. So one sorted set has the namespaces that were written last, each with the
time of that, and is cut to a few dozen with each entry. Their descriptions and blocks are asked for by name. A server
that denies one of these commands, or is read only, costs the causes that would come of it and nothing else.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvtier.base import OffloadKey
from kvtier.tiering.kit.siblings import (
    UNKNOWN_AMOUNT,
    Sibling,
    SiblingPlace,
    amount_in_words,
    log_siblings,
    row_bytes_of,
)
from kvtier.tiering.valkey.connection import Command, ReplyOrError, make_command
from kvtier.tiering.valkey.errors import TIER_TYPE
from kvtier.tiering.valkey.names import LIST_NAME, block_name, document_name
from kvtier.tiering.valkey.resp import (
    MAX_REPLY_BYTES,
    Reply,
    ReplyReader,
    Tree,
    encode,
    read_strings,
    read_tree,
)
from kvtier.tiering.valkey.servers import Servers

PERMISSIONS = "+zadd +zremrangebyrank +zrevrange +getrange +scan"
"""What a user needs besides, for the descriptions of namespaces."""

MAX_LISTED = 64
"""Namespaces that the set has. More cost each reader of it some dozen bytes; fewer forget those that are written to
rarely where resets make new ones."""

MAX_READ = 32
"""Descriptions read in a listing, those of the namespaces written last. They are some KiB each."""

MAX_DOCUMENT_BYTES = 2**16
"""Bytes of a description that are read. One that is longer is no JSON any more when it is cut, and says nothing."""

FIRST_PAUSE_S = 1.0
"""The first pause after a look that found nothing. A look costs a round trip."""

SCAN_NAMES = 1000
MAX_SCANS = 8
"""Rounds of counting a sibling's blocks, of ``SCAN_NAMES`` names each, once in the life of a tier. More keep a lookup
waiting; fewer count less of a large server."""

MAX_MEASURED = 8
"""Namespaces of an older layout whose blocks are counted, likewise."""

NAMESPACE_CHARS = 32
_NAMESPACE = re.compile(rb"[0-9a-f]{32}")


def listing_commands(name: str, written_s: float, ttl_ms: int | None) -> list[Command]:
    """Return the commands that put a namespace among those written last. Pure.

    Args:
        name: the namespace's.
        written_s: seconds since 1970.
        ttl_ms: milliseconds until the set expires; None for never.
    """
    return [
        make_command(b"ZADD", LIST_NAME, b"%d" % written_s, name.encode()),
        make_command(b"ZREMRANGEBYRANK", LIST_NAME, b"0", b"%d" % (-MAX_LISTED - 1)),
        *([] if ttl_ms is None else [make_command(b"PEXPIRE", LIST_NAME, b"%d" % ttl_ms)]),
    ]


@dataclass(slots=True)
class Names:
    """The names of namespaces, as a server sends them.

    Attributes:
        found: those that are names of namespaces.
    """

    found: list[str] = field(default_factory=list)

    def read(self, reader: ReplyReader) -> Reply:
        """Read the reply; a refusal is returned, so that a cluster can follow it."""
        answer = read_strings(reader, MAX_READ, NAMESPACE_CHARS)
        if isinstance(answer, Reply):
            return answer
        self.found = [one.decode() for one in answer if _NAMESPACE.fullmatch(one)]
        return Reply("+")


@dataclass(slots=True)
class Answer:
    """A reply of any shape.

    Attributes:
        tree: the reply, once it was read.
        max_bytes: of it, at most.
    """

    tree: Tree = None
    max_bytes: int = MAX_REPLY_BYTES

    def read(self, reader: ReplyReader) -> Reply:
        """Read the reply, likewise."""
        self.tree = read_tree(reader, self.max_bytes)
        return self.tree if isinstance(self.tree, Reply) else Reply("+")


class ValkeySiblings(SiblingPlace):
    """Namespaces beside the own one on a server or cluster.

    Args:
        servers: where they are.
    """

    fate = "leave when their time to live ends or the server evicts them"

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._own_name = ""

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        del max_namespaces  # those that differ least are chosen among more
        self._own_name = own_name
        listed = Names()
        command = encode(b"ZREVRANGE", LIST_NAME, b"0", b"%d" % (MAX_READ - 1))
        self._servers.run([Command(LIST_NAME, (command,), listed.read)])
        names = [name for name in listed.found if name != own_name]
        last = b"%d" % (MAX_DOCUMENT_BYTES - 1)
        documents = [document_name(name) for name in names]
        texts = self._ask([(document, encode(b"GETRANGE", document, b"0", last)) for document in documents])
        return [
            (name, text.decode("utf-8", "replace"))
            for name, text in zip(names, texts, strict=True)
            if isinstance(text, bytes) and text
        ]

    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        asked = [(name, key) for name in names for key in keys]
        held = {name for name, _ in self._held(asked)}
        return next((name for name in names if name in held), None)

    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        return [key for _, key in self._held([(name, key) for key in keys])]

    def note_siblings(self, siblings: Sequence[Sibling]) -> None:
        # A namespace that was written to has its description, so it is not empty by mistake.
        (own,) = self._servers.run([make_command(b"STRLEN", document_name(self._own_name))])
        if isinstance(own, Reply) and own.kind == ":" and not own.number:
            log_siblings(TIER_TYPE, self._own_name, siblings[0], self._count_blocks(siblings[0].name))

    def measure_older(self, documents: Sequence[tuple[str, str]]) -> str:
        num_bytes, is_whole = 0, len(documents) <= MAX_MEASURED
        for name, document in documents[:MAX_MEASURED]:
            num_blocks, is_counted = self._scan_blocks(name)
            row_bytes = row_bytes_of(document)
            num_bytes += num_blocks * (row_bytes or 0)
            is_whole = is_whole and is_counted and row_bytes is not None
        if not num_bytes:
            return UNKNOWN_AMOUNT
        return amount_in_words(num_bytes) if is_whole else f"at least {amount_in_words(num_bytes)}"

    def _held(self, asked: Sequence[tuple[str, OffloadKey]]) -> list[tuple[str, OffloadKey]]:
        commands = [make_command(b"STRLEN", block_name(name, key)) for name, key in asked]
        replies = self._servers.run(commands) if commands else []
        return [one for one, reply in zip(asked, replies, strict=True) if _is_there(reply)]

    def _count_blocks(self, name: str) -> str:
        """Return how many blocks a namespace has, in words."""
        num_blocks, is_whole = self._scan_blocks(name)
        if is_whole:
            return str(num_blocks)
        return f"{num_blocks} or more" if num_blocks else "an unknown number of"

    def _scan_blocks(self, name: str) -> tuple[int, bool]:
        """Return how many blocks a namespace has, and whether that is all; of a cluster's one node is asked."""
        pattern = b"kvtier:{%b:*" % name.encode()
        names: set[bytes] = set()
        cursor: Tree = b"0"
        for _ in range(MAX_SCANS):
            assert isinstance(cursor, bytes), "checked below"
            scan = encode(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_NAMES)
            (answer,) = self._ask([(document_name(name), scan)])
            if not isinstance(answer, list) or len(answer) != 2:
                break
            cursor, page = answer
            if isinstance(page, list):
                names.update(one for one in page if isinstance(one, bytes))
            if cursor == b"0" and self._servers.has_one_node:
                return len(names), True
            if cursor == b"0" or not isinstance(cursor, bytes):
                break
        return len(names), False

    def _ask(self, requests: Sequence[tuple[bytes, bytes]]) -> list[Tree]:
        """Return the whole reply to each request, given with the name that decides its node; None for a failed one."""
        answers = [Answer() for _ in requests]
        commands = [
            Command(name, (request,), answer.read)
            for (name, request), answer in zip(requests, answers, strict=True)
        ]
        replies = self._servers.run(commands) if commands else []
        return [
            answer.tree if isinstance(reply, Reply) else None
            for answer, reply in zip(answers, replies, strict=True)
        ]


def _is_there(reply: ReplyOrError) -> bool:
    return isinstance(reply, Reply) and reply.kind == ":" and reply.number > 0
