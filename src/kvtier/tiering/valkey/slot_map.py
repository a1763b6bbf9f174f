"""The map of a cluster: which node has which hash slots, as one of its nodes says.

What a node says is input: a map that contradicts itself, or names what cannot be, is refused as a whole, and the
cluster counts as away until a node sends a better one.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvtier.errors import TierError
from kvtier.tiering.valkey.connection import Command
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import TIER_TYPE, refused
from kvtier.tiering.valkey.resp import ProtocolError, Reply, ReplyReader, Tree, encode, read_tree
from kvtier.tiering.valkey.servers import ServerNode
from kvtier.tiering.valkey.settings import ValkeySettings

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


class _MapReader:
    """Reads the reply with the map.

    Attributes:
        tree: what came.
    """

    def __init__(self) -> None:
        self.tree: Tree = None

    def read(self, reader: ReplyReader) -> Reply:
        """Read it."""
        self.tree = read_tree(reader)
        return self.tree if isinstance(self.tree, Reply) else Reply("*")


def _fetch_from(settings: ValkeySettings, address: Address, clock: Callable[[], float]) -> SlotMap:
    node, reader = ServerNode(settings, address, clock), _MapReader()
    try:
        (reply,) = node.run([Command(b"", (encode(b"CLUSTER", b"SLOTS"),), reader.read)])
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
        slot_map = parse_slot_map(reader.tree, address)
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
