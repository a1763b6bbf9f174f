"""Whole engines with vLLM's own connector and kvtier's tiers and policies behind it.

``python -m scripts.stock_matrix`` runs every case in every column; here are those that show most.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.kv_offload.tiering.spec", reason="this vLLM has no secondary tiers")

import vllm
from tests.e2e.vllm.engine_pool import Alone
from tests.e2e.vllm.stock_matrix import CASES, Outcome, missing_library, try_case

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 31), reason="the worker for CPUs is written for vLLM 0.31 and later"
)


def run(name: str, column: str, shared_folder: Path, alone: Alone) -> Outcome:
    """Run a case; skip it where its library is missing."""
    if missing := missing_library(column):
        pytest.skip(f"needs {missing}")
    folder = shared_folder / "stock"
    folder.mkdir(exist_ok=True)
    return try_case(name, column, folder, alone)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_an_engine_without_offloading_and_all_is_found(
    name: str, shared_folder: Path, alone: Alone
) -> None:
    outcome = run(name, "fs", shared_folder, alone)
    assert outcome.is_equal, outcome
    assert outcome.num_found >= outcome.num_findable, outcome
