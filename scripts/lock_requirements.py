"""Writes `requirements/`: every package of the project's environments with its version and the hashes of its files.

`make demo`, `make venv`, `make test-vllm` and `make test-sglang` install from there with `pip --require-hashes`, so
that what a package's index serves later is refused unless it is the file that was tested. A version that is locked
stays until `--upgrade PACKAGE` or `--upgrade-all`. torch and what comes with its builds for CUDA are left out: which
build fits depends on the machine, so `constraints.txt` pins torch's version alone. Needs uv, which is not part of any
environment: `pip install uv`.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("requirements")

DEV = "dev.txt"
DEMO = "demo.txt"
"""Those of DEV that `make demo` needs, with the same versions."""

VLLM = "vllm-{version}.txt"
SGLANG = "sglang-{version}.txt"
SGLANG_ITSELF = "sglang-{version}-itself.txt"
"""What `scripts/install_sglang.py` unpacks: installed like the others it would need more than a hundred packages."""

HEADER = "# Made by `python -m scripts.lock_requirements`. torch is not in here: see constraints.txt.\n"

TORCH_PACKAGES = re.compile(r"torch|torchaudio|torchvision|torchcodec|triton|nvidia-.*|cuda-.*")
"""torch, the packages that are compiled for one torch, and those that a build for CUDA brings."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the locks anew: ours by resolving, those of engines from the environments where they are installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--upgrade", action="append", default=[], metavar="PACKAGE", help="take its newest version"
    )
    parser.add_argument("--upgrade-all", action="store_true", help="take the newest version of everything")
    parser.add_argument(
        "--vllm", metavar="VERSION", help="lock what .venv-vllm-VERSION has, and nothing else"
    )
    parser.add_argument(
        "--sglang", metavar="VERSION", help="lock what .venv-sglang-VERSION has, and nothing else"
    )
    given = parser.parse_args(arguments)
    # A CPU build of vLLM asks for a torch that no index has, so nothing can be resolved: what was tested is locked.
    if given.vllm is not None:
        write(VLLM.format(version=given.vllm), lock_installed(ROOT / f".venv-vllm-{given.vllm}"))
    if given.sglang is not None:
        write(SGLANG.format(version=given.sglang), lock_installed(ROOT / f".venv-sglang-{given.sglang}"))
        itself = run_uv(["--no-deps"], [f"sglang=={given.sglang}"])
        write(SGLANG_ITSELF.format(version=given.sglang), itself)
    if given.vllm is None and given.sglang is None:
        kept = ["--output-file", str(FOLDER / DEV)] if (ROOT / FOLDER / DEV).exists() else []
        upgrades = ["--upgrade"] if given.upgrade_all else []
        upgrades += [text for package in given.upgrade for text in ("--upgrade-package", package)]
        torch = ["--constraints", "constraints.txt"]
        write(DEV, run_uv([*torch, *kept, *upgrades], ["-e .[dev]"]))
        write(DEMO, run_uv([*torch, "--constraints", str(FOLDER / DEV)], ["-e .[demo]"]))


def write(name: str, resolved: str) -> None:
    """Write a lock of what uv has resolved, without the packages that no lock has."""
    locked = list(leave_out(blocks(resolved)))
    (ROOT / FOLDER / name).write_text(HEADER + "".join(locked))
    print(f"{FOLDER / name}: {len(locked)} packages")


def lock_installed(environment: Path) -> str:
    """Return the hashes of the packages that an environment has, as uv writes them."""
    return run_uv(["--no-deps"], list_installed(environment))


def run_uv(arguments: Sequence[str], requirements: Iterable[str]) -> str:
    """Return what uv makes of some lines of a requirements file: versions with hashes, in pip's format."""
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("uv is not installed: pip install uv")
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
    ]
    command += ["--no-annotate", "--no-header", *arguments, "-"]
    done = subprocess.run(  # noqa: S603  # the program that was found, with our own arguments
        command, input="\n".join(requirements), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit("uv has failed, see above; requirements/ may have a changed file: git diff")
    output = [Path(arguments[at + 1]) for at, text in enumerate(arguments) if text == "--output-file"]
    return (ROOT / output[0]).read_text() if output else done.stdout


def list_installed(environment: Path) -> Iterator[str]:
    """Yield the packages of an environment with their versions, but for those that no lock has.

    Args:
        environment: folder of a virtual environment.
    """
    command = [str(environment / "bin" / "python"), "-m", "pip", "list", "--format=freeze"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603  # our environment
    for line in done.stdout.splitlines():
        name = package_name(line)
        if name not in (None, "kvtier", "pip") and not TORCH_PACKAGES.fullmatch(name):
            yield line


def blocks(lock: str) -> Iterator[str]:
    """Yield each package's lines: its name and version, then its hashes. Pure."""
    found = ""
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "#")) and found:
            yield found
            found = ""
        if not line.startswith("#"):
            found += line
    if found:
        yield found


def leave_out(packages: Iterable[str]) -> Iterator[str]:
    """Yield the packages that are locked: neither torch's nor the project itself. Pure."""
    for block in packages:
        name = package_name(block)
        if name is not None and not TORCH_PACKAGES.fullmatch(name):
            yield block


def package_name(block: str) -> str | None:
    """Return whose lines these are; None for a folder, such as the project itself. Pure."""
    found = _NAME.match(block)
    return None if found is None or block.startswith("-e") else found.group().lower()


if __name__ == "__main__":
    main()
