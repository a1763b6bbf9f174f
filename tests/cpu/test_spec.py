"""The spec derives sizes, refuses what cannot work, and builds each half once."""

from collections.abc import Iterator

import pytest
import torch

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
    TransferJobId,
    TransferSpec,
    make_offload_key,
)
from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import ConfigError, KVCacheLayoutError
from kvtier.factory import OffloadingSpecFactory
from kvtier.worker.worker import OffloadingWorker


def config_of(*, world_size: int = 1, engine_id: str = "engine", **extra_config: object) -> OffloadingConfig:
    """Return a configuration with a group of 1000 bytes and one of 600."""
    groups = (
        KVGroup(16, ("layer.0", "layer.1"), 1000),
        KVGroup(16, ("layer.2",), 600, GroupKind.WINDOW, window_tokens=64),
    )
    return OffloadingConfig(
        engine_id, ModelIdentity("m"), groups, 16, world_size=world_size, extra_config=extra_config
    )


def caches_of(*page_sizes: int) -> CanonicalKVCaches:
    """Return caches of one group a page size, 8 device blocks."""
    tensors = [CanonicalKVCacheTensor(torch.zeros((8, size), dtype=torch.int8), size) for size in page_sizes]
    refs = [[CanonicalKVCacheRef(at, size)] for at, size in enumerate(page_sizes)]
    return CanonicalKVCaches(tensors, refs)


class AlignedSpec(CPUOffloadingSpec):
    """What a spec with secondary tiers does to rows."""

    row_alignment_bytes = 4096


@pytest.fixture
def spec() -> Iterator[CPUOffloadingSpec]:
    """Return a spec with ten blocks and a factor of 2."""
    spec = CPUOffloadingSpec(config_of(cpu_bytes_to_use=20_999, block_size=32))
    yield spec
    spec.shutdown()


def test_sizes_follow_from_the_largest_group_the_factor_and_the_workers() -> None:
    spec = CPUOffloadingSpec(config_of(world_size=3, cpu_bytes_to_use="60kB", block_size=64))

    assert spec.block_size_factor == 4
    assert spec.cpu_page_size_per_worker == 4000
    assert spec.row_stride == 12_000
    assert spec.num_blocks == 5


def test_a_subclass_aligns_rows() -> None:
    spec = AlignedSpec(config_of(world_size=3, cpu_bytes_to_use="60kB", block_size=64))

    assert (spec.row_stride, spec.num_blocks) == (12_288, 4)


def test_missing_memory_is_refused_naming_the_setting_and_an_example() -> None:
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use.*8GiB.*1000 bytes"):
        CPUOffloadingSpec(config_of())


def test_memory_below_one_block_is_refused_naming_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use=3999.*at least 4000 bytes"):
        CPUOffloadingSpec(config_of(world_size=4, cpu_bytes_to_use=3999))


def test_settings_reach_the_spec_by_name() -> None:
    spec = CPUOffloadingSpec(
        config_of(cpu_bytes_to_use="1MiB", eviction_policy="arc", store_threshold=2, max_tracker_size=7)
    )

    assert (spec.eviction_policy, spec.store_threshold, spec.max_tracker_size) == ("arc", 2, 7)


def test_the_manager_is_built_once_with_the_derived_number_of_slots(spec: CPUOffloadingSpec) -> None:
    manager = spec.get_manager()
    keys = [make_offload_key(bytes([number]), 0) for number in range(10)]

    output = manager.prepare_store(keys, ReqContext("r"))

    assert output is not None
    assert len(output.keys_to_store) == spec.num_blocks == 10
    assert spec.get_manager() is manager


def test_handlers_are_built_once_and_a_worker_routes_to_them(spec: CPUOffloadingSpec) -> None:
    caches = caches_of(1000, 600)
    caches.tensors[0].tensor[5] = 7
    worker = OffloadingWorker()
    for entry in spec.get_handlers(caches):
        worker.register_handler(*entry)
    blocks, slots = GPULoadStoreSpec([5, 6], [2, 0], [0, 0]), CPULoadStoreSpec([9])
    job = TransferJobId(1)

    assert worker.transfer_async(job, TransferSpec(blocks, slots))
    worker.wait({job})
    caches.tensors[0].tensor.zero_()
    assert worker.transfer_async(job, TransferSpec(slots, blocks))
    worker.wait({job})

    assert bool((caches.tensors[0].tensor[5] == 7).all())
    assert [result.transfer_size for result in worker.get_finished()] == [2000, 2000]
    first, second = list(spec.get_handlers(caches)), list(spec.get_handlers(caches))
    assert [entry.handler for entry in first] == [entry.handler for entry in second]


def test_tensors_larger_than_configured_are_refused_with_both_sizes(spec: CPUOffloadingSpec) -> None:
    with pytest.raises(KVCacheLayoutError, match=r"need 2002 bytes.*give 2000"):
        list(spec.get_handlers(caches_of(1001, 600)))


def test_a_region_has_the_specs_geometry_and_the_engines_name() -> None:
    config = config_of(world_size=2, cpu_bytes_to_use=100_000, instance_id="kvtier-test-spec-region")
    spec = AlignedSpec(config)
    scheduler: SharedOffloadRegion = spec.make_region(None)
    worker = spec.make_region(1)

    shape = (scheduler.num_blocks, scheduler.row_stride, worker.cpu_page_size, worker.num_workers)

    assert shape == (24, 4096, 1000, 2)
    assert scheduler.identity == worker.identity
    assert scheduler.mmap_path.endswith("kvtier-test-spec-region")
    scheduler.cleanup()
    worker.cleanup()


def test_shutdown_ends_the_handlers_and_may_be_repeated(spec: CPUOffloadingSpec) -> None:
    store, _ = spec.get_handlers(caches_of(1000, 600))
    spec.get_manager()

    spec.shutdown()
    spec.shutdown()

    blocks = TransferSpec(GPULoadStoreSpec([5], [1, 0], [0, 0]), CPULoadStoreSpec([9]))
    assert not store.handler.transfer_async(TransferJobId(1), blocks)


def test_the_factory_builds_it_without_secondary_tiers() -> None:
    spec = OffloadingSpecFactory.create_spec(config_of(cpu_bytes_to_use="1MiB"))

    assert type(spec) is CPUOffloadingSpec
