"""An "auto" size counts what the embedded engine itself has in host memory, and both halves agree on the rest."""

from pathlib import Path

from transformers import LlamaForCausalLM

from kvtier.cpu.auto_size import MIN_RESERVE_BYTES, PROCESS_BYTES
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.engines.transformers.identity import count_host_bytes
from kvtier.engines.transformers.model_adapter import ModelAdapter

LEFT_BYTES = 2**20


def test_the_weights_count_once_and_the_pool_twice(llama: LlamaForCausalLM) -> None:
    adapter = ModelAdapter(llama)
    config = EngineConfig(num_device_blocks=8, block_size_tokens=4)
    weights = sum(tensor.nbytes for tensor in (*llama.parameters(), *llama.buffers()))

    counted = count_host_bytes(adapter, config)

    assert counted == PROCESS_BYTES + weights + 2 * 8 * 4 * adapter.shape.token_bytes


def test_an_engine_takes_what_its_machine_leaves(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    config = EngineConfig(num_device_blocks=8, block_size_tokens=4, extra_config={"cpu_bytes_to_use": "auto"})
    engine_bytes = count_host_bytes(ModelAdapter(llama), config)
    memory_bytes = MIN_RESERVE_BYTES + engine_bytes + LEFT_BYTES
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {memory_bytes // 1024} kB\n")

    class SpecThere(CPUOffloadingSpec):
        system_root = tmp_path

    with KVTierEngine(llama, config, make_spec=SpecThere) as engine:
        num_blocks = engine.stats()["primary.capacity_blocks"]
        first = engine.run(list(range(1, 20)), max_new_tokens=1)
        engine.drop_device_cache()
        again = engine.run(list(range(1, 20)), max_new_tokens=1)

    row_bytes = 4 * ModelAdapter(llama).shape.token_bytes
    assert num_blocks == (memory_bytes // 1024 * 1024 - MIN_RESERVE_BYTES - engine_bytes) // row_bytes
    assert "host" not in first.sources
    assert again.sources["host"] == 16
