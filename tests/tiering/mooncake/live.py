"""A Mooncake store of one's own: a master and processes that lend it memory, each killed by its process id."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import mooncake
import mooncake.store
import numpy as np
from tests.ports import free_port
from tests.servers import freeze, start_bound

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
        (length,) = self._store.batch_get_into([name], [address], [num_bytes])
        return self._memory[: max(0, length)].tobytes()

    def close(self) -> None:
        """Leave the store."""
        self._store.close()


def wait_listening(port: int) -> None:
    """Block until somebody accepts connections; the first provider's put shows that it also serves."""
    for _ in range(int(HANG_GUARD_S / 0.05)):
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        select.select([], [], [], 0.05)
    raise AssertionError("the master does not listen")
