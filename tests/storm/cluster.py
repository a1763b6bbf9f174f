"""The valkey tier on a cluster in the same process: slots that move, nodes that are away, replicas that take over.

Each node is a server of its own. The slots are in ranges; one of them may be on its way from one node to another, some
of its names here and some there: the old node answers ASK for what has gone, the new one MOVED to those that do not
say ASKING. A node that dies is replaced by its replica at another address, which lacks some of what was acknowledged.
"""

import errno
from collections.abc import Sequence
from typing import ClassVar

from tests.storm.place import StormPlace, Weather
from tests.storm.servers import ServerPlace, SimConnections, ValkeyPlace

from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey import servers as valkey_servers
from kvtier.tiering.valkey.cluster import NUM_SLOTS, slot_of
from kvtier.tiering.valkey.endpoint import Address

NUM_NODES = 3
NUM_RANGES = 8
RANGE_SLOTS = NUM_SLOTS // NUM_RANGES
FIRST_PORT = 7000
FAILOVER_S = 3.0
"""How long a dead node is away until its replica takes over."""

HOST_NAME = "cluster"


class ClusterNode(ValkeyPlace):
    """A node of the cluster, whose faults are the cluster's.

    Args:
        cluster: it belongs to.
        port: by which it is found.

    Attributes:
        port: the same.
        back_s: when it, or its replica, answers again.
    """

    def __init__(self, cluster: "ClusterPlace", port: int) -> None:
        self._cluster = cluster
        super().__init__(cluster.weather)
        self.port = port
        self.back_s = 0.0

    @property
    def is_honest(self) -> bool:
        """Whether the cluster's tier may believe every acknowledgement."""
        return self._cluster.is_honest

    @is_honest.setter
    def is_honest(self, value: bool) -> None:
        """Note that it may not."""
        self._cluster.is_honest &= value

    def happens(self, fault: str) -> bool:
        return self._cluster.happens(fault)

    def watch(self, data: bytes | bytearray) -> None:
        self._cluster.watch(data)

    def require_alive(self) -> None:
        """Refuse connections while it is away."""
        if self.weather.clock() < self.back_s:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the node is down")

    def answer(self, words: Sequence[bytes], *, is_asking: bool = False) -> bytes:
        if words[0] == b"CLUSTER":
            return self._cluster.describe_slots()
        name = words[1] if len(words) > 1 else b""
        elsewhere = self._cluster.redirect(self, name, is_asking=is_asking) if _has_name(words) else None
        return super().answer(words) if elsewhere is None else elsewhere

    def move(self, name: bytes, target: "ClusterNode") -> None:
        """Give a value to another node."""
        target.values[name] = self.values.pop(name)
        if name in self._ends_s:
            target._ends_s[name] = self._ends_s.pop(name)  # of the same class

    def take_over(self, port: int) -> None:
        """Let the replica take over at another address, without some of the newest values."""
        self.port = port
        self.back_s = self.weather.clock() + FAILOVER_S
        names = list(self.values)
        for name in names[len(names) - self.weather.rng.randrange(3) :]:
            del self.values[name]


class ClusterPlace(StormPlace):
    """The valkey tier and its cluster.

    Attributes:
        present: the cluster that the next client gets.
        nodes: those that have slots.
    """

    fault_names = (*ServerPlace.fault_names, "node_down")
    can_encrypt: ClassVar[bool] = True
    quota_tier: ClassVar[str] = "valkey"
    header_bytes: ClassVar[int] = ENVELOPE_BYTES
    present: ClassVar["ClusterPlace"]

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self.nodes = [ClusterNode(self, FIRST_PORT + number) for number in range(NUM_NODES)]
        self._next_port = FIRST_PORT + NUM_NODES
        self._owners = [self.nodes[number % NUM_NODES] for number in range(NUM_RANGES)]
        self._moving: tuple[int, ClusterNode] | None = None
        # The same in all lives: the server keeps a value for as long as its writer has said.
        self._sent_ttl_s = weather.rng.choice([0, 86_400, 30])
        self.ttl_s = weather.rng.choice([None, self._sent_ttl_s or None])

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        rng = self.weather.rng
        ClusterPlace.present = self
        return ValkeyTier(
            config,
            view,
            settings,
            clock=self.weather.clock,
            url=f"redis://{HOST_NAME}:{self.nodes[0].port}",
            cluster=True,
            ttl_s=self._sent_ttl_s,
            renew_ttl=self.ttl_s is None,
            num_threads=rng.choice([1, 3]),
        )

    def hurt(self) -> None:
        rng = self.weather.rng
        kind = rng.random()
        if kind < 0.6:
            self.move_on()
        elif kind < 0.75:
            self.fail_over(rng.choice(self.nodes))
        else:
            rng.choice(self.nodes).hurt()

    def find_node(self, address: Address) -> ClusterNode:
        """Return the node at an address.

        Raises:
            ConnectionRefusedError: nothing listens there.
        """
        node = next((node for node in self.nodes if node.port == address.port), None)
        if node is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
        if self.happens("node_down"):
            node.back_s = self.weather.clock() + FAILOVER_S
        node.require_alive()
        return node

    def describe_slots(self) -> bytes:
        """Return the reply to CLUSTER SLOTS."""
        entries = [
            b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n"
            % (
                number * RANGE_SLOTS,
                (number + 1) * RANGE_SLOTS - 1,
                len(HOST_NAME),
                HOST_NAME.encode(),
                owner.port,
            )
            for number, owner in enumerate(self._owners)
        ]
        return b"*%d\r\n%b" % (len(entries), b"".join(entries))

    def redirect(self, node: ClusterNode, name: bytes, *, is_asking: bool) -> bytes | None:
        """Return what a node answers instead of carrying out a command about ``name``; None when it does."""
        slot = slot_of(name)
        number = slot // RANGE_SLOTS
        owner = self._owners[number]
        target = self._moving[1] if self._moving is not None and self._moving[0] == number else None
        if node is owner:
            if target is None or name in node.values:
                return None
            self.happened["ask"] += 1
            return b"-ASK %d %b:%d\r\n" % (slot, HOST_NAME.encode(), target.port)
        if node is target and is_asking:
            return None
        self.happened["moved"] += 1
        return b"-MOVED %d %b:%d\r\n" % (slot, HOST_NAME.encode(), owner.port)

    def move_on(self) -> None:
        """Begin to move a range, move some of its names, or end the move."""
        rng = self.weather.rng
        if self._moving is None:
            number = rng.randrange(NUM_RANGES)
            others = [node for node in self.nodes if node is not self._owners[number]]
            self._moving = number, rng.choice(others)
        number, target = self._moving
        owner = self._owners[number]
        names = [name for name in owner.values if slot_of(name) // RANGE_SLOTS == number]
        is_last = rng.random() < 0.3
        for name in names if is_last else names[: len(names) // 2]:
            owner.move(name, target)
        if is_last:
            self._owners[number], self._moving = target, None

    def fail_over(self, node: ClusterNode) -> None:
        """Let the replica of a node take its place."""
        self.happened["failover"] += 1
        self.is_honest = False
        node.take_over(self._next_port)
        self._next_port = FIRST_PORT + (self._next_port + 1 - FIRST_PORT) % 1000


def valkey_calls() -> list[tuple[object, str, object]]:
    """Return what to replace while the storm runs, so that clients meet the server or the nodes of the cluster."""

    def connect(settings: object, address: Address, clock: object = None) -> SimConnections:
        del settings, clock
        if address.host != HOST_NAME:
            return SimConnections(lambda: ValkeyPlace.present)
        cluster = ClusterPlace.present
        return SimConnections(lambda: cluster.find_node(address))

    return [(valkey_servers, "ServerConnections", connect)]


def _has_name(words: Sequence[bytes]) -> bool:
    return words[0] in {b"SET", b"GET", b"STRLEN", b"PEXPIRE", b"UNLINK"}
