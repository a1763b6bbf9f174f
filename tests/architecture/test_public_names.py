"""The public names of kvtier's contracts: what engines, specs, tiers and policies are written against does not go."""

import importlib
from dataclasses import replace
from inspect import signature

import pytest
import torch

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    JobId,
    OffloadingEvent,
    PrepareStoreOutput,
    ReqContext,
    TransferJobId,
    TransferSpec,
)
from kvtier.config import OffloadingConfig
from kvtier.connector import ConnectorRole, OffloadingConnector
from kvtier.connector.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from kvtier.connector.metrics import OffloadingConnectorStats
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.testing.tier_suite import make_config, make_rows
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering import manager as tiering_manager
from kvtier.tiering import primary as tiering_primary
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.worker.worker import TransferResult

NAMES: dict[str, str] = {
    "kvtier.base": "OffloadKey make_offload_key get_offload_block_hash get_offload_group_idx ReqContext LoadStoreSpec "
    "BlockIDsLoadStoreSpec GPULoadStoreSpec PrepareStoreOutput OffloadingEvent OffloadingManager OffloadingSpec "
    "CanonicalKVCacheTensor CanonicalKVCacheRef CanonicalKVCaches",
    "kvtier.config": "OffloadingConfig",
    "kvtier.worker.worker": "TransferSpec TransferType TransferResult OffloadingHandler OffloadingWorker",
    "kvtier.cpu.common": "CPULoadStoreSpec",
    "kvtier.cpu.manager": "CPUOffloadingManager",
    "kvtier.cpu.policies.base": "CachePolicy BlockStatus",
    "kvtier.cpu.policies.lru": "LRUCachePolicy",
    "kvtier.cpu.policies.arc": "ARCCachePolicy",
    "kvtier.cpu.shared_offload_region": "SharedOffloadRegion",
    "kvtier.cpu.spec": "CPUOffloadingSpec",
    "kvtier.cpu.gpu_worker": "CpuGpuOffloadingHandlers",
    "kvtier.factory": "OffloadingSpecFactory",
    "kvtier.tiering.base": "JobMetadata JobResult SecondaryTierManager",
    "kvtier.tiering.factory": "create_secondary_tier",
    "kvtier.tiering.example": "ExampleSecondaryTier",
    "kvtier.tiering.manager": "TieringOffloadingManager CPUPrimaryTierOffloadingManager",
    "kvtier.tiering.primary": "CPUPrimaryTierOffloadingManager",
    "kvtier.tiering.spec": "TieringOffloadingSpec",
    "kvtier.connector.offloading_connector": "OffloadingConnector",
    "kvtier.connector.common": "TransferJob OffloadingConnectorMetadata OffloadingWorkerMetadata",
    "kvtier.connector.features": "RequestFeature Withheld",
    "kvtier.connector.metrics": "OffloadingConnectorStats",
    "kvtier.connector.scheduler": "OffloadingConnectorScheduler",
    "kvtier.connector.worker": "OffloadingConnectorWorker",
}

MANAGER = (
    "lookup prepare_load prepare_store touch complete_load complete_store take_events end_step request_finished "
    "has_pending_work reset stats shutdown is_waiting note_request find_run find_window explain locator "
    "pin unpin purge drop drain switch_model promoted_for will_have_room on_unstored"
)
METHODS: dict[str, str] = {
    "kvtier.base:LoadStoreSpec": "medium",
    "kvtier.base:OffloadingManager": MANAGER,
    "kvtier.base:OffloadingSpec": "get_manager get_handlers",
    "kvtier.worker.worker:OffloadingHandler": "transfer_async get_finished wait shutdown",
    "kvtier.worker.worker:OffloadingWorker": "register_handler transfer_async get_finished wait shutdown",
    "kvtier.cpu.manager:CPUOffloadingManager": f"{MANAGER} counts events check",
    "kvtier.cpu.policies.base:CachePolicy": "get insert remove touch evict clear",
    "kvtier.cpu.shared_offload_region:SharedOffloadRegion": "create_next_view create_kv_memoryview cleanup seal",
    "kvtier.factory:OffloadingSpecFactory": "register_spec create_spec",
    "kvtier.tiering.base:SecondaryTierManager": "lookup submit_store submit_load get_finished get_tier_type touch "
    "request_finished drain reset end_step drain_answered switch_model stats shutdown lookup_run note_request "
    "drop purge poll_purge explain probe open_place wait_indexed",
    "kvtier.tiering.example:ExampleSecondaryTier": "get_num_blocks clear",
    "kvtier.tiering.primary:CPUPrimaryTierOffloadingManager": "prepare_read complete_read prepare_write complete_write "
    "get_kv_memoryview shutdown",
    "kvtier.tiering.manager:TieringOffloadingManager": f"{MANAGER} secondary_tiers check",
    "kvtier.connector.common:OffloadingWorkerMetadata": "mark_completed aggregate",
    "kvtier.connector.metrics:OffloadingConnectorStats": "aggregate reduce reset is_empty record_transfer",
    "kvtier.connector.scheduler:OffloadingConnectorScheduler": "get_num_new_matched_tokens update_state_after_alloc "
    "build_connector_meta update_connector_output request_finished take_events",
    "kvtier.connector.worker:OffloadingConnectorWorker": "register_kv_caches handle_preemptions start_kv_transfers "
    "prepare_store_kv get_finished take_failed_loads build_connector_worker_meta shutdown",
}

MUST_BE_WRITTEN: dict[str, set[str]] = {
    "kvtier.base:OffloadingManager": {"lookup", "prepare_load", "prepare_store"},
    "kvtier.base:OffloadingSpec": {"get_manager", "get_handlers"},
    "kvtier.base:LoadStoreSpec": {"medium"},
    "kvtier.worker.worker:OffloadingHandler": {"transfer_async", "get_finished", "wait"},
    "kvtier.cpu.policies.base:CachePolicy": {"get", "insert", "remove", "touch", "evict"},
    "kvtier.tiering.base:SecondaryTierManager": {
        "lookup",
        "submit_store",
        "submit_load",
        "get_finished",
        "get_tier_type",
    },
}
"""What an implementation must write, and nothing else: one that was written to it can always be built."""

ARGUMENTS: dict[str, str] = {
    "kvtier.base:ReqContext": "req_id kv_transfer_params",
    "kvtier.base:BlockIDsLoadStoreSpec": "block_ids",
    "kvtier.base:GPULoadStoreSpec": "block_ids group_sizes block_indices",
    "kvtier.base:PrepareStoreOutput": "keys_to_store store_spec evicted_keys",
    "kvtier.base:OffloadingEvent": "keys medium removed",
    "kvtier.base:CanonicalKVCacheTensor": "tensor page_size_bytes",
    "kvtier.base:CanonicalKVCacheRef": "tensor_idx page_size_bytes",
    "kvtier.base:CanonicalKVCaches": "tensors group_data_refs",
    "kvtier.base:OffloadingSpec": "config",
    "kvtier.worker.worker:TransferResult": "job_id success transfer_size transfer_time transfer_type",
    "kvtier.worker.worker:OffloadingWorker": "",
    "kvtier.cpu.manager:CPUOffloadingManager": "num_blocks cache_policy enable_events store_threshold max_tracker_size",
    "kvtier.cpu.policies.base:CachePolicy": "cache_capacity",
    "kvtier.cpu.policies.base:BlockStatus": "block_id",
    "kvtier.cpu.shared_offload_region:SharedOffloadRegion": "instance_id total_size_bytes num_blocks rank num_workers "
    "cpu_page_size",
    "kvtier.cpu.gpu_worker:CpuGpuOffloadingHandlers": "kv_caches block_size_factor num_cpu_blocks mmap_region",
    "kvtier.tiering.base:JobMetadata": "job_id keys block_ids is_promotion req_context",
    "kvtier.tiering.base:JobResult": "job_id success successful_keys",
    "kvtier.tiering.base:SecondaryTierManager": "config primary_kv_view",
    "kvtier.tiering.factory:create_secondary_tier": "tier_config primary_kv_view config",
    "kvtier.tiering.example:ExampleSecondaryTier": "config primary_kv_view max_blocks simulate_async",
    "kvtier.tiering.primary:CPUPrimaryTierOffloadingManager": "num_blocks mmap_region cache_policy enable_events",
    "kvtier.tiering.manager:TieringOffloadingManager": "primary_tier secondary_tiers enable_events",
    "kvtier.connector.offloading_connector:OffloadingConnector": "config role",
    "kvtier.connector.common:TransferJob": "req_id transfer_spec",
    "kvtier.connector.common:OffloadingConnectorMetadata": "load_jobs store_jobs jobs_to_flush",
    "kvtier.connector.common:OffloadingWorkerMetadata": "completed_jobs failed_jobs",
    "kvtier.connector.metrics:OffloadingConnectorStats": "data",
    "kvtier.connector.scheduler:OffloadingConnectorScheduler": "spec",
    "kvtier.connector.worker:OffloadingConnectorWorker": "spec",
}
"""The first arguments, in their order."""


def find(target: str) -> object:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_its_names(module: str) -> None:
    found = importlib.import_module(module)

    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("target", METHODS)
def test_a_class_has_its_methods(target: str) -> None:
    assert [name for name in METHODS[target].split() if not hasattr(find(target), name)] == []


@pytest.mark.parametrize("target", MUST_BE_WRITTEN)
def test_a_contract_asks_for_no_more_methods_than_it_ever_did(target: str) -> None:
    assert getattr(find(target), "__abstractmethods__") == MUST_BE_WRITTEN[target]  # noqa: B009 - of any object


@pytest.mark.parametrize("target", ARGUMENTS)
def test_a_constructor_takes_its_arguments_in_their_order(target: str) -> None:
    found = find(target)
    assert callable(found)
    wanted = ARGUMENTS[target].split()

    assert list(signature(found).parameters)[: len(wanted)] == wanted


def attributes_of(found: object, names: str) -> dict[str, object]:
    return {name: getattr(found, name) for name in names.split()}


def test_the_manager_of_host_memory_says_how_it_was_built() -> None:
    plain, filtering = CPUOffloadingManager(4), CPUOffloadingManager(4, "arc", True, 2, 10)
    names = "store_threshold max_tracker_size medium events counts"

    assert attributes_of(plain, names) == {
        "store_threshold": 1,
        "max_tracker_size": 64_000,
        "medium": "CPU",
        "events": None,
        "counts": None,
    }
    assert attributes_of(filtering, names) == {
        "store_threshold": 2,
        "max_tracker_size": 10,
        "medium": "CPU",
        "events": [],
        "counts": {},
    }


def test_the_tiering_manager_names_its_tiers_and_the_primary_one_is_a_manager_of_host_memory() -> None:
    driver = TieringDriver(4, lambda rows: [ExampleSecondaryTier(make_config(), rows)])

    assert driver.manager.primary_tier is driver.primary
    assert list(driver.manager.secondary_tiers) == driver.tiers
    assert isinstance(driver.primary, CPUOffloadingManager)
    assert tiering_manager.CPUPrimaryTierOffloadingManager is tiering_primary.CPUPrimaryTierOffloadingManager
    driver.manager.shutdown()
    assert list(driver.manager.secondary_tiers) == []


def test_values_have_their_attributes() -> None:
    request, spec = ReqContext("a", {"x": 1}), GPULoadStoreSpec([3, 1], [2], [0])
    assert (request.req_id, request.kv_transfer_params) == ("a", {"x": 1})
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    assert (spec.block_ids.tolist(), spec.group_sizes, spec.block_indices) == ([3, 1], (2,), (0,))
    assert (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium()) == ("GPU", "CPU")
    assert attributes_of(PrepareStoreOutput([], spec, []), "keys_to_store store_spec evicted_keys")
    assert attributes_of(OffloadingEvent([], "CPU", False), "keys medium removed")
    assert attributes_of(BlockStatus(0), "block_id ref_cnt is_ready")
    assert attributes_of(LRUCachePolicy(1), "blocks")
    assert attributes_of(ARCCachePolicy(1), "t1 t2 b1 b2 target_t1_size cache_capacity")
    assert attributes_of(JobMetadata(JobId(0), (), spec.block_ids, True, request), "is_promotion req_context")
    assert attributes_of(JobResult(JobId(0), True), "job_id success successful_keys")
    assert attributes_of(TransferResult(TransferJobId(0), True), "transfer_size transfer_time transfer_type")
    assert attributes_of(OffloadingConnectorMetadata({}, {}), "load_jobs store_jobs jobs_to_flush")
    assert attributes_of(OffloadingWorkerMetadata(), "completed_jobs failed_jobs")
    assert attributes_of(
        TransferJob("a", TransferSpec(spec, CPULoadStoreSpec([0, 1]))), "req_id transfer_spec"
    )
    assert OffloadingConnectorStats(data={}).data == {}
    tier = ExampleSecondaryTier(make_config(), make_rows())
    assert attributes_of(tier, "blocks completed_jobs config primary_kv_view")


def make_sized_config(rank: int | None = None) -> OffloadingConfig:
    config = make_config()
    return replace(config, rank=rank, extra_config={"cpu_bytes_to_use": "1MiB"})


def test_a_spec_derives_its_sizes_and_builds_each_half_once() -> None:
    spec = CPUOffloadingSpec(make_sized_config())

    assert attributes_of(spec, "config extra_config hash_block_size gpu_block_size block_size_factor")
    assert attributes_of(spec, "num_blocks cpu_page_size_per_worker")
    assert isinstance(spec.gpu_block_size, tuple)
    assert spec.get_manager() is spec.get_manager()
    spec.shutdown()


def test_a_connector_has_the_half_of_its_role() -> None:
    scheduling = OffloadingConnector(make_sized_config(), ConnectorRole.SCHEDULER)
    working = OffloadingConnector(make_sized_config(rank=0), ConnectorRole.WORKER)

    assert scheduling.connector_worker is None
    assert working.connector_scheduler is None
    assert working.connector_worker is not None
    half = scheduling.connector_scheduler
    assert half is not None
    assert half._maximal_prefix_lookup([], ReqContext("a")) == 0
    assert half._sliding_window_lookup([], 1, ReqContext("a")) == 0
    scheduling.shutdown()
    working.shutdown()


def test_a_region_and_handlers_have_their_attributes() -> None:
    region = SharedOffloadRegion("public-names", 4096, 4, 0, 1, 1024)
    try:
        names = "mmap_path fd mmap_obj total_size_bytes num_blocks rank row_stride"
        assert attributes_of(region, names)["row_stride"] == 1024
    finally:
        region.cleanup()
    tensor = torch.zeros((2, 8), dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 8)], [[CanonicalKVCacheRef(0, 8)]])
    handlers = CpuGpuOffloadingHandlers(caches, 1, 2)
    assert attributes_of(handlers, "gpu_to_cpu_handler cpu_to_gpu_handler")
    handlers.shutdown()
