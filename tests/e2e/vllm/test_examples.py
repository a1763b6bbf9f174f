"""The examples for vLLM run as they stand, one of them in one process, and show what they are there to show.

A start's lines in docs/guide/vllm.md are compared with what the server logs, because the example starts a whole one.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from scripts.start_log import PAGE, with_start_log

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

EXAMPLES = Path(__file__).parents[3] / "examples" / "vllm"
TIMEOUT_S = 280
"""Guard against a hang; each takes less than a minute."""

ENVIRONMENT = {
    "PYTHON": sys.executable,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",  # as in engine_imports.py
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Each process of an engine imports vLLM by itself, which takes longer than the answers."""


def run(folder: Path, *command: str, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run an example in a folder and return what it printed; no process of it is left behind."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as example:
        try:
            printed, complaints = example.communicate(timeout=TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(example.pid, signal.SIGKILL)
    assert example.returncode == 0, printed + complaints
    return printed


def test_the_offline_example_loads_its_prompts_from_kvtier_in_the_second_round(tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "offline.py"), environment=ONE_PROCESS)

    rounds = re.findall(r"^round (\d), .* prompt tokens: ([^.\n]*), answer", printed, flags=re.MULTILINE)
    assert [number for number, _ in rounds] == ["1"] * 3 + ["2"] * 3
    assert {sources for _, sources in rounds[:3]} == {"3000 computed"}
    # Releases before 0.32 do not say where in kvtier.
    assert {re.sub("kvtier|disk", "host", sources) for _, sources in rounds[3:]} == {"2944 host, 56 computed"}


def test_the_server_example_loads_the_prompt_that_comes_again(tmp_path: Path) -> None:
    printed = run(tmp_path, "bash", str(EXAMPLES / "server.sh"))

    asked = re.findall(r'^prompt (\d): "cached_tokens":(\d+) [0-9.]+ s$', printed, flags=re.MULTILINE)
    assert asked == [("1", "0"), ("2", "0"), ("3", "0"), ("1", "2944")]
    assert re.search(r"^vllm:kv_offload_load_bytes_total[^ ]* [1-9]", printed, re.MULTILINE)
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_start_log(page, printed), "run python -m scripts.start_log"
