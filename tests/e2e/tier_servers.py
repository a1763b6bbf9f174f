"""What each secondary tier keeps its blocks in, as something to kill, hang and start again under a running engine.

It drives no engine and knows no block but those that another process writes. Servers are those of the tiers' own
tests. A directory has no server: there another process that uses the same one is what dies in the middle of its writes.
"""

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.servers import require_mooncake

from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES

FIRST_PEER_NUMBER = 2**30
"""Blocks from here on are written by the other process in a directory."""

MAX_PEER_JOBS = 8
"""Jobs that it ends before it is killed in the next one."""

MIN_CAPACITY_BLOCKS = 256
FS_BLOCK_BYTES = ROW_BYTES + 4096


@dataclass(frozen=True, slots=True)
class TierServer:
    """A place for blocks that runs from the start.

    Attributes:
        config: the entry of ``secondary_tiers`` for it.
        kill: ends it at once, as a crash does.
        start: starts it after a kill; it takes blocks when this returns.
        hang: makes it stop answering, connections standing; None where the engine would hang too.
        wake: makes it go on after a hang.
        close: ends it if it runs.
        ends_engine: whether its death takes the engine with it, which is then to be started anew.
    """

    config: Mapping[str, object]
    kill: Callable[[], object]
    start: Callable[[], object]
    hang: Callable[[], object] | None
    wake: Callable[[], object]
    close: Callable[[], object]
    ends_engine: bool = False


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """What a server is started for.

    Attributes:
        folder: where it keeps its files.
        num_blocks: blocks that will travel.
        choose: where chance comes from.
        monkeypatch: sets what a client reads in the environment.
    """

    folder: Path
    num_blocks: int
    choose: random.Random
    monkeypatch: pytest.MonkeyPatch


class FSNeighbour:
    """Another engine on the same directory, hurt while it writes.

    Args:
        root: the directory.
        capacity_bytes: what both allow.
        choose: where chance comes from.
    """

    def __init__(self, root: Path, capacity_bytes: int, choose: random.Random) -> None:
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._choose = choose
        self._next_number = FIRST_PEER_NUMBER
        self.start()

    def start(self) -> None:
        """Start it, in place of one that is dead."""
        from tests.tiering.fs.peer import Peer

        self._peer = Peer(self._root, self._capacity_bytes)

    def kill(self) -> None:
        """Kill it in the middle of its writes."""
        self._write()
        self._peer.kill()

    def hang(self) -> None:
        """Stop it in the middle of its writes, whatever it has locked."""
        self._write()
        self._peer.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self._peer.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it."""
        self._peer.kill()

    def _write(self) -> None:
        num_blocks = 2 * MAX_PEER_JOBS * NUM_ROWS
        self._peer.start("churn", self._next_number, num_blocks)
        self._next_number += num_blocks
        for _ in range(self._choose.randint(1, MAX_PEER_JOBS)):
            self._peer.next_answer()


def start_fs(order: ServerOrder) -> TierServer:
    """Return a directory with room for three quarters of the blocks, and another engine on it."""
    root = order.folder / "blocks"
    capacity_bytes = max(MIN_CAPACITY_BLOCKS, order.num_blocks * 3 // 4) * FS_BLOCK_BYTES
    peer = FSNeighbour(root, capacity_bytes, order.choose)
    config = {"type": "fs", "root_dir": str(root), "capacity_bytes": capacity_bytes}
    return TierServer(config, peer.kill, peer.start, peer.hang, peer.wake, peer.close)


def start_obj(order: ServerOrder) -> TierServer:
    """Return an S3 server, which keeps its data through a kill, or skip."""
    pytest.importorskip("obstore", reason="the obj tier needs its client: pip install 'kvtier[obj]'")
    from tests.tiering.obj.conftest import s3_options, set_credentials
    from tests.tiering.obj.server import S3Server

    set_credentials(order.monkeypatch)
    server = S3Server(order.folder / "weed")
    try:
        server.start()
    except BaseException:
        server.kill()
        raise
    config = {"type": "obj", "timeout_s": 0.7} | s3_options(server, "chaos")
    return TierServer(config, server.kill, server.start, server.hang, server.wake, server.kill)


def start_valkey(order: ServerOrder) -> TierServer:
    """Return a Valkey server, which is empty after a kill, or skip."""
    from tests.tiering.valkey.conftest import valkey_binary
    from tests.tiering.valkey.live import LiveServer

    server = LiveServer(valkey_binary(), order.folder).start()
    config = {"type": "valkey", "url": server.url, "timeout_s": 0.5}
    return TierServer(config, server.kill, server.start, server.pause, server.resume, server.close)


def start_mooncake(order: ServerOrder) -> TierServer:
    """Return a master and a provider, one of which dies; all is empty when it is back; or skip."""
    require_mooncake()
    from tests.tiering.mooncake.conftest import TIMEOUT_S
    from tests.tiering.mooncake.live import LiveStore

    store = LiveStore()

    def kill() -> None:
        order.choose.choice([store.master, *store.providers]).kill()

    def hang() -> None:
        order.choose.choice([store.master, *store.providers]).freeze()

    def wake() -> None:
        for server in (store.master, *store.providers):
            server.thaw()

    config = {
        "type": "mooncake",
        "master": store.address,
        "timeout_s": TIMEOUT_S,
        "allow_any_interface": True,
    }
    return TierServer(config, kill, store.restart, hang, wake, store.close)


SERVERS: Mapping[str, Callable[[ServerOrder], TierServer]] = {
    "fs": start_fs,
    "obj": start_obj,
    "valkey": start_valkey,
    "mooncake": start_mooncake,
}
"""By the tier's name, what starts its server."""
