"""A real cluster for tests: three primaries and a replica of the first, on loopback."""

import subprocess
import time
from pathlib import Path

from tests.tiering.valkey.live import HANG_GUARD_S, LiveServer

from kvtier.base import OffloadKey
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, key_of, make_config
from kvtier.tiering.valkey.cluster import slot_of
from kvtier.tiering.valkey.names import ValkeyNamespace

NODE_OPTIONS = (
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "1000",
    "--cluster-require-full-coverage",
    "no",
)
NUM_SLOTS = 16_384


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
        primary = self.id_of(self.nodes[0])
        options = ["--cluster-slave", "--cluster-master-id", primary]
        self._run("--cluster", "add-node", f"127.0.0.1:{self.replica.port}", addresses[0], *options)
        self.wait_for(lambda: all(self._sees_all(node, 4) for node in self.nodes))

    def heal(self) -> None:
        """Wait until each node says that each slot is served by a node it can reach."""
        self.wait_for(lambda: all(self._sees_all(node, 4) for node in self.nodes))

    def flush(self) -> None:
        """Remove every value."""
        for node in self.nodes:
            with node.client() as client:
                if client.role()[0] in {b"master", "master"}:
                    client.flushall()

    def owner_of_first(self) -> LiveServer:
        """Return the node that has the first slot: the first one, or its replica after a failover."""
        return self.owner_of_slot(0)

    def owner_of(self, number: int) -> LiveServer:
        """Return the node that has the slot of block ``number`` by now."""
        return self.owner_of_slot(slot_of(name_of(number)))

    def owner_of_slot(self, slot: int) -> LiveServer:
        """Return the node that has a slot by now."""
        with self.nodes[1].client() as client:
            for begin, end, owner, *_ in client.execute_command("CLUSTER SLOTS"):
                if int(begin) <= slot <= int(end):
                    return next(node for node in self.nodes if node.port == int(owner[1]))
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
    return ValkeyNamespace(make_namespace(make_config(), ROW_BYTES)).block_name(key)
