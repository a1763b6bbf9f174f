"""What the tests with a real engine share: checkpoints, and answers of vLLM without kvtier."""

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
from tests.e2e.vllm.answers import Answer, assert_same
from tests.e2e.vllm.engine_host import WHOLE_PROMPTS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, SEEDED, make_cycle
from tests.e2e.vllm.recurrent import GREEDY as SHORT_GREEDY
from tests.e2e.vllm.recurrent import PROMPTS, options_with

NUM_PROMPTS = 12
"""Prompts of the longest cycle: more than the largest pool of these tests holds."""

CONTROL_POOL_BLOCKS = 600
"""Device blocks of an engine without kvtier: its answers do not depend on them."""


@pytest.fixture(scope="session", autouse=True)
def temporary_folder() -> Iterator[None]:
    """Give every engine one temporary folder: vLLM leaves its sockets behind. Its path is short, as sockets want it."""
    with TemporaryDirectory(prefix="kvtier-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a Llama with full attention."""
    from tests.e2e.vllm.checkpoints import save_llama

    return str(save_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a Gemma-3 with five sliding-window layers and one with full attention."""
    from tests.e2e.vllm.checkpoints import save_gemma

    return str(save_gemma(tmp_path_factory.mktemp("gemma")))


@pytest.fixture(scope="session")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a Qwen3-Next with three layers of a recurrent state and one of full attention."""
    from tests.e2e.vllm.checkpoints import save_qwen3_next

    return str(save_qwen3_next(tmp_path_factory.mktemp("qwen3-next")))


@pytest.fixture(scope="session")
def drafting_qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a Qwen3-Next that has a layer to draft with."""
    from tests.e2e.vllm.checkpoints import save_drafting_qwen3_next

    return str(save_drafting_qwen3_next(tmp_path_factory.mktemp("drafting-qwen3-next")))


class Controls:
    """Answers of vLLM without kvtier to the prompts of ``make_cycle(NUM_PROMPTS)``.

    Attributes:
        in_turn: one request at a time, greedy.
        together: eight at a time, greedy.
        seeded: drawn with a seed, in an engine that computes each prompt in one step.
    """

    def __init__(self, model: str) -> None:
        prompts = make_cycle(NUM_PROMPTS)
        with EngineProcess(EngineOptions(model, num_device_blocks=CONTROL_POOL_BLOCKS)) as engine:
            self.in_turn: list[Answer] = engine.call("generate_in_turn", prompts, GREEDY)
            engine.call("reset")
            self.together: list[Answer] = engine.call("generate", prompts, GREEDY)
        options = EngineOptions(model, None, CONTROL_POOL_BLOCKS, engine_arguments=WHOLE_PROMPTS)
        with EngineProcess(options) as engine:
            self.seeded: list[Answer] = engine.call("generate", prompts[:4], SEEDED)


@pytest.fixture(scope="session")
def llama_controls(llama: str) -> Controls:
    """Return the answers of the Llama without kvtier."""
    return Controls(llama)


@pytest.fixture(scope="session")
def gemma_controls(gemma: str) -> Controls:
    """Return the answers of the Gemma-3 without kvtier."""
    return Controls(gemma)


@pytest.fixture(scope="session")
def recurrent_controls(qwen3_next: str) -> list[Answer]:
    """Return the answers of the Qwen3-Next without kvtier, one request at a time, nothing cached."""
    with EngineProcess(options_with(qwen3_next, None)) as engine:
        answers: list[Answer] = engine.call("generate_in_turn", PROMPTS, SHORT_GREEDY)
        engine.call("forget_device")
        assert_same(engine.call("generate", PROMPTS, SHORT_GREEDY), answers)
        return answers
