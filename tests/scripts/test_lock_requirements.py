"""The locks name what pyproject.toml asks for, with hashes, and nothing that belongs to one build of torch."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts.lock_requirements import blocks, leave_out, package_name

ROOT = Path(__file__).resolve().parent.parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))

RESOLVED = """\
# made by a program
-e .
    # nothing has a hash here
nvidia-cublas==13.4 ; sys_platform == 'linux' \\
    --hash=sha256:11
numpy==2.4.6 ; python_version < '3.12' \\
    --hash=sha256:22 \\
    --hash=sha256:33
Torch==2.13.0 \\
    --hash=sha256:44
"""


def locked_versions(lock: Path) -> dict[str, list[Version]]:
    """Return the versions of each package in a lock; several where they differ by Python."""
    found: dict[str, list[Version]] = {}
    for block in blocks(lock.read_text()):
        name, _, rest = block.partition("==")
        found.setdefault(name.lower(), []).append(Version(re.split(r"[ ;\\]", rest)[0]))
    return found


def wanted(extra: str) -> list[Requirement]:
    """Return what the project and one of its extras ask for, with the project's own extras in place of their names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left, found = [Requirement(text) for text in project["dependencies"]], []
    left += [Requirement(text) for text in project["optional-dependencies"][extra]]
    while left:
        requirement = left.pop()
        if requirement.name == "kvtier":
            for name in requirement.extras:
                left += [Requirement(text) for text in project["optional-dependencies"][name]]
        elif requirement.name != "torch":
            found.append(requirement)
    return found


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("demo.txt", ["demo"]),
        ("dev.txt", ["dev"]),
        ("vllm-0.32.0.txt", ["fs", "testing"]),
        ("sglang-0.5.23.txt", ["fs", "valkey", "obj", "servers", "testing"]),
    ],
)
def test_a_lock_has_what_the_project_asks_for(lock: str, extras: list[str]) -> None:
    versions = locked_versions(ROOT / "requirements" / lock)
    for requirement in [one for extra in extras for one in wanted(extra)]:
        found = versions.get(requirement.name.lower().replace("_", "-"), [])
        assert any(version in requirement.specifier for version in found), f"{requirement}: {found}"


def test_the_demo_s_packages_are_a_part_of_those_of_the_tests() -> None:
    demo, tests = (locked_versions(ROOT / "requirements" / name) for name in ("demo.txt", "dev.txt"))
    assert demo.items() < tests.items()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_each_locked_package_has_hashes_and_none_an_address(lock: Path) -> None:
    text = lock.read_text()
    for block in blocks(text):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block
    assert "://" not in text


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_no_lock_has_torch_or_what_one_build_of_it_brings(lock: Path) -> None:
    text = lock.read_text()
    assert list(leave_out(blocks(text))) == list(blocks(text))
    assert package_name("nvidia-cublas==1") not in {package_name(block) for block in blocks(text)}


def test_comments_the_project_itself_and_torch_are_left_out() -> None:
    assert [package_name(block) for block in blocks(RESOLVED)] == [None, "nvidia-cublas", "numpy", "torch"]
    (numpy,) = leave_out(blocks(RESOLVED))
    assert numpy == RESOLVED[RESOLVED.index("numpy") : RESOLVED.index("Torch")]
