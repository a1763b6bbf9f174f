"""With "auto" the scheduler's process and two workers' processes find the same size of a real engine's region."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle
from tests.e2e.vllm.settings import settings_with
from tests.e2e.vllm.small_machine import ENVIRONMENT_NAME, write_machine
from tests.e2e.vllm.test_tensor_parallel import ONE_CORE_EACH, PROMPTS, TWO_WORKERS

from kvtier.cpu.auto_size import MIN_RESERVE_BYTES, PROCESS_BYTES
from kvtier.engines.checkpoint.files import find_files
from kvtier.limits import count_usable_cores

LEFT_BYTES = 96 * 2**20
NUM_DEVICE_BLOCKS = 72
BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS
"""Four layers, keys and values, two heads of 64 float32 numbers, both workers together."""

pytestmark = pytest.mark.skipif(count_usable_cores() < 2, reason="two workers need two cores")


def test_three_processes_agree_on_what_the_machine_leaves(llama: str, tmp_path: Path) -> None:
    weight_bytes = sum(file.stamp.size_bytes for file in find_files(Path(llama)))
    # The server, the engine core and two workers; weights and vLLM's own cache are in host memory on a CPU.
    engine_bytes = 4 * PROCESS_BYTES + weight_bytes + NUM_DEVICE_BLOCKS * BLOCK_BYTES
    memory_bytes = (engine_bytes + MIN_RESERVE_BYTES + LEFT_BYTES) // 1024 * 1024
    write_machine(tmp_path / "machine", memory_bytes)
    settings = {
        **settings_with(tmp_path / "blocks"),
        "cpu_bytes_to_use": "auto",
        "spec_name": "SmallMachineSpec",
        "spec_module_path": "tests.e2e.vllm.small_machine",
    }
    options = EngineOptions(
        llama,
        settings,
        num_device_blocks=NUM_DEVICE_BLOCKS,
        engine_arguments=TWO_WORKERS,
        environment=ONE_CORE_EACH | {ENVIRONMENT_NAME: str(tmp_path / "machine")},
    )

    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        from_host = engine.call("generate_in_turn", PROMPTS, GREEDY)
        stats = engine.call("stats")
        engine.call("check")

    left_bytes = memory_bytes - MIN_RESERVE_BYTES - engine_bytes
    assert stats["primary.capacity_blocks"] == left_bytes // BLOCK_BYTES
    assert [answer.num_cached_tokens for answer in from_host] == [WHOLE_TOKENS] * len(make_cycle(4))
