"""Unpacks one release of SGLang into the environment of the interpreter that runs this script.

SGLang requires CUDA kernels and more than a hundred packages; its contract for storage backends imports torch and the
standard library. So the wheel is unpacked without its requirements, and without `sglang/__init__.py`, which imports
them: what is left is a package without that file, whose modules for storage can be imported and whose others cannot.
"""

import argparse
import importlib
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

PACKAGE = "sglang/"
LEFT_OUT = "sglang/__init__.py"
CONTRACT = "sglang.srt.mem_cache.hicache_storage"


def main() -> None:
    """Download the wheel, unpack what belongs to the package, and check that the contract can be imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="release of sglang, for example 0.5.23")
    parser.add_argument("--lock", help="requirements file that names the release and the hashes of its files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        download(given.version, given.lock, Path(directory))
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(sysconfig.get_path("purelib"), choose(archive.namelist()))
    importlib.invalidate_caches()
    importlib.import_module(CONTRACT)


def choose(names: Iterable[str]) -> list[str]:
    """Return the members of the wheel to unpack: the package's Python, without what imports everything. Pure."""
    return [name for name in names if name.startswith(PACKAGE) and name.endswith(".py") and name != LEFT_OUT]


def download(version: str, lock: str | None, folder: Path) -> None:
    """Download the wheel with pip of this interpreter; a failure ends the program with pip's exit status.

    Args:
        version: of the release.
        lock: requirements file without which no hash is checked.
        folder: where to.
    """
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    # The wheel is of one Python and platform because of compiled parts, which stay unused: that of another will do.
    command += ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
    command += ["--dest", str(folder)]
    command += [f"sglang=={version}"] if lock is None else ["--require-hashes", "-r", lock]
    status = subprocess.run(command, check=False).returncode  # noqa: S603  # our own interpreter and fixed arguments
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
