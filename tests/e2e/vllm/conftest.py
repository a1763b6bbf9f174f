"""What the tests with a real engine share: checkpoints, and answers of vLLM without kvtier."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from tests.e2e.vllm.answers import Answer
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_pool import Alone, EnginePool, make_once
from tests.e2e.vllm.prompts import GREEDY, make_cycle

if TYPE_CHECKING:
    from tests.e2e.vllm.bench import Bench

NUM_PROMPTS = 10
"""Prompts of the longest cycle: more than the largest pool of these tests holds."""

CONTROL_POOL_BLOCKS = 600
"""Device blocks of an engine without kvtier: its answers do not depend on them."""


LONGEST_FIRST = (
    "test_hard_times",
    "test_models",
    "test_stock_door",
    "test_recurrent_drafts",
    "test_shared_parts",
    "test_sleep",
    "test_server",
    "test_fs_tier",
    "test_examples",
    "test_audit_states",
    "test_tensor_parallel",
    "test_slow_disk",
    "test_dashboard",
    "test_families",
    "test_identity",
)
"""Files in the order in which processes take them, those that take longest first: so the processes end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of this folder first, in that order; a file stays together, for its tests share engines."""
    folder = Path(__file__).parent

    def position(item: pytest.Item) -> int:
        if item.path.parent != folder:
            return len(LONGEST_FIRST) + 1
        name = item.path.stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=position)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder() -> Iterator[None]:
    """Give every engine one temporary folder: vLLM leaves its sockets behind. Its path is short, as sockets want it."""
    with TemporaryDirectory(prefix="kvtier-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this run that every process which runs tests has in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def engines(temporary_folder: None) -> Iterator[EnginePool]:
    """Return the engines that tests borrow."""
    pool = EnginePool()
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def alone(shared_folder: Path, engines: EnginePool) -> Alone:
    """Return what vLLM answers without kvtier."""
    folder = shared_folder / "alone"
    folder.mkdir(exist_ok=True)
    return Alone(folder, engines)


@pytest.fixture(scope="session")
def llama(shared_folder: Path) -> str:
    """Return the folder of a Llama with full attention."""
    from tests.e2e.vllm.checkpoints import save_llama

    return str(make_once(shared_folder / "llama", save_llama))


@pytest.fixture(scope="session")
def other_llama(shared_folder: Path) -> str:
    """Return the folder of a Llama with the same configuration and other weights."""
    from tests.e2e.vllm.checkpoints import save_llama

    return str(make_once(shared_folder / "other-llama", partial(save_llama, seed=8)))


@pytest.fixture(scope="session")
def gemma(shared_folder: Path) -> str:
    """Return the folder of a Gemma-3 with five sliding-window layers and one with full attention."""
    from tests.e2e.vllm.checkpoints import save_gemma

    return str(make_once(shared_folder / "gemma", save_gemma))


@pytest.fixture(scope="session")
def qwen3_next(shared_folder: Path) -> str:
    """Return the folder of a Qwen3-Next with three layers of a recurrent state and one of full attention."""
    from tests.e2e.vllm.checkpoints import save_qwen3_next

    return str(make_once(shared_folder / "qwen3-next", save_qwen3_next))


@pytest.fixture(scope="session")
def llama_controls(llama: str, alone: Alone) -> list[Answer]:
    """Return the answers of the Llama without kvtier to the first prompts of the cycle, one at a time."""
    options = EngineOptions(llama, num_device_blocks=CONTROL_POOL_BLOCKS)
    return alone.answers(options, "generate_in_turn", make_cycle(NUM_PROMPTS), GREEDY)


@pytest.fixture
def bench(request: pytest.FixtureRequest, engines: EnginePool, alone: Alone) -> "Bench":
    """Return what a test has of the kind that it is parametrized with; a Llama unless it says so."""
    from tests.e2e.vllm.bench import KINDS, Bench

    kind = KINDS[getattr(request, "param", "Llama")]
    return Bench(kind, request.getfixturevalue(kind.checkpoint), engines, alone)
