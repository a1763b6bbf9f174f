"""What every server of the demo's own is: a program that says where it is, and lives until its standard input ends.

It starts nothing itself. However the demo dies, the kernel closes the pipe, so no server outlives it.
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
"""Seconds in which a server has to take its first value; the slowest needs ten on a busy machine."""

POLL_S = 0.1
STOP_S = 10.0


class Place(NamedTuple):
    """Where a server is, for the tier that will use it.

    Attributes:
        settings: the tier's own settings.
        environment: variables that the engine's process needs.
    """

    settings: Mapping[str, object]
    environment: Mapping[str, str]


def run_program(serve: Callable[[Path], AbstractContextManager[Place]]) -> None:
    """Serve in the directory that the command line names, print the place as JSON, and end with standard input."""
    with serve(Path(sys.argv[1])) as place:
        sys.stdout.write(json.dumps(place._asdict()) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


@contextmanager
def running(
    command: Sequence[str], directory: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` in ``directory``, its output in a file there, and end it when the block is left."""
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
    """Ask again and again until the server of ``process`` is ready.

    Raises:
        SystemExit: it has ended, or takes too long.
    """
    end_s = time.monotonic() + START_S
    while not is_ready():
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with status {process.returncode} before it was ready")
        if time.monotonic() > end_s:
            raise SystemExit(f"{name} was not ready within {START_S:.0f} s")
        time.sleep(POLL_S)


def free_ports(count: int, spacing: int = 0) -> list[int]:
    """Return ports of the loopback interface that nobody listens on now.

    Args:
        count: how many.
        spacing: when positive, the port that much above each is free too.
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
    """Return whether nobody listens on ``port`` of the loopback interface."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
