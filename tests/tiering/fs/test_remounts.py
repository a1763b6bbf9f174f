"""A disk tier whose file system goes writes nothing below the mount point, and goes on when it is back."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiering.remounts import SCENARIOS

pytestmark = pytest.mark.slow

HANG_GUARD_S = 240.0
PROJECT = Path(__file__).parents[3]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_file_system_that_goes_and_comes_back(tmp_path: Path, scenario: str) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip(
            "mounting needs the superuser, unshare and mkfs.ext4: apt-get install util-linux e2fsprogs"
        )
    command = [
        "unshare", "--mount", "--propagation", "private",
        sys.executable, "-m", "tests.tiering.remounts", scenario, str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False, cwd=PROJECT
    )
    assert done.returncode == 0, done.stderr
