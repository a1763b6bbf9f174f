"""A Mooncake store of one's own: a master and processes that lend it memory, each killed by its process id."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import mooncake
import mooncake.store
import numpy as np
from tests.ports import free_port
from tests.servers import freeze, start_bound

from kvtier.settings import parse_settings
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.mooncake.blobs import MooncakeBlobs
from kvtier.tiering.mooncake.errors import Code
from kvtier.tiering.mooncake.native import NativeStore, open_native
from kvtier.tiering.mooncake.settings import MooncakeSettings

HANG_GUARD_S = 60.0
SEGMENT_BYTES = 64 * 2**20
LEASE_MS = 5000
"""How long a read protects a value, as without the option."""

DEAD_AFTER_S = 2
"""Seconds without a word after which a provider counts as dead."""

MASTER_BINARY = Path(mooncake.__file__).parent / "mooncake_master"
PROVIDER = Path(__file__).with_name("provider.py")


class Server:
    """A process that can be killed, frozen and waited for.

    Args:
        command: how to start it.
    """

    def __init__(self, command: list[str]) -> None:
        environment = os.environ | {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "ERROR"}
        self.process = start_bound(
            command,
            lambda bound: subprocess.Popen(
                bound,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            ),
        )

    def freeze(self) -> None:
        """Let the process hang; returns when it does."""
        freeze(self.process)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process as a crash does; idempotent."""
        self.process.kill()
        self.process.wait(HANG_GUARD_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def wait_ready(self) -> None:
        """Block until the process says that it is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        raise AssertionError("the server ended before it was ready")


class LiveStore:
    """A master and its providers on free ports of the loopback interface.

    Args:
        num_providers: processes that lend memory.
        segment_bytes: how much each lends.
        lease_ms: how long a read protects a value.
    """

    def __init__(
        self, num_providers: int = 1, segment_bytes: int = SEGMENT_BYTES, lease_ms: int = LEASE_MS
    ) -> None:
        self._lease_ms = lease_ms
        self._segment_bytes = segment_bytes
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.admin_port = free_port()
        self.providers: list[Server] = []
        self.master = self._launch_master()
        try:
            wait_listening(self.port)
            for _ in range(num_providers):
                self.add_provider()
        except BaseException:
            self.close()
            raise

    def start_master(self) -> Server:
        """Start a master on the store's port; one that was there must be dead. It knows nothing."""
        self.master = self._launch_master()
        wait_listening(self.port)
        return self.master

    def _launch_master(self) -> Server:
        options = [
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.admin_port}",
            f"--default_kv_lease_ttl={self._lease_ms}",
            f"--client_ttl={DEAD_AFTER_S}",
        ]
        return Server([str(MASTER_BINARY), *options])

    def add_provider(self) -> Server:
        """Start a process that lends memory, and wait until a value has been stored."""
        provider = Server([sys.executable, str(PROVIDER), self.address, str(self._segment_bytes)])
        self.providers.append(provider)
        provider.wait_ready()
        return provider

    def restart(self) -> None:
        """Crash everything and start it anew, empty."""
        self.close()
        num_providers = len(self.providers)
        self.providers.clear()
        self.start_master()
        for _ in range(num_providers):
            self.add_provider()

    def close(self) -> None:
        """Kill every process."""
        for server in (*self.providers, self.master):
            server.kill()


class Vandal:
    """Somebody else who writes into the store, without envelopes.

    Args:
        address: the store's master.
    """

    def __init__(self, address: str) -> None:
        self._memory = np.zeros(2**20, np.uint8)
        self._store = mooncake.store.MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
        assert self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes) == 0

    def put(self, name: str, value: bytes) -> None:
        """Store ``value`` in place of whatever is there."""
        self._store.remove(name, True)
        self._memory[: len(value)] = np.frombuffer(value, np.uint8)
        answers = self._store.batch_put_from([name], [self._memory.ctypes.data], [len(value)])
        assert answers == [0]

    def get(self, name: str) -> bytes:
        """Return the value, empty when there is none."""
        address, num_bytes = self._memory.ctypes.data, self._memory.nbytes
        length = Code.LEASE_EXPIRED
        for _ in guarded():
            (length,) = self._store.batch_get_into([name], [address], [num_bytes])
            if length != Code.LEASE_EXPIRED:
                break
        return self._memory[: max(0, length)].tobytes()

    def remove(self, name: str) -> None:
        """Remove a value, leased or not."""
        self._store.remove(name, True)

    def outlast_leases(self) -> None:
        """Block until every lease of now has ended, which a value that is leased last shows."""
        name = f"ready/leased by {os.getpid()}"
        self.put(name, b"x")
        assert self.get(name) == b"x"
        for _ in guarded():
            if self._store.remove(name, False) == Code.OK:
                return

    def close(self) -> None:
        """Leave the store."""
        self._store.close()


class KeptClient:
    """A client that a tier takes for its own, and that the next tier gets when this one has left.

    The leases of a test's store are short enough for a busy machine to outlast them: what was read too late is read
    again, as its bytes alone do not tell a value that is damaged from one that was written over.

    Args:
        native: the client.
        free: where it goes.
    """

    def __init__(self, native: NativeStore, free: list[NativeStore]) -> None:
        self._native = native
        self._free = free
        self._registered: list[int] = []

    def __getattr__(self, name: str) -> object:
        """Return everything else of the client."""
        return getattr(self._native, name)

    def register_buffer(self, address: int, num_bytes: int, /) -> int:
        """Let transfers come from and go to this memory."""
        self._registered.append(address)
        return self._native.register_buffer(address, num_bytes)

    def unregister_buffer(self, address: int, /) -> int:
        """End that."""
        self._registered.remove(address)
        return self._native.unregister_buffer(address)

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], lengths: list[list[int]], /
    ) -> list[int]:
        """Read values within their leases."""
        answers: list[int] = []
        for _ in guarded():
            answers = self._native.batch_get_into_multi_buffers(names, addresses, lengths)
            if Code.LEASE_EXPIRED not in answers:
                break
        return answers

    def close(self) -> int:
        """Give the client to whoever opens one next."""
        for address in list(self._registered):
            self.unregister_buffer(address)
        self._free.append(self._native)
        return Code.OK


class KeptClients:
    """Clients for many tiers, one after another: the library takes a second to let one go.

    Mutable is the vandal that waits. ``_lock`` guards it: a tier's thread and a command may wait at once.
    """

    def __init__(self) -> None:
        self._free: dict[str, list[NativeStore]] = {}
        self._waiting: dict[str, Vandal] = {}
        self._lock = threading.Lock()

    def open(self, settings: MooncakeSettings) -> NativeStore:
        """Return a client that nobody uses, in place of ``open_native``."""
        free = self._free.setdefault(settings.master, [])
        return cast("NativeStore", KeptClient(free.pop() if free else open_native(settings), free))

    def open_blobs(
        self, own: Mapping[str, object], clock: Callable[[], float] = time.monotonic, rows: Rows | None = None
    ) -> MooncakeBlobs:
        """Return a store's values, which wait for the ends of leases instead of for seconds."""
        settings = parse_settings(MooncakeSettings, own, "a test")
        pause = partial(self._outlast_leases, settings.master)
        return MooncakeBlobs(settings, rows, clock, self.open, pause)

    def _outlast_leases(self, master: str, _: float) -> None:
        with self._lock:
            if master not in self._waiting:
                self._waiting[master] = Vandal(master)
            self._waiting[master].outlast_leases()

    def close(self, master: str) -> None:
        """Leave a store."""
        for native in self._free.pop(master, []):
            native.close()
        if master in self._waiting:
            self._waiting.pop(master).close()


KEPT_CLIENTS = KeptClients()


def guarded() -> Iterator[None]:
    """Yield until something must have hung."""
    end_s = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < end_s:
        yield
    raise AssertionError("the store goes on answering that a lease has, or has not, ended")


def wait_listening(port: int) -> None:
    """Block until somebody accepts connections; the first provider's put shows that it also serves."""
    for _ in range(int(HANG_GUARD_S / 0.05)):
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        select.select([], [], [], 0.05)
    raise AssertionError("the master does not listen")
