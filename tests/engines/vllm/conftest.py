"""What the adapter's tests share. They need vLLM and start no engine."""

import contextlib
import importlib
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FOREIGN_WARNINGS = (
    "ignore::DeprecationWarning:vllm.*",
    "ignore::FutureWarning:vllm.*",
    "ignore::UserWarning:vllm.*",
)
"""vLLM and what it imports warn of their own future; that is theirs to mend, and no bug of kvtier's."""

FOREIGN_MODULES = ("vllm.engine.arg_utils", "vllm.v1.core.sched.scheduler", "vllm.v1.worker.gpu_model_runner")
"""What pulls in nearly all of vLLM. Modules of tests are imported before marks count, so these come first."""

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    for module in FOREIGN_MODULES:
        importlib.import_module(module)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let vLLM warn in the tests of this folder; a warning of kvtier's is an error here too."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for text in FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the configuration of a tiny Llama and no weights."""
    from tests.engines.vllm.configs import TINY_LLAMA

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


@pytest.fixture(scope="session")
def vllm_config(model_folder: Path) -> "VllmConfig":
    """Return a real engine's configuration without kvtier; tests copy it."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return EngineArgs(
            model=str(model_folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            max_model_len=256,
            block_size=16,
        ).create_engine_config()
