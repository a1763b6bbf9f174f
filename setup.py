"""What is compiled of the package, and where the project lives, which only the place of the build knows.

Compiling is optional: without a compiler the same is done in Python. ``project_urls`` has the order in which the
project's address is looked for.
"""

import os
import re
import subprocess
import sys
import sysconfig
from email import message_from_string
from pathlib import Path
from urllib.parse import urlsplit

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent

ADDRESS_VARIABLE = "KVTIER_PROJECT_URL"

HAS_STABLE_INTERFACE = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""A free-threaded Python has none yet; there the modules are not made, for their sources ask for it."""

HOST = r"[\w-]+(?:\.[\w-]+)*\.[a-z][\w-]*"
"""One with a dot, and no number at its end: others are names of one machine or network."""

REMOTES = (
    re.compile(rf"https://(?:[^@/]*@)?({HOST}(?::\d+)?)/([^/?#\s][^?#\s]*)"),
    re.compile(rf"ssh://(?:[^@/]*@)?({HOST})(?::\d+)?/([^/?#\s][^?#\s]*)"),
    re.compile(rf"(?:[^@/:]+@)?({HOST}):([^/?#\s][^?#\s]*)"),  # git@host:owner/name
)

PAGES = {"github": "", "gitlab": "/-"}
"""What stands between a repository and its pages, by the first part of its host's name."""


def extension(module: str) -> Extension:
    """Return the module as it is compiled, once for all versions of Python from 3.11 on."""
    return Extension(
        module,
        [f"src/{module.replace('.', '/')}.c"],
        depends=["setup.py"],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
        optional=True,
        py_limited_api=True,
    )


def project_urls(root: Path) -> dict[str, str]:
    """Return the addresses for the package's metadata, by label; empty where none is known.

    They follow from the variable KVTIER_PROJECT_URL, else from git's remote ``origin``, else, in an unpacked source
    distribution, from its own metadata.

    Args:
        root: what is built.

    Raises:
        SystemExit: the variable is set and no public address.
    """
    given = os.environ.get(ADDRESS_VARIABLE)
    address = public_address(given or git_origin(root))
    if given and address is None:
        shown = given.rpartition("@")[2][:80]  # in front of it may be a password
        sys.exit(
            f"{ADDRESS_VARIABLE} is {shown!r}: give a public host's address, such as https://example.org/kvtier"
        )
    if address is not None:
        return pages_of(address)
    own = root / "PKG-INFO"
    lines = message_from_string(own.read_text("utf-8")).get_all("Project-URL", []) if own.is_file() else []
    return {label: address for label, _, address in (line.partition(", ") for line in lines)}


def git_origin(root: Path) -> str:
    """Return what git calls origin; "" where ``root`` is no clone, or has none."""
    if not (root / ".git").exists():  # git would find a clone around an unpacked source distribution
        return ""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    except OSError:
        return ""


def public_address(remote: str) -> str | None:
    """Return the https address of a git remote without user and password; None for a path or a local host. Pure."""
    found = next(filter(None, (form.fullmatch(remote) for form in REMOTES)), None)
    return f"https://{found[1]}/{found[2].rstrip('/').removesuffix('.git')}" if found else None


def pages_of(address: str) -> dict[str, str]:
    """Return a repository's pages by label: where its host is not known, the repository alone. Pure."""
    urls = {"Homepage": address, "Source": address}
    between = PAGES.get((urlsplit(address).hostname or "").partition(".")[0])
    if between is not None:
        urls["Documentation"] = f"{address}{between}/blob/HEAD/docs/index.md"
        urls["Issues"] = f"{address}{between}/issues"
        urls["Changelog"] = f"{address}{between}/blob/HEAD/CHANGELOG.md"
    return urls


if __name__ == "__main__":
    compiled = ("kvtier.cpu._page_copy",) if HAS_STABLE_INTERFACE else ()
    setup(
        ext_modules=list(map(extension, compiled)),
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if HAS_STABLE_INTERFACE else {},
        project_urls=project_urls(ROOT),
    )
