"""An "auto" size counts what vLLM itself has in host memory, equally in the scheduler's process and in a worker's."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.engines.vllm.configs import NUM_BLOCKS, cache_config, flattened, full, group, with_kvtier
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.config import HostSize
from kvtier.cpu.auto_size import PROCESS_BYTES
from kvtier.engines.vllm import compat, host_memory
from kvtier.engines.vllm.config import make_offloading_config
from kvtier.errors import ConfigError

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
WEIGHT_BYTES = 12_345


@pytest.fixture
def kv_cache_config() -> KVCacheConfig:
    return cache_config(group(full(), "a", "b"))


@pytest.fixture
def config(vllm_config: VllmConfig) -> VllmConfig:
    return with_kvtier(vllm_config, cpu_bytes_to_use="auto")


def test_on_a_cpu_weights_and_pool_count_in_both_processes(
    config: VllmConfig, kv_cache_config: KVCacheConfig, model_folder: Path
) -> None:
    config.load_config.load_format = "auto"
    before = make_offloading_config(config, kv_cache_config, SCHEDULER).engine_host_bytes
    (model_folder / "more.safetensors").write_bytes(bytes(WEIGHT_BYTES))

    scheduler = make_offloading_config(config, flattened(kv_cache_config), SCHEDULER)
    worker = make_offloading_config(config, kv_cache_config, WORKER)

    assert before is not None
    assert before >= 3 * PROCESS_BYTES + 2 * 2048 * NUM_BLOCKS
    assert scheduler.settings.cpu_bytes_to_use is HostSize.AUTO
    assert scheduler.engine_host_bytes == worker.engine_host_bytes == before + WEIGHT_BYTES


def test_on_a_gpu_only_processes_count_and_weights_that_are_offloaded(
    config: VllmConfig, kv_cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "is_on_cpu", lambda: False)

    assert host_memory.count_host_bytes(config, kv_cache_config) == 3 * PROCESS_BYTES
    uva = getattr(getattr(config, "offload_config", None), "uva", config.cache_config)
    uva.cpu_offload_gb = 1.5
    assert host_memory.count_host_bytes(config, kv_cache_config) == 3 * PROCESS_BYTES + 3 * 2**29


def test_weights_that_are_not_on_a_local_disk_have_no_size(
    config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    config.load_config.load_format = "dummy"

    assert host_memory.count_host_bytes(config, kv_cache_config) is None


def test_where_a_size_is_given_nothing_is_counted(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    assert host_memory.count_host_bytes(with_kvtier(vllm_config), kv_cache_config) is None


def test_replicas_share_the_host(config: VllmConfig) -> None:
    assert host_memory.count_engines(config) == 1
    config.parallel_config.data_parallel_size_local = 4
    assert host_memory.count_engines(config) == 4


def test_a_replica_that_does_not_know_of_the_others_is_refused(
    config: VllmConfig, vllm_config: VllmConfig
) -> None:
    config.kv_transfer_config.engine_id = "some-id_dp0"
    with pytest.raises(ConfigError, match="does not tell a data-parallel replica"):
        host_memory.count_engines(config)

    given = with_kvtier(vllm_config)
    given.kv_transfer_config.engine_id = "some-id_dp0"
    assert host_memory.count_engines(given) == 1
