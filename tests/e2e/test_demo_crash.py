"""kill -9 at 20 seeded instants: the next start answers rightly and gives back what the dead process left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY

TIMEOUT_S = 1500.0
"""A guard against a hang: forty engines start one after the other, which takes minutes on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]

CRASH_RUNS = Path(__file__).with_name("crash_runs.py")
SEED = 20260521
NUM_INSTANTS = 20


def test_a_process_killed_at_any_instant_costs_no_token_and_leaves_nothing(tmp_path: Path) -> None:
    search_path = os.pathsep.join(str(CRASH_RUNS.parents[2] / folder) for folder in ("src", "."))
    ended = subprocess.run(
        [sys.executable, str(CRASH_RUNS), str(tmp_path), str(SEED)],
        env=os.environ | {"PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    runs = [json.loads(line) for line in ended.stdout.splitlines()]

    assert len(runs) == NUM_INSTANTS, ended.stderr
    assert [run["instant"] for run in runs if not run["is_timed"] and not run["was_killed"]] == []
    assert [run for run in runs if not run["next"]["is_right"]] == []
    assert [run for run in runs if run["left_after"]] == []
    # The test has teeth only if the dead left something: blocks to inherit, names, and files half written.
    left = [name for run in runs for name in run["left_before"]]
    # How many blocks depends on how far the disk had come: a busy machine has dropped most before their turn.
    assert any(run["next"]["inherited_tokens"] for run in runs)
    assert any(name.startswith(str(SHARED_MEMORY_DIRECTORY)) for name in left)
    assert any(name.endswith(".notes") for name in left)
