"""The package's metadata says where the project lives, as far as the place of the build knows it."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "setuptools", reason="environments whose packages are not locked build kvtier without one"
)

ROOT = Path(__file__).parents[1]
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))  # Any: what a module defines
TIMEOUT_S = 120

PREPARE = """
import sys
from setuptools import build_meta
print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))
"""

Git = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a build reads of the project, with one package and no clone around it."""
    monkeypatch.delenv("KVTIER_PROJECT_URL", raising=False)
    folder = tmp_path / "tree"
    (folder / "src" / "kvtier").mkdir(parents=True)
    (folder / "src" / "kvtier" / "__init__.py").touch()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def git() -> Git:
    """Runs git in a folder."""
    program = shutil.which("git")
    if program is None:
        pytest.skip("git is not installed")

    def run(folder: Path, *arguments: str) -> None:
        subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_S)

    return run


def built_urls(tree: Path, **variables: str) -> dict[str, str]:
    """Return the URLs in a wheel's metadata as setuptools writes it; a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREPARE, str(tree.parent)],
        cwd=tree,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    metadata = (tree.parent / done.stdout.splitlines()[-1] / "METADATA").read_text(encoding="utf-8")
    lines = message_from_string(metadata).get_all("Project-URL", [])
    return {label: address for label, _, address in (line.partition(", ") for line in lines)}


def test_a_tree_that_does_not_know_its_address_is_built_without_urls(tree: Path) -> None:
    assert built_urls(tree) == {}


def test_the_variable_names_the_address_whatever_git_says(tree: Path, git: Git) -> None:
    git(tree, "init", "-q")
    git(tree, "remote", "add", "origin", "https://github.com/another/fork.git")

    urls = built_urls(tree, KVTIER_PROJECT_URL="https://forge.example.org/kvtier/")

    assert urls == {
        "Homepage": "https://forge.example.org/kvtier",
        "Source": "https://forge.example.org/kvtier",
    }


def test_a_clone_names_its_origin_with_the_pages_that_the_host_has(tree: Path, git: Git) -> None:
    git(tree, "init", "-q")
    git(tree, "remote", "add", "origin", "git@github.com:someone/kvtier.git")

    assert built_urls(tree) == {
        "Homepage": "https://github.com/someone/kvtier",
        "Source": "https://github.com/someone/kvtier",
        "Documentation": "https://github.com/someone/kvtier/blob/HEAD/docs/index.md",
        "Issues": "https://github.com/someone/kvtier/issues",
        "Changelog": "https://github.com/someone/kvtier/blob/HEAD/CHANGELOG.md",
    }


def test_a_source_distribution_passes_on_what_it_was_built_with(tree: Path, git: Git) -> None:
    (tree / "PKG-INFO").write_text(
        "Name: kvtier\nProject-URL: Issues, https://forge.example.org/bugs\n\nProject-URL: Text, of the page\n"
    )
    # It may be unpacked inside a clone of something else.
    git(tree.parent, "init", "-q")
    git(tree.parent, "remote", "add", "origin", "https://github.com/distribution/packages")

    assert built_urls(tree) == {"Issues": "https://forge.example.org/bugs"}


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/someone/kvtier", "https://github.com/someone/kvtier"),
        ("https://user:secret@github.com/someone/kvtier.git", "https://github.com/someone/kvtier"),
        ("https://forge.example.org:8443/kvtier/", "https://forge.example.org:8443/kvtier"),
        ("ssh://git@forge.example.org:2222/team/kvtier.git", "https://forge.example.org/team/kvtier"),
        ("forge.example.org:team/kvtier", "https://forge.example.org/team/kvtier"),
        ("", None),
        ("/srv/git/kvtier.git", None),
        ("../kvtier.git", None),
        ("file:///srv/git/kvtier.git", None),
        ("http://forge.example.org/kvtier", None),
        ("git://forge.example.org/kvtier", None),
        ("https://localhost/kvtier", None),
        ("https://10.0.0.7/kvtier", None),
        ("work:team/kvtier", None),  # a name in one user's ssh configuration
        ("https://forge.example.org/", None),
        ("https://forge.example.org/kvtier?token=secret", None),
        ("https://user:sec@ret@forge.example.org/kvtier", None),
    ],
)
def test_only_a_public_host_is_named_and_no_user_or_password(remote: str, address: str | None) -> None:
    assert SETUP["public_address"](remote) == address


def test_gitlab_has_its_pages_behind_a_dash() -> None:
    issues = SETUP["pages_of"]("https://gitlab.example.org/team/kvtier")["Issues"]
    assert issues == "https://gitlab.example.org/team/kvtier/-/issues"


def test_a_variable_that_is_no_public_address_ends_the_build_without_its_password(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_PROJECT_URL", "https://user:secret@localhost/kvtier")
    with pytest.raises(
        SystemExit, match=r"KVTIER_PROJECT_URL is 'localhost/kvtier': give a public host's address"
    ):
        SETUP["project_urls"](tree)
