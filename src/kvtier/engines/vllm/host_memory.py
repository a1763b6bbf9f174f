"""What vLLM itself takes of the host's memory, for ``"cpu_bytes_to_use": "auto"``.

The scheduler's process and the workers compute it on their own and must agree, so it follows from the configuration and
from the sizes of the checkpoint's files. On a GPU it is the processes and the weights that --cpu-offload-gb keeps in
host memory; on a CPU the weights and vLLM's own KV cache too.
"""

import re

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.config import HostSize
from kvtier.cpu.auto_size import PROCESS_BYTES, SETTING
from kvtier.engines.checkpoint.files import find_files
from kvtier.engines.vllm import compat
from kvtier.engines.vllm.groups import make_kv_groups
from kvtier.engines.vllm.identity import find_checkpoint, models_of
from kvtier.errors import ConfigError

OTHER_PROCESSES = 2
"""Processes beside the workers: the server and the engine core."""

REPLICA = re.compile(r".*_dp[0-9]+")
"""The id that vLLM gives to a replica of a server with data parallelism."""


def count_host_bytes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int | None:
    """Return the host memory that the engine takes for itself; None when nothing asks, or its weights' size is unknown.

    Raises:
        FingerprintError: a file of the checkpoint cannot be read.
    """
    if not is_auto(vllm_config):
        return None
    world_size = int(vllm_config.parallel_config.world_size)
    processes = PROCESS_BYTES * (world_size + OTHER_PROCESSES)
    if not compat.is_on_cpu():
        return processes + compat.offloaded_weight_bytes(vllm_config) * world_size
    places = [find_checkpoint(model, load_config) for _, model, load_config in models_of(vllm_config)]
    if None in places:
        return None
    weights = sum(file.stamp.size_bytes for place in filter(None, places) for file in find_files(place))
    # Groups lay their pages over the same memory, so the largest page of a block counts.
    page_bytes = max(group.page_size_bytes for group in make_kv_groups(kv_cache_config))
    pool_bytes = page_bytes * int(kv_cache_config.num_blocks) * world_size
    return processes + weights + pool_bytes


def count_engines(vllm_config: VllmConfig) -> int:
    """Return how many replicas share the memory of this host.

    Raises:
        ConfigError: "auto" is set, and vLLM does not tell a replica how many there are.
    """
    parallel_config = vllm_config.parallel_config
    num_engines = int(parallel_config.data_parallel_size_local)
    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    is_replica = bool(parallel_config.data_parallel_index) or REPLICA.fullmatch(engine_id)
    if is_auto(vllm_config) and is_replica and num_engines <= 1:
        # vLLM resets the size to 1 in replicas that share no experts.
        remedy = "vLLM does not tell a data-parallel replica how many share this host: give each a size such as 8GiB"
        raise ConfigError(SETTING, HostSize.AUTO.value, remedy)
    return max(1, num_engines)


def is_auto(vllm_config: VllmConfig) -> bool:
    """Return whether the size of host memory is to be found. Pure."""
    settings = vllm_config.kv_transfer_config.kv_connector_extra_config
    return bool(settings.get(SETTING) == HostSize.AUTO.value)
