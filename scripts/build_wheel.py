"""Builds the source distribution, and from it a wheel that other Linux machines of this architecture can install.

A wheel as the build leaves it runs here; auditwheel names it after the oldest glibc that has what its compiled modules
call. One wheel serves every Python from 3.11 on, for they use the stable interface alone. Compiling is optional
where kvtier is installed from source, and not here: a wheel without its compiled modules is refused. The tools are
those of the environment that runs this (``make wheel`` makes one).

    python -m scripts.build_wheel dist
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Run = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None, run: Run | None = None) -> None:
    """Build both into a folder and print their names.

    Args:
        arguments: those of the command line, None for this process's own.
        run: runs a command and returns its exit status, None for a real one.

    Raises:
        SystemExit: a command failed, with its exit status; or the wheel lacks a compiled module.
    """
    parser = argparse.ArgumentParser(
        description="Build the source distribution and a wheel for other machines."
    )
    parser.add_argument("out", type=Path, help="folder that gets both; what it holds else stays")
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
        _require(
            run([sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(out), str(wheel)])
        )
        for source in built.glob("*.tar.gz"):
            (out / source.name).write_bytes(source.read_bytes())
    for path in sorted(out.iterdir()):
        print(path)


def missing_modules(wheel: Path) -> list[str]:
    """Return the compiled modules that a wheel lacks: each has a stub beside it that says what is in it."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = [name.removesuffix(".pyi") + ".abi3.so" for name in names if name.endswith(".pyi")]
    return sorted(name for name in wanted if name not in names)


def run_command(command: Sequence[str]) -> int:
    """Run a command and return its exit status."""
    return subprocess.run(command, check=False).returncode  # noqa: S603  # our own interpreter


def _require(status: int) -> None:
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
