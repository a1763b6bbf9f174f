"""The common part of the demo's server programs: print the address, then run until standard input is closed.

When the demo dies in any way, the kernel closes the pipe, so no server outlives it.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

START_S = 60.0
"""Seconds until a server must have accepted its first value; the slowest needs ten on a busy machine."""

POLL_S = 0.1
STOP_S = 10.0


class ServerInfo(NamedTuple):
    """How a tier reaches a server.

    Attributes:
        settings: the tier's own settings.
        environment: variables that the engine's process needs.
    """

    settings: Mapping[str, object]
    environment: Mapping[str, str]


def run_program(serve: Callable[[Path], AbstractContextManager[ServerInfo]]) -> None:
    """Serve in the directory that the command line names, print the tier settings as JSON, end with standard input."""
    with serve(Path(sys.argv[1])) as server:
        sys.stdout.write(json.dumps(server._asdict()) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


@contextmanager
def running(
    command: Sequence[str], directory: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` in ``directory``, its output in a file there; end it when the block ends."""
    with (directory / "server.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - a server of a package we name, with arguments of our own
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str) -> None:
    """Poll until the server of ``process`` is ready.

    Raises:
        SystemExit: it has ended, or takes longer than ``START_S``.
    """
    end_s = time.monotonic() + START_S
    while not is_ready():
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with status {process.returncode} before it was ready")
        if time.monotonic() > end_s:
            raise SystemExit(f"{name} was not ready within {START_S:.0f} s")
        time.sleep(POLL_S)


def free_ports(count: int, spacing: int = 0) -> list[int]:
    """Return ports of the loopback interface on which no process listens now.

    Args:
        count: how many.
        spacing: when positive, the port ``spacing`` above each is free too.
    """
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if spacing:
            port = 10_000 + port % 20_000
        if port not in ports and is_free(port) and (not spacing or is_free(port + spacing)):
            ports.append(port)
    return ports


def is_free(port: int) -> bool:
    """Return whether no process listens on ``port`` of the loopback interface."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
