"""Hybrid families with other states than a Qwen3-Next: ``python -m scripts.hybrid_families`` tries all of them."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm.answers import LOGPROB_TOLERANCE
from tests.e2e.vllm.family_trial import COMPUTED, FS, HOST, TOGETHER, find_reason, try_family

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)


@pytest.mark.parametrize("name", ["falcon-h1", "lfm2"])
def test_a_family_is_answered_from_host_memory_and_from_files_as_by_vllm_alone(
    name: str, tmp_path: Path
) -> None:
    trial = try_family(name, tmp_path)

    assert trial.reason == ""
    assert trial.problems == []
    assert list(trial.found) == [COMPUTED, HOST, FS, TOGETHER]
    assert trial.findable_tokens > 10_000
    assert all(trial.differences[origin] <= LOGPROB_TOLERANCE for origin in (COMPUTED, HOST, FS))


def test_a_reason_is_the_line_that_names_the_error() -> None:
    of_pydantic = (
        "Traceback:\npydantic.ValidationError: 1 error\n  Value error, no such model [type=x, y]\n  For"
    )

    assert find_reason(of_pydantic) == "no such model"
    assert find_reason("Traceback:\n  File x\nIndexError: index 7\n") == "IndexError: index 7"
    assert find_reason("it died: -9") == "it died: -9"
