"""A cluster: sends each command to the node that has its name, by a map that the nodes themselves give.

The map is a value that comes from the first node that answers; it is read again when it turned out to be
wrong. A command that was sent to the wrong node is sent on, a few times at most.

What a node says is input: a map that contradicts itself, or names what cannot be, is refused as a whole, and the
cluster counts as away until a node sends a better one.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.valkey.connection import Answer, Command, ReplyOrError, error_code
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import TIER_TYPE, refused, unreachable
from kvtier.tiering.valkey.resp import (
    OverdueError,
    ProtocolError,
    Reply,
    Tree,
    encode,
)
from kvtier.tiering.valkey.servers import (
    CHECK_COMMANDS,
    MAX_EXCHANGE_S,
    ServerNode,
    Servers,
    raise_if_away,
    raise_if_refused,
)
from kvtier.tiering.valkey.settings import ValkeySettings

try:
    from redis.crc import key_slot
except ImportError as error:
    raise MissingExtraError("redis", "valkey") from error


def slot_of(name: bytes) -> int:
    """Return the hash slot of a name: of what stands in its braces. Pure."""
    return int(key_slot(name))


MAX_HOPS = 4
"""Nodes that a command is sent to before it fails: the one of the map, the one that has the slot by now, and the
one that the name is moving to; one more for a map that changes meanwhile."""

REFRESH_S = 1.0
"""Seconds between two readings of the map. Shorter burdens a cluster in trouble; longer finds a new primary
later, and each of its blocks is a miss until then."""

TROUBLE_THAT_LASTS = frozenset({"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN"})
TROUBLE_OF_ONE_NODE = TROUBLE_THAT_LASTS | {"MOVED", "ASK", "TRYAGAIN"}
"""Refusals that are about one node; what else is refused, every node would refuse."""


SlotMap: TypeAlias = dict[int, Address]
"""The primary of each hash slot; a slot without one is not in it."""

NUM_SLOTS = 16_384
MAX_PORT = 65_535

MAX_NODES = 1000
"""Primaries of a cluster: as many as its authors recommend at most. More would be asked one after another, a time-out
for each that is away."""

MAX_SEARCH_S = 10.0
"""Seconds after which no further node is asked for the map. Longer holds up the jobs that wait for it; shorter may not
reach a living node behind several dead ones."""

UNKNOWN_HOST = b"?"
"""A node that is to be named by its host name and has none."""

_HOST = re.compile(rb"[A-Za-z0-9._:%-]{1,253}")


class Destination(NamedTuple):
    """Where a command goes.

    Attributes:
        address: the node's.
        is_asking: whether the name is just moving there.
    """

    address: Address
    is_asking: bool = False


class Cluster(Servers):
    """Sends each command to the node that has its name, and follows it when it has moved.

    Mutable are the map, what is known of its age, the last reason why it could not be read, the nodes,
    and which of them are in trouble. ``_lock`` guards them; no call is made under it.

    Args:
        settings: one node of it, and how to connect.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: ValkeySettings, clock: Callable[[], float]) -> None:
        super().__init__(settings.url.address)
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._slot_map: SlotMap = {}
        self._is_stale = True
        self._next_refresh_s = float("-inf")
        self._unread: TierError | None = None
        self._nodes: dict[Address, ServerNode] = {}
        self._members: frozenset[Address] = frozenset()
        self._troubled: set[Address] = set()

    def run(
        self, commands: Sequence[Command], end_s: float | None = None, *, is_use: bool = True
    ) -> list[ReplyOrError]:
        slot_map = self._current_map()
        # A map or redirections that name many dead nodes must not cost a time-out for each.
        end_s = self._clock() + MAX_EXCHANGE_S if end_s is None else end_s
        unserved = TierError(TIER_TYPE, "no node of the cluster serves the block's slot")
        replies: list[ReplyOrError] = [unserved] * len(commands)
        waiting: dict[Destination, list[int]] = {}
        for index, command in enumerate(commands):
            address = slot_map.get(slot_of(command.name))
            if address is None:
                self._note_stale()
            else:
                waiting.setdefault(Destination(address), []).append(index)
        for _ in range(MAX_HOPS):
            if not waiting:
                break
            waiting = self._run_each(commands, waiting, replies, end_s, is_use=is_use)
        return replies

    def nodes(self) -> list[ServerNode]:
        nodes = [self._node(address) for address in sorted(set(self._current_map().values()))]
        return [node for node in nodes if node is not None]

    def is_fault(self, reply: ReplyOrError) -> bool:
        if isinstance(reply, Reply) and reply.error_code not in TROUBLE_OF_ONE_NODE:
            return True
        with self._lock:
            return self._troubled >= self._members

    def check_reachable(self) -> None:
        slot_map = self._read_map()
        probes: dict[Address, list[ReplyOrError]] = {}
        end_s = self._clock() + MAX_EXCHANGE_S
        for address in sorted(set(slot_map.values())):
            node = self._node(address)
            if node is not None and self._clock() < end_s:
                probes[address] = node.run(CHECK_COMMANDS, end_s, ignores_pause=True)
        raise_if_away([reply for replies in probes.values() for reply in replies])
        for address, replies in probes.items():
            # Permission is checked before the slot: a node that says "not mine" would have let us.
            raise_if_refused(address, replies, allowed={"OOM", *TROUBLE_OF_ONE_NODE} - {"CLUSTERDOWN"})

    def close(self) -> None:
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _run_each(
        self,
        commands: Sequence[Command],
        waiting: dict[Destination, list[int]],
        replies: list[ReplyOrError],
        end_s: float,
        *,
        is_use: bool,
    ) -> dict[Destination, list[int]]:
        """Run commands at their destinations, note the replies, return those that have to go elsewhere."""
        moved: dict[Destination, list[int]] = {}
        for destination, indices in waiting.items():
            own = [commands[index] for index in indices]
            asked = self._run_at(destination, own, end_s, is_use=is_use)
            for index, reply in zip(indices, asked, strict=True):
                replies[index] = reply
                if (elsewhere := redirection(reply, destination.address)) is not None:
                    moved.setdefault(elsewhere, []).append(index)
                    if not elsewhere.is_asking:
                        self._note_stale()
        return moved

    def _run_at(
        self, destination: Destination, commands: Sequence[Command], end_s: float, *, is_use: bool
    ) -> list[ReplyOrError]:
        node = self._node(destination.address)
        if node is None:
            unknown = TierError(TIER_TYPE, "the cluster redirects to too many nodes")
            return [unknown] * len(commands)
        if self._clock() >= end_s:
            return [unreachable(destination.address, OverdueError())] * len(commands)
        replies = node.run(commands, end_s, is_asking=destination.is_asking, is_use=is_use)
        trouble = next((reply for reply in replies if isinstance(reply, TierError)), None)
        codes = {error_code(reply) for reply in replies} & TROUBLE_THAT_LASTS
        if trouble is None and codes:
            trouble = refused(destination.address, codes.pop())
        with self._lock:
            (self._troubled.discard if trouble is None else self._troubled.add)(destination.address)
        if trouble is None:
            node.health.on_success()
        else:
            node.health.on_failure(trouble)
            self._note_stale()
        return replies

    def _node(self, address: Address) -> ServerNode | None:
        """Return the node at ``address``; None when it would be one too many."""
        with self._lock:
            if address not in self._nodes:
                if len(self._nodes) >= 2 * MAX_NODES:  # those of the map, and those that redirections name
                    return None
                self._nodes[address] = ServerNode(self._settings, address, self._clock)
            return self._nodes[address]

    def _note_stale(self) -> None:
        with self._lock:
            self._is_stale = True

    def _current_map(self) -> SlotMap:
        with self._lock:
            is_due = self._is_stale and self._clock() >= self._next_refresh_s
            if not is_due and self._unread is not None:
                raise self._unread.with_traceback(None)
            if not is_due and self._slot_map:
                return self._slot_map
            self._next_refresh_s = self._clock() + REFRESH_S
        return self._read_map()

    def _read_map(self) -> SlotMap:
        with self._lock:
            known = {address: node.health.is_paused for address, node in self._nodes.items()}
        # Those that were away a moment ago last: each of them may cost a time-out.
        known.setdefault(self.address, False)
        try:
            addresses = sorted(known, key=lambda address: known[address])
            slot_map = fetch_slot_map(self._settings, addresses, self._clock)
        except TierError as error:
            with self._lock:
                self._unread = error
            raise
        members = frozenset(slot_map.values())
        with self._lock:
            self._slot_map, self._is_stale, self._unread = slot_map, False, None
            self._members = members
            self._troubled &= members
            gone = [self._nodes.pop(address) for address in self._nodes.keys() - members]
        for node in gone:
            node.close()
        return slot_map


def redirection(reply: ReplyOrError, asked: Address) -> Destination | None:
    """Return where ``reply`` says that the name is, None when it says nothing of that kind. Pure.

    Args:
        reply: of a command.
        asked: the node that was asked; one that names no host means its own.
    """
    code = error_code(reply)
    if code not in {"MOVED", "ASK"} or not isinstance(reply, Reply):
        return None
    host, _, port = reply.text.rpartition(" ")[2].rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) <= MAX_PORT):
        return None
    return Destination(Address(host or asked.host, int(port)), is_asking=code == "ASK")


def fetch_slot_map(
    settings: ValkeySettings, addresses: Iterable[Address], clock: Callable[[], float] = time.monotonic
) -> SlotMap:
    """Return the map of the first of the nodes at ``addresses`` that sends one.

    Raises:
        TierError: none of them did; the reason is the last one's.

    Thread: any; blocks, for the time-outs of each node that does not answer.
    """
    error: TierError | None = None
    end_s = clock() + MAX_SEARCH_S
    for address in addresses:
        if error is not None and clock() >= end_s:
            break
        try:
            return _fetch_from(settings, address, clock)
        except TierError as cause:
            error = cause
    assert error is not None, "the address that the user gave is one of them"
    raise error


def _fetch_from(settings: ValkeySettings, address: Address, clock: Callable[[], float]) -> SlotMap:
    node, answer = ServerNode(settings, address, clock), Answer()
    try:
        (reply,) = node.run([Command(b"", (encode(b"CLUSTER", b"SLOTS"),), answer.read)])
    finally:
        node.close()
    if isinstance(reply, TierError):
        raise reply
    if reply.error_code == "ERR":
        raise TierError(
            TIER_TYPE, f"{address} cannot be used: it is not one of a cluster: set cluster to false"
        )
    if reply.kind == "-":
        raise refused(address, reply.error_code)
    try:
        slot_map = parse_slot_map(answer.tree, address)
    except ProtocolError as error:
        raise TierError(TIER_TYPE, f"{address} sends a map that cannot be right: {error}") from None
    if not slot_map:
        raise refused(address, "CLUSTERDOWN")
    return slot_map


def parse_slot_map(tree: Tree, asked: Address) -> SlotMap:
    """Return the map that the reply to CLUSTER SLOTS holds; slots that no range names are not in it. Pure.

    Args:
        tree: the reply.
        asked: the node that sent it; a node without a host is there too, at its own port.

    Raises:
        ProtocolError: it is no map, names a slot twice, or what cannot be.
    """
    if not isinstance(tree, list):
        raise ProtocolError("it is no list")
    slot_map: SlotMap = {}
    for entry in tree:
        if not isinstance(entry, list) or len(entry) < 3:
            raise ProtocolError("an entry is no range with a node")
        first, last = entry[:2]
        if not isinstance(first, int) or not isinstance(last, int) or not 0 <= first <= last < NUM_SLOTS:
            raise ProtocolError(f"a range is not within the slots 0 to {NUM_SLOTS - 1}")
        address = _parse_node(entry[2], asked)
        for slot in range(first, last + 1):
            if slot in slot_map:
                raise ProtocolError(f"slot {slot} is in it twice")
            slot_map[slot] = address
    num_nodes = len(set(slot_map.values()))
    if num_nodes > MAX_NODES:
        raise ProtocolError(f"it names {num_nodes} nodes, at most {MAX_NODES} are used")
    return slot_map


def _parse_node(node: Tree, asked: Address) -> Address:
    if not isinstance(node, list) or len(node) < 2:
        raise ProtocolError("a node has no address")
    host, port = node[:2]
    if not isinstance(port, int) or not 0 < port <= MAX_PORT:
        raise ProtocolError(f"a node's port is not within 1 to {MAX_PORT}")
    if host == UNKNOWN_HOST:
        host = _ip_of(node)
    if host is None or host == b"":
        return Address(asked.host, port)
    if not isinstance(host, bytes) or _HOST.fullmatch(host) is None:
        raise ProtocolError("a node's host is no name and no address")
    return Address(host.decode("ascii"), port)


def _ip_of(node: list[Tree]) -> Tree:
    """Return the address that stands behind a node's name since Redis 7; None where there is none. Pure."""
    further = node[3] if len(node) > 3 else None
    if not isinstance(further, list):
        return None
    pairs = zip(further[::2], further[1::2], strict=False)
    return next((value for name, value in pairs if name == b"ip"), None)
