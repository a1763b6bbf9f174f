"""Whole engines with vLLM's own connector and kvtier's tiers and policies behind it.

``python -m scripts.stock_matrix`` runs every case in every column; here are those that show most.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.kv_offload.tiering.spec", reason="this vLLM has no secondary tiers")

import vllm
from tests.e2e.vllm.engine_pool import Alone, EnginePool
from tests.e2e.vllm.stock_matrix import try_case

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 31), reason="the worker for CPUs is written for vLLM 0.31 and later"
)

IN_BRIEF = (
    "full attention",
    "recurrent states",
    "adapters",
    "salts",
    "aborts",
    "resets",
    "sleep",
    "killed",
)
"""Cases that fit into a minute and a half; the command runs the others too, and every policy."""


@pytest.mark.parametrize("name", IN_BRIEF)
def test_answers_are_those_of_an_engine_without_offloading_and_all_is_found(
    name: str, shared_folder: Path, alone: Alone, engines: EnginePool
) -> None:
    folder = shared_folder / "stock"
    folder.mkdir(exist_ok=True)

    outcome = try_case(name, "fs", folder, alone, engines)

    assert outcome.is_equal, outcome
    assert outcome.num_found >= outcome.num_findable, outcome
