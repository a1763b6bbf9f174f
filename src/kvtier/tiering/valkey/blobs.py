"""The values of a server or cluster as blobs: batches of commands, one round trip for most.

A value is written with ``SET NX``, so what is there costs its upload once. Where a call would upload much, the server
is asked first. What the server knows itself stays its own: it expires values and evicts by use, so a look at a value
that is no use of it says so (CLIENT NO-TOUCH); where the server does not know that, listing asks for sizes in memory.

Names cannot be listed cheaply. So one sorted set has the namespaces that were written last, cut to a few dozen with
each entry. A server that denies one of these commands costs the causes of misses that would come of it, no more.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from kvtier.errors import TierError
from kvtier.tiering.kit.blobs import (
    Blob,
    BlobKind,
    BlobName,
    BlobNames,
    Blobs,
    BlockCount,
    Got,
    GotKind,
    Listed,
    Put,
    PutKind,
    Size,
    Target,
)
from kvtier.tiering.kit.blobs.contract import NAMESPACE_CHARS
from kvtier.tiering.kit.block_format import BlockName
from kvtier.tiering.kit.envelope import Buffer
from kvtier.tiering.kit.page_guard import CHECK_S
from kvtier.tiering.valkey.cluster import Cluster
from kvtier.tiering.valkey.connection import Answer, Command, ReplyOrError, error_code, make_command
from kvtier.tiering.valkey.errors import TIER_TYPE, refused, words_of
from kvtier.tiering.valkey.resp import (
    Reply,
    ReplyReader,
    Tree,
    encode,
    encode_set,
    read_beginning,
    read_strings,
    read_value,
)
from kvtier.tiering.valkey.servers import (
    NO_TOUCH,
    ServerNode,
    SingleServer,
    raise_if_all_refused,
    raise_if_away,
)
from kvtier.tiering.valkey.settings import ValkeySettings

PAGE_END = ":probe.page"
LIST_NAME = "kvtier:{namespaces}"
"""The namespaces written last, a sorted set by the time of that."""

_NAME = re.compile(
    r"kvtier:\{([0-9a-f]{32})(?:\}:(namespace\.json|probe\.page)|:((?:[0-9a-f]{2}){1,40})\})", re.ASCII
)
_KINDS = {"namespace.json": BlobKind.DOCUMENT, "probe.page": BlobKind.PAGE}

ASK_FIRST_BYTES = 4 * 2**20
"""Bytes of a call from which the server is asked what it has before they are sent. Asking costs a round trip; sending
what is there already costs the upload. Less asks where the answer takes longer than the upload; more uploads more than
a millisecond's worth for nothing."""

MAX_LOOKUPS = 1024
"""Lookups sent before their replies are read. Both sides' buffers take ten times as many; fewer would look up a
long prefix in several turns."""

BATCH_NAMES = 500
"""Names asked about or removed with one round trip, where nothing waits for it."""

SCAN_NAMES = 1000
"""Names that one SCAN goes through. More keep the server's one thread busy longer; fewer make more round trips."""

MAX_SCANS = 8
"""Rounds of counting a namespace's blocks, once in the life of a tier. More keep a lookup waiting; fewer count less of
a large server."""

PAGE_MARGIN_MS = int(4000 * CHECK_S)
"""Milliseconds that a page lives longer than a block, which covers the pause between two looks at it."""

MAX_LISTED = 64
"""Namespaces that the set has. More cost each reader of it some dozen bytes; fewer forget those that are written to
rarely where resets make new ones."""

MAX_READ = 32
"""Namespaces read from it, those written last."""

OWN_NAMES = "kvtier:*"

OK = Reply("+", text="OK")
WRITTEN, EXISTED = Put(PutKind.WRITTEN), Put(PutKind.EXISTED)

OF_VALUE = frozenset({"ERR", "WRONGTYPE"})
"""Codes of refusals that are about one value; others are about the server."""

_NAMESPACE = re.compile(rb"[0-9a-f]{%d}" % NAMESPACE_CHARS)
_MAX_MEMORY = re.compile(rb"^maxmemory:([0-9]{1,19})\r?$", re.MULTILINE)


class ValkeyNames(BlobNames):
    """What values are called.

    The braces are a cluster's hash tag: what stands in them decides the node. So blocks spread over all nodes, and what
    else may ever be kept of one block goes to the same node.
    """

    def block(self, namespace: str, name: BlockName) -> str:
        return f"kvtier:{{{namespace}:{name.hex()}}}"

    def document(self, namespace: str) -> str:
        return f"kvtier:{{{namespace}}}:namespace.json"

    def page(self, namespace: str) -> str:
        return f"kvtier:{{{namespace}}}{PAGE_END}"

    def parse(self, name: str) -> BlobName | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        namespace, other, digits = found.groups()
        if digits is None:
            return BlobName(_KINDS[other], namespace)
        return BlobName(BlobKind.BLOCK, namespace, bytes.fromhex(digits))


class SetRequest:
    """The request that stores a blob, whose parts are made when they are sent, after a redirection once more.

    Args:
        blob: what to store.
        options: of SET.
    """

    __slots__ = ("_blob", "_options")

    def __init__(self, blob: Blob, options: tuple[bytes, ...]) -> None:
        self._blob, self._options = blob, options

    def __iter__(self) -> Iterator[Buffer]:
        """Yield the pieces."""
        return encode_set(self._blob.name.encode(), self._blob.parts, self._blob.num_bytes, *self._options)


class ValkeyBlobs(Blobs):
    """The values of our names on a server or cluster; keeps no state of them.

    Args:
        settings: where it is and how long blocks live.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, for the order of namespaces and the times of uses.
    """

    expires_itself = True
    fate = "leave when their time to live ends or the server evicts them"

    def __init__(
        self,
        settings: ValkeySettings,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.names = ValkeyNames()
        self.renews = settings.renew_ttl
        self.where = f"{settings.url.address}/{settings.url.database}"
        self._wall_clock = wall_clock
        self._ttl_ms = None if settings.ttl_s is None else int(settings.ttl_s * 1000)
        self._servers = (Cluster if settings.cluster else SingleServer)(settings, clock)

    def put_new(self, blobs: Sequence[Blob], end_s: float | None) -> list[Put]:
        puts: dict[str, Put] = {}
        extras = self._keep_beside(blobs)
        if sum(blob.num_bytes for blob in blobs) >= ASK_FIRST_BYTES:
            puts, extras = self._find([blob.name for blob in blobs], end_s, extras), []
        todo = [blob for blob in blobs if blob.name not in puts]
        puts |= self._set(todo, (b"NX",), end_s, extras)
        # A full server declines before it looks whether there is something of that name.
        unsure = [blob for blob in todo if puts[blob.name].kind in (PutKind.EXISTED, PutKind.NO_ROOM)]
        if unsure:
            puts |= self._find([blob.name for blob in unsure], end_s)
            # It has no bytes, is no string, or has gone meanwhile: it is no whole block, and can be written over.
            empty = [blob for blob in unsure if puts[blob.name] == EXISTED]
            puts |= self._set(empty, (), end_s)
        return [puts[blob.name] for blob in blobs]

    def get_into(self, targets: Sequence[Target], end_s: float | None) -> list[Got]:
        names = [target.name for target in targets]
        commands = [
            Command(own, (encode(b"GET", own),), partial(_read_into, target))
            for target, own in zip(targets, map(str.encode, names), strict=True)
        ]
        renewals = self._expire(names) if self.renews else []
        return [self._got_of(reply) for reply in self._run(commands, renewals, end_s)]

    def sizes(self, names: Sequence[str], *, is_lookup: bool) -> dict[str, Size]:
        # The server's order of uses sees it; the time to live begins again when a block is loaded or stored.
        found: dict[str, Size] = {}
        for begin in range(0, len(names), MAX_LOOKUPS):
            part = names[begin : begin + MAX_LOOKUPS]
            replies = self._run(_about((b"STRLEN",), part), is_use=is_lookup and self.renews)
            lengths = zip(part, map(_length_of, replies), strict=True)
            found |= {name: Size(num_bytes) for name, num_bytes in lengths if num_bytes is not None}
        return found

    def read_each(self, names: Sequence[str], max_bytes: int, start: int = 0) -> dict[str, memoryview]:
        kinds = [BlobKind.BLOCK if (own := self.names.parse(name)) is None else own.kind for name in names]
        are_parts = [start > 0 or kind is BlobKind.DOCUMENT for kind in kinds]
        answers = [Answer(partial(read_beginning, max_bytes=max_bytes)) for _ in names]
        # A page is read by engines alone, and must outlive the blocks that it vouches for.
        pages = [name for name, kind in zip(names, kinds, strict=True) if kind is BlobKind.PAGE]
        # A description is what others have written, of any length. What else an engine reads must not need a permission
        # more than moving blocks does.
        part = (b"%d" % start, b"%d" % (start + max_bytes - 1))
        commands = [
            Command(own, (encode(b"GETRANGE", own, *part) if is_part else encode(b"GET", own),), answer.read)
            for own, is_part, answer in zip(map(str.encode, names), are_parts, answers, strict=True)
        ]
        self._run(commands, self._expire(pages, PAGE_MARGIN_MS), is_use=bool(pages))
        return {
            name: memoryview(answer.tree)
            for name, is_part, answer in zip(names, are_parts, answers, strict=True)
            # Part of what is absent is empty.
            if isinstance(answer.tree, bytes) and (answer.tree or not is_part)
        }

    def remove(
        self, names: Sequence[str], unless_used_since: Mapping[str, float] | None = None
    ) -> Collection[str]:
        removed: list[str] = []
        for begin in range(0, len(names), BATCH_NAMES):
            batch = names[begin : begin + BATCH_NAMES]
            if unless_used_since:
                batch = self._drop_used(batch, unless_used_since)
            found = [(name, self.names.parse(name)) for name in batch]
            gone = [
                one.namespace.encode()
                for _, one in found
                if one is not None and one.kind is BlobKind.DOCUMENT
            ]
            unlisted = [make_command(b"ZREM", LIST_NAME.encode(), *gone)] if gone else []
            replies = self._run(_about((b"UNLINK",), batch), unlisted)
            # Another has removed the others, or they have expired.
            removed += [name for name, reply in zip(batch, replies, strict=True) if reply == Reply(":", 1)]
        return removed

    def check(self) -> None:
        for node in self._servers.nodes():
            _ask_node(node, encode(b"PING"))

    def check_writing(self) -> bool:
        self._servers.check_reachable()
        return True

    def list_all(self, namespace: str | None = None) -> Iterator[Listed]:
        pattern = OWN_NAMES if namespace is None else f"kvtier:{{{namespace}*"
        for node in self._servers.nodes():
            # Older servers do not know it, and would take a question for the length for a use.
            knows_no_touch = node.run(NO_TOUCH)[0] == OK
            length = (b"STRLEN",) if knows_no_touch else (b"MEMORY", b"USAGE")
            for page in _scan(node, pattern):
                for begin in range(0, len(page), BATCH_NAMES):
                    yield from self._measure(page[begin : begin + BATCH_NAMES], length)

    def list_namespaces(self) -> list[str]:
        answer = Answer(partial(read_strings, max_strings=MAX_READ, max_bytes=NAMESPACE_CHARS))
        own = LIST_NAME.encode()
        self._run([Command(own, (encode(b"ZREVRANGE", own, b"0", b"%d" % (MAX_READ - 1)),), answer.read)])
        listed = answer.tree if isinstance(answer.tree, list) else []
        return [one.decode() for one in listed if isinstance(one, bytes) and _NAMESPACE.fullmatch(one)]

    def count_blocks(self, namespace: str) -> BlockCount:
        names: set[str] = set()
        try:
            nodes = self._servers.nodes()
            for number, page in enumerate(_scan(nodes[0], f"kvtier:{{{namespace}:*")):
                if number == MAX_SCANS:
                    return BlockCount(len(names), is_whole=False)
                names.update(page)
        except TierError:  # it does not let us, or has gone
            return BlockCount(len(names), is_whole=False)
        return BlockCount(len(names), is_whole=len(nodes) == 1)

    def read_capacity_bytes(self) -> int | None:
        limits = []
        for node in self._servers.nodes():
            answer = _ask_node(node, encode(b"INFO", b"memory"))
            found = _MAX_MEMORY.search(answer if isinstance(answer, bytes) else b"")
            limits.append(int(found[1]) if found else 0)
        return sum(limits) if all(limits) else None

    def put_document(self, namespace: str, document: str) -> Put:
        body, own = document.encode(), LIST_NAME.encode()
        blob = Blob(self.names.document(namespace), [body], len(body))
        listing = [
            make_command(b"ZADD", own, b"%d" % self._wall_clock(), namespace.encode()),
            make_command(b"ZREMRANGEBYRANK", own, b"0", b"%d" % (-MAX_LISTED - 1)),
            *self._expire([blob.name, LIST_NAME]),
        ]
        return self._set([blob], (b"NX",), None, listing)[blob.name]

    def close(self) -> None:
        self._servers.close()

    def _run(
        self,
        commands: Sequence[Command],
        extras: Sequence[Command] = (),
        end_s: float | None = None,
        *,
        is_use: bool = True,
    ) -> list[ReplyOrError]:
        """Return the replies of ``commands``; those of ``extras``, sent with them, change nothing.

        Raises:
            TierError: no server answered, or each of ``commands`` was refused for one reason that is no value's.
        """
        if not commands:
            return []
        replies = self._servers.run([*commands, *extras], end_s, is_use=is_use)[: len(commands)]
        raise_if_all_refused(self._servers, replies)
        return replies

    def _set(
        self,
        blobs: Sequence[Blob],
        options: tuple[bytes, ...],
        end_s: float | None,
        extras: Sequence[Command] = (),
    ) -> dict[str, Put]:
        commands = [
            Command(blob.name.encode(), SetRequest(blob, (*options, *self._lifetime_of(blob.name))))
            for blob in blobs
        ]
        replies = self._run(commands, extras, end_s)
        return {blob.name: self._put_of(reply) for blob, reply in zip(blobs, replies, strict=True)}

    def _find(
        self, names: Sequence[str], end_s: float | None, extras: Sequence[Command] = ()
    ) -> dict[str, Put]:
        """Return that values exist, with their lengths, and count their expiry from now."""
        renewals = self._expire(names) if self.renews else []
        lengths = map(_length_of, self._run(_about((b"STRLEN",), names), [*renewals, *extras], end_s))
        return {
            name: Put(PutKind.EXISTED, num_bytes=length)
            for name, length in zip(names, lengths, strict=True)
            if length
        }

    def _lifetime_of(self, name: str) -> tuple[bytes, ...]:
        if self._ttl_ms is None:
            return ()
        return (b"PX", b"%d" % (self._ttl_ms + PAGE_MARGIN_MS * name.endswith(PAGE_END)))

    def _expire(self, names: Iterable[str], margin_ms: int = 0) -> list[Command]:
        """Return the commands that count the expiry of values from now; for absent ones they do nothing."""
        if self._ttl_ms is None:
            return []
        ttl = b"%d" % (self._ttl_ms + margin_ms)
        return [make_command(b"PEXPIRE", name.encode(), ttl) for name in names]

    def _keep_beside(self, blobs: Sequence[Blob]) -> list[Command]:
        """Return the commands that keep the description of the blocks' namespace as long as its newest block."""
        parsed = self.names.parse(blobs[0].name) if blobs else None
        if parsed is None or parsed.kind is not BlobKind.BLOCK:
            return []
        return self._expire([self.names.document(parsed.namespace), LIST_NAME])

    def _drop_used(self, names: Sequence[str], since: Mapping[str, float]) -> list[str]:
        """Return those that were not used after these times.

        Servers tell the time of a use in whole seconds, counted back from now: within one second it may differ.
        """
        idle = self._run(_about((b"OBJECT", b"IDLETIME"), names), is_use=False)
        now_s = self._wall_clock()
        return [
            name
            for name, reply in zip(names, idle, strict=True)
            if (used_s := _used_s(reply, now_s)) == math.inf or int(used_s) <= since.get(name, math.inf) + 1
        ]

    def _measure(self, names: Sequence[str], length: tuple[bytes, ...]) -> Iterator[Listed]:
        """Yield values with their lengths and last uses; those that are gone are left out."""
        num = len(names)
        replies = self._run([*_about((b"OBJECT", b"IDLETIME"), names), *_about(length, names)], is_use=False)
        now_s = self._wall_clock()
        for name, idle, size in zip(names, replies[:num], replies[num:], strict=True):
            num_bytes = _length_of(size)
            if num_bytes is not None and name != LIST_NAME:
                yield Listed(_used_s(idle, now_s), name, num_bytes)

    def _put_of(self, reply: ReplyOrError) -> Put:
        if not isinstance(reply, Reply):
            return Put(PutKind.FAILED if self._servers.is_fault(reply) else PutKind.AWAY)
        if reply.kind != "-":
            return WRITTEN if reply.kind == "+" else EXISTED
        if reply.error_code == "OOM":
            return Put(PutKind.NO_ROOM, words_of(reply.text))
        failed = PutKind.FAILED if self._servers.is_fault(reply) else PutKind.AWAY
        return Put(PutKind.REFUSED if reply.error_code in OF_VALUE else failed, words_of(reply.text))

    def _got_of(self, reply: ReplyOrError) -> Got:
        if isinstance(reply, Reply) and reply.kind == "$":
            return Got(GotKind.ABSENT) if reply.number < 0 else Got(GotKind.READ, reply.number)
        words = words_of(reply.text) if isinstance(reply, Reply) else ""
        if error_code(reply) == "WRONGTYPE":
            return Got(GotKind.REFUSED, words=words)
        return Got(GotKind.FAILED if self._servers.is_fault(reply) else GotKind.AWAY, words=words)


def _read_into(target: Target, reader: ReplyReader) -> Reply:
    """Read a value, and check it while the processor's cache has it and the next one is on its way."""
    reply = read_value(reader, target.header, target.row)
    if reply.kind == "$" and reply.number >= 0:
        target.landed(reply.number)
    return reply


def _about(verb: tuple[bytes, ...], names: Iterable[str]) -> list[Command]:
    """Return a command of one or two words about each name. Pure."""
    return [Command(own, (encode(*verb, own),)) for own in map(str.encode, names)]


def _length_of(reply: ReplyOrError) -> int | None:
    """Return the length of a value; 0 where it is no string, None where there is none, or no answer. Pure."""
    if isinstance(reply, Reply) and reply.kind == ":" and reply.number > 0:
        return reply.number
    return 0 if error_code(reply) == "WRONGTYPE" else None


def _used_s(reply: ReplyOrError, now_s: float) -> float:
    """Return when a value was used last; infinity where the server does not tell. Pure."""
    return now_s - reply.number if isinstance(reply, Reply) and reply.kind == ":" else math.inf


def _scan(node: ServerNode, pattern: str) -> Iterator[list[str]]:
    """Yield names of a server, a page at a time; some twice when it grows meanwhile.

    Raises:
        TierError: it does not answer, refuses, or answers with something else.
    """
    cursor: Tree = b"0"
    while isinstance(cursor, bytes):
        page = _ask_node(
            node, encode(b"SCAN", cursor, b"MATCH", pattern.encode(), b"COUNT", b"%d" % SCAN_NAMES)
        )
        cursor, names = page if isinstance(page, list) and len(page) == 2 else (None, None)
        if not isinstance(cursor, bytes) or not isinstance(names, list):
            raise TierError(TIER_TYPE, f"{node.address} answers SCAN with something else")
        yield [name.decode("utf-8", "surrogateescape") for name in names if isinstance(name, bytes)]
        if cursor == b"0":
            return


def _ask_node(node: ServerNode, request: bytes) -> Tree:
    """Return the reply of one server to a command that is about no name.

    Raises:
        TierError: it does not answer, or refuses.
    """
    answer = Answer()
    (reply,) = node.run([Command(b"", (request,), answer.read)], ignores_pause=True)
    raise_if_away([reply])
    if code := error_code(reply):
        raise refused(node.address, code)
    return answer.tree
