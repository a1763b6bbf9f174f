"""Every example runs as it stands; those for vLLM do so in its environment, see ``tests/e2e/vllm``."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VLLM_EXAMPLES = ROOT / "examples" / "vllm"
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.py")) if VLLM_EXAMPLES not in path.parents]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_runs_as_it_stands(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout
