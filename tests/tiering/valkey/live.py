"""Real servers for tests: started on free loopback ports, killed, paused and stopped by the process they are."""

import signal
import subprocess
from pathlib import Path

import redis
from tests.ports import free_port
from tests.servers import freeze, start_bound

HANG_GUARD_S = 60.0


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
