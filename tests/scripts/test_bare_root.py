"""`scripts/bare_root.sh` refuses what it cannot do, before it makes anything, and says what to do."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bare_root.sh"
REFUSED = 3


def run(*commands: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the script, which is expected to end at once."""
    return subprocess.run(
        [SCRIPT, *commands], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def tools_without(name: str, folder: Path) -> str:
    """Return a PATH of a folder that has what the script looks for first, but for ``name``."""
    for tool in {"bash", "dirname", "env", "id"} - {name}:
        found = next(path for path in (Path("/usr/bin") / tool, Path("/bin") / tool) if path.exists())
        (folder / tool).symlink_to(found)
    return str(folder)


def test_no_command_is_refused_and_the_call_is_shown() -> None:
    ended = run()

    assert ended.returncode == REFUSED
    assert "scripts/bare_root.sh 'make demo' 'make test'" in ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: others are refused for that")
def test_a_machine_without_mmdebstrap_is_named_with_the_remedy(tmp_path: Path) -> None:
    ended = run("true", PATH=tools_without("mmdebstrap", tmp_path))

    assert ended.returncode == REFUSED
    assert ended.stderr == "bare_root: mmdebstrap is missing: apt-get install mmdebstrap\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_user_who_may_make_no_root_is_refused() -> None:
    nobody = 65534
    script = SCRIPT.read_text(encoding="utf-8")

    ended = subprocess.run(
        ["/bin/bash", "-s", "true"], input=script, user=nobody, capture_output=True, text=True, check=False
    )

    assert ended.returncode == REFUSED
    assert "may not make a root file system: run it as root" in ended.stderr
