"""Builds the source distribution, and from it a wheel that other Linux machines of this architecture can install.

The built wheel works on this machine; auditwheel renames it after the oldest glibc that has the symbols of its compiled
modules. One wheel works for every Python from 3.11 on, because the modules use the stable interface. Compiling is
optional when kvtier is installed from source, and so is the project's address, but not here: a wheel without its
compiled modules or without URLs is refused. The tools come from the environment that runs this script (``make wheel``
makes one).
    python -m scripts.build_wheel dist
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Run = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None, run: Run | None = None) -> None:
    """Build both into a folder and print their names.

    Args:
        arguments: command-line arguments; None: of this process.
        run: runs a command and returns its exit status; None: with subprocess.

    Raises:
        SystemExit: a command failed, with its exit status; or the wheel lacks a compiled module, or the project's URLs.
    """
    parser = argparse.ArgumentParser(
        description="Build the source distribution and a wheel for other machines."
    )
    parser.add_argument("out", type=Path, help="folder for both; its other files are kept")
    out: Path = parser.parse_args(arguments).out
    run = run or run_command
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder)
        _require(run([sys.executable, "-m", "build", "--outdir", str(built), str(ROOT)]))
        wheel = next(built.glob("*.whl"))
        missing = missing_modules(wheel)
        if missing:
            sys.exit(f"{wheel.name} lacks {', '.join(missing)}: a C compiler and Python's headers are needed")
        if not project_urls(wheel):
            remedy = "build from a clone of the public repository, or set KVTIER_PROJECT_URL=https://..."
            sys.exit(f"{wheel.name} does not say where the project lives: {remedy}")
        _require(
            run([sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(out), str(wheel)])
        )
        for source in built.glob("*.tar.gz"):
            (out / source.name).write_bytes(source.read_bytes())
    for path in sorted(out.iterdir()):
        print(path)


def missing_modules(wheel: Path) -> list[str]:
    """Return the compiled modules that a wheel lacks; each module has a stub beside it."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = [name.removesuffix(".pyi") + ".abi3.so" for name in names if name.endswith(".pyi")]
    return sorted(name for name in wanted if name not in names)


def project_urls(wheel: Path) -> list[str]:
    """Return the labels and addresses in a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        urls: list[str] = message_from_bytes(archive.read(name)).get_all("Project-URL", [])
    return urls


def run_command(command: Sequence[str]) -> int:
    """Run a command and return its exit status."""
    return subprocess.run(command, check=False).returncode  # noqa: S603  # our own interpreter


def _require(status: int) -> None:
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
