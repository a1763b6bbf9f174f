"""The kit is one import for authors of tiers, and costs those that do not use it nothing."""

import subprocess
import sys

import pytest

from kvtier.tiering import kit

NO_XXHASH = "import sys; sys.modules['xxhash'] = None; "


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", kit.__all__)
def test_each_name_is_there(name: str) -> None:
    assert getattr(kit, name) is not None


def test_without_the_library_for_checksums_the_import_names_the_extra() -> None:
    done = run(NO_XXHASH + "from kvtier.tiering.kit import ThreadedTier")
    assert "MissingExtraError" in done.stderr
    assert "pip install '.[fs]'" in done.stderr


def test_without_the_library_for_checksums_the_example_tier_and_every_setting_are_there() -> None:
    done = run(NO_XXHASH + "import kvtier.tiering.example, kvtier.tiering.factory")
    assert done.returncode == 0, done.stderr
