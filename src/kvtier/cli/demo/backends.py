"""The storage behind the demo's tier: a directory, a file in it, or a server that the demo starts.

A server is a program of ``kvtier.cli.demo.servers`` in its own process. Both engines of the demo use the same one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.errors import TierError
from kvtier.tiering.factory import TIERS, own_setting_names

FILE_CAPACITY = "16GiB"
"""Disk space for a tier. The default demo needs a hundredth of it; a long trace evicts."""

SLAB_CAPACITY = "1GiB"
"""What the slab file allocates at its start."""

SERVERS = {"valkey": "valkey", "obj": "seaweed", "mooncake": "mooncake"}
"""Tiers that need a server -> the program that runs it."""

STOP_S = 15.0

SOURCE_FOLDER = Path(__file__).parents[3]
"""Where a child process finds this package, installed or not."""

Settings = dict[str, Any]  # Any: a tier's JSON


@contextmanager
def open_backend(tier: str, directory: Path) -> Iterator[Settings]:
    """Yield the settings of ``tier`` for a location in ``directory``; a server runs until the block ends.

    Raises:
        TierError: the server cannot be started; the message has its last line of output.
    """
    if tier in SERVERS:
        with run_server(tier, SERVERS[tier], directory / tier) as settings:
            yield settings
    elif tier == "slab":
        yield {"path": str(directory / "blocks.slab"), "capacity_bytes": SLAB_CAPACITY}
    else:
        yield location_settings(tier, directory)


def location_settings(tier: str, directory: Path) -> Settings:
    """Return the location settings for a tier class of the user's, named like those of fs and slab.

    Its other settings come from ``--tier-setting``.
    """
    offered = {
        "root_dir": str(directory),
        "path": str(directory / "blocks"),
        "capacity_bytes": FILE_CAPACITY,
    }
    wanted = own_setting_names(TIERS.resolve(tier))
    return {name: value for name, value in offered.items() if name in wanted}


@contextmanager
def run_server(tier: str, program: str, directory: Path) -> Iterator[Settings]:
    """Start a server in ``directory`` and yield the tier settings that reach it; the server ends with the block.

    Effects:
        Sets environment variables that the server's client needs, for this process and its children.
    """
    directory.mkdir(parents=True, exist_ok=True)
    messages = directory / "messages.log"
    with messages.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter with fixed arguments
            [sys.executable, "-m", f"kvtier.cli.demo.servers.{program}", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=make_child_environment(),
            # Ctrl-C reaches a whole process group; this process ends the server itself, after the engines.
            start_new_session=True,
        )
    with process:
        try:
            assert process.stdout is not None, "the program was started with pipes"
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                said = messages.read_text(errors="replace").strip().splitlines()
                raise TierError(
                    tier, f"its server did not start: {said[-1] if said else 'it printed nothing'}"
                )
            server = json.loads(line)
            os.environ.update(server["environment"])
            yield server["settings"]
        finally:
            _end(process)


def make_child_environment() -> dict[str, str]:
    """Return this process's environment with the package on the search path, for a child of this interpreter."""
    search_path = os.pathsep.join(filter(None, [str(SOURCE_FOLDER), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": search_path}


def _end(process: subprocess.Popen[str]) -> None:
    """Close the program's standard input, which ends it."""
    assert process.stdin is not None, "the program was started with pipes"
    process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
