"""A real cluster for tests: three primaries and a replica of the first, on loopback."""

import subprocess
import time
from pathlib import Path

from tests.tiering.valkey.live import HANG_GUARD_S, LiveServer

from kvtier.base import OffloadKey
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, key_of, make_config
from kvtier.tiering.valkey.blobs import ValkeyNames
from kvtier.tiering.valkey.cluster import slot_of

NODE_OPTIONS = (
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "1000",
    "--cluster-require-full-coverage",
    "no",
    # Five seconds as Redis has it, before which a replica has nothing to take over with.
    "--repl-diskless-sync-delay",
    "0",
)
NUM_SLOTS = 16_384

NODE_TIMEOUT_MS = 60_000
"""Once all nodes have met, which longer ones would delay. A busy machine keeps a node from answering for seconds, and
the others must not vote it out meanwhile."""

FAILOVER_S = 10.0
"""Twice as long as Redis waits for an agreement, before it forgets without a word that it was to fail over."""


class LiveCluster:
    """Redis servers that know of each other.

    Args:
        binary: the server.
        cli: redis-cli.
        folder: below which each has its own.
    """

    def __init__(self, binary: Path, cli: Path, folder: Path) -> None:
        self._cli = cli
        self.nodes: list[LiveServer] = []
        for number in range(4):
            home = folder / str(number)
            home.mkdir()
            self.nodes.append(LiveServer(binary, home, *NODE_OPTIONS))

    @property
    def url(self) -> str:
        """Where the second node listens: one that no test kills."""
        return self.nodes[1].url

    @property
    def replica(self) -> LiveServer:
        """The fourth node, a replica of the first."""
        return self.nodes[3]

    def start(self) -> None:
        """Start the nodes and make them a cluster."""
        for node in self.nodes:
            node.start()
        addresses = [f"127.0.0.1:{node.port}" for node in self.nodes[:3]]
        self._run("--cluster", "create", *addresses, "--cluster-yes")
        self.wait_for(lambda: all(self._sees_all(node, 3) for node in self.nodes[:3]))
        with self.replica.client() as client:
            client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
            self.wait_for(lambda: all(self._sees_all(node, 4) for node in self.nodes))
            client.execute_command("CLUSTER REPLICATE", self.id_of(self.nodes[0]))
        self.heal()

    def heal(self) -> None:
        """Wait until each node reaches each other, all name the same primaries and replica, and that has caught up."""
        self.wait_for(
            lambda: (
                all(self._sees_all(node, 4) for node in self.nodes)
                and len({self._sight_of(node) for node in self.nodes}) == 1
                and sum(self._follows(node) for node in self.nodes) == 1
            )
        )
        for node in self.nodes:  # also one that was started again
            with node.client() as client:
                client.config_set("cluster-node-timeout", NODE_TIMEOUT_MS)

    def begin_failover(self, node: LiveServer) -> None:
        """Have a replica agree with its primary to take its slots; returns before it has."""
        with node.client() as client:
            client.execute_command("CLUSTER FAILOVER")

    def end_failover(self, node: LiveServer) -> None:
        """Wait until a replica has taken its primary's slots, without its agreement where Redis gave that up."""
        end_s = time.monotonic() + FAILOVER_S
        self.wait_for(lambda: self._is_primary(node) or time.monotonic() > end_s)
        self.take_over(node)

    def take_over(self, node: LiveServer) -> None:
        """Give a replica the slots of its primary, dead or alive, and wait until each node that runs knows it."""
        if not self._is_primary(node):
            with node.client() as client:
                client.execute_command("CLUSTER FAILOVER", "TAKEOVER")
        living = [other for other in self.nodes if other.is_running]
        self.wait_for(lambda: all(self.owner_of_slot(0, other) is node for other in living))

    def flush(self) -> None:
        """Remove every value."""
        for node in self.nodes:
            if self._is_primary(node):
                with node.client() as client:
                    client.flushall()

    def owner_of_first(self) -> LiveServer:
        """Return the node that has the first slot: the first one, or its replica after a failover."""
        return self.owner_of_slot(0)

    def owner_of(self, number: int) -> LiveServer:
        """Return the node that has the slot of block ``number`` by now."""
        return self.owner_of_slot(slot_of(name_of(number)))

    def owner_of_slot(self, slot: int, asked: LiveServer | None = None) -> LiveServer:
        """Return the node that has a slot by now, as ``asked`` says: the second one if None."""
        for first, last, port in self._owners(asked or self.nodes[1]):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody serves slot {slot}")

    def id_of(self, node: LiveServer) -> str:
        """Return the name that a node has in the cluster."""
        with node.client() as client:
            answer = client.execute_command("CLUSTER MYID")
            return answer.decode() if isinstance(answer, bytes) else str(answer)

    def move_slot(self, slot: int, source: LiveServer, target: LiveServer) -> None:
        """Hand an empty slot over, the new owner first: only that gives its word the greater weight."""
        new, old = self.id_of(target), self.id_of(source)
        with source.client() as giver, target.client() as taker:
            taker.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old)
            giver.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new)
            taker.execute_command("CLUSTER SETSLOT", slot, "NODE", new)
            giver.execute_command("CLUSTER SETSLOT", slot, "NODE", new)

    def close(self) -> None:
        """End every node."""
        for node in self.nodes:
            node.close()

    def wait_for(self, is_done: object) -> None:
        """Ask again until it is so."""
        assert callable(is_done)
        end_s = time.monotonic() + HANG_GUARD_S
        while not is_done():
            assert time.monotonic() < end_s, "the cluster does not come together"

    def _sees_all(self, node: LiveServer, num_nodes: int) -> bool:
        with node.client() as client:
            info = client.execute_command("CLUSTER INFO")
            nodes = client.execute_command("CLUSTER NODES")
        is_serving = (info if isinstance(info, dict) else {}).get("cluster_state") == "ok"
        table = str(nodes)
        is_well = "fail" not in table and "handshake" not in table and "disconnected" not in table
        return is_serving and is_well and table.count("127.0.0.1") >= num_nodes

    def _owners(self, node: LiveServer) -> list[tuple[int, int, int]]:
        """Return the first and the last slot of each range and its owner's port, as ``node`` says."""
        with node.client() as client:
            ranges = client.execute_command("CLUSTER SLOTS")
        return sorted((int(first), int(last), int(owner[1])) for first, last, owner, *_ in ranges)

    def _sight_of(self, node: LiveServer) -> tuple[object, ...]:
        """Return who has which slots and who is whose replica, as ``node`` says."""
        with node.client() as client:
            nodes = client.execute_command("CLUSTER NODES")
        return *self._owners(node), *sorted(
            (about["node_id"], about["master_id"]) for about in nodes.values()
        )

    def _is_primary(self, node: LiveServer) -> bool:
        with node.client() as client:
            return bool(client.role()[0] in {b"master", "master"})

    def _follows(self, node: LiveServer) -> bool:
        """Return whether a node is a replica that has caught up with its primary."""
        with node.client() as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            [self._cli, *arguments], check=False, capture_output=True, text=True, timeout=HANG_GUARD_S
        )
        assert done.returncode == 0, done.stdout + done.stderr


def name_of(number: int) -> bytes:
    """Return the server's name of block ``number`` of the suite's model."""
    return name_of_key(key_of(number))


def name_of_key(key: OffloadKey) -> bytes:
    """Return the server's name of a block of the suite's model."""
    return ValkeyNames().block(make_namespace(make_config(), ROW_BYTES).name, key).encode()
