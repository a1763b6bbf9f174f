"""Real servers for tests: started on free loopback ports, killed, paused and stopped by the process they are."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
from tests.servers import freeze, start_bound

HANG_GUARD_S = 60.0
FIRST_PORT = 10_000
"""With those of all lanes below what the system hands out, so that a port that was free when it was chosen still is."""

OTHER_PORTS = (1, 10_000)
"""How far above it a server's port for TLS and a cluster node's own are."""

LANES, LANE_PORTS = 4, 3_000
"""Processes that share the tests choose from ports of their own: one that is free may be chosen by two at a time."""

_first = FIRST_PORT + LANE_PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % LANES)
_ports = iter(range(_first + time.time_ns() % 1_000, _first + LANE_PORTS, 2))


def free_port() -> int:
    """Return a port on which nobody listens, nor on the others that a server there may take."""
    return next(port for port in _ports if all(_is_free(port + above) for above in (0, *OTHER_PORTS)))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class LiveServer:
    """One server process.

    Args:
        binary: the program.
        folder: its working directory.
        options: further command-line arguments.
    """

    def __init__(self, binary: Path, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.tls_url = f"rediss://127.0.0.1:{self.port + 1}"
        settings = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
            *options,
        ]
        self._command = [
            str(binary),
            *(option.replace("{tls_port}", str(self.port + 1)) for option in settings),
        ]
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not ended since."""
        return self._process is not None

    def start(self) -> "LiveServer":
        """Start it and wait until it takes a value."""
        self._process = start_bound(
            self._command, lambda command: subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.close()
            raise
        return self

    def _wait_ready(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ready to accept connections" in line:
                break
        assert process.poll() is None, "".join(lines)
        if "--cluster-enabled" not in self._command:
            with self.client() as client:
                assert client.set("ready", 1)
                client.delete("ready")

    def client(self) -> redis.Redis:
        """Return redis-py's client, for looking at what a tier did."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=HANG_GUARD_S)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._signal(signal.SIGKILL)
        self._wait()

    def pause(self) -> None:
        """Make it hang: connections stay open and nobody answers."""
        assert self._process is not None
        freeze(self._process)

    def resume(self) -> None:
        """Let a paused one go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait(HANG_GUARD_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
