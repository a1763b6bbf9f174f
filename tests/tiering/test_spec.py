"""The tiering spec builds both halves over one region, and leaves nothing behind when it cannot."""

import os
from pathlib import Path

import numpy as np
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
)
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY, make_region_path
from kvtier.errors import ConfigError, KVTierError, TierError, UnknownNameError
from kvtier.factory import OffloadingSpecFactory
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.factory import TIERS
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec
from kvtier.worker.worker import OffloadingWorker

PAGE_BYTES = 6000


def make_config(rank: int | None, engine_id: str, world_size: int = 1, **extra: object) -> OffloadingConfig:
    """An engine with one group of one layer and an example tier."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer",), page_size_bytes=PAGE_BYTES)
    extra_config = {"cpu_bytes_to_use": 8 * 8192, "secondary_tiers": [{"type": "example"}]} | extra
    return OffloadingConfig(
        engine_id,
        ModelIdentity("model"),
        (group,),
        hash_block_size=16,
        rank=rank,
        world_size=world_size,
        extra_config=extra_config,
    )


def make_caches(num_blocks: int = 4) -> CanonicalKVCaches:
    """A device cache of one tensor with random bytes."""
    tensor = torch.randint(-128, 127, (num_blocks, PAGE_BYTES), dtype=torch.int8)
    refs = [[CanonicalKVCacheRef(0, PAGE_BYTES)]]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, PAGE_BYTES)], refs)


def leftovers(engine_id: str) -> list[Path]:
    """Names in shared memory that belong to the engine."""
    return [path for path in Path(SHARED_MEMORY_DIRECTORY).iterdir() if engine_id in path.name]


def test_rows_are_aligned_to_pages() -> None:
    spec = TieringOffloadingSpec(make_config(None, "aligned"))
    assert spec.row_stride == 8192
    assert spec.num_blocks == 8


def test_the_factory_takes_it_as_soon_as_there_is_a_tier() -> None:
    spec = OffloadingSpecFactory.create_spec(make_config(None, "implied"))
    assert isinstance(spec, TieringOffloadingSpec)


def test_without_a_list_of_tiers_it_is_refused() -> None:
    group = KVGroup(block_size_tokens=16, layer_names=("layer",), page_size_bytes=PAGE_BYTES)
    config = OffloadingConfig("e", ModelIdentity("m"), (group,), 16, extra_config={"cpu_bytes_to_use": 2**20})
    with pytest.raises(ConfigError, match="secondary_tiers"):
        TieringOffloadingSpec(config)
    with pytest.raises(ConfigError, match="must be a list"):
        make_config(None, "e", secondary_tiers={"type": "example"})


def test_both_halves_map_the_same_memory_and_move_bytes_through_it() -> None:
    scheduler = TieringOffloadingSpec(make_config(None, "two-halves"))
    worker = TieringOffloadingSpec(make_config(0, "two-halves"))
    caches = make_caches()
    manager = scheduler.get_manager()
    handlers = OffloadingWorker()
    for source, destination, handler in worker.get_handlers(caches):
        handlers.register_handler(source, destination, handler)
    assert scheduler.region_identity() == worker.region_identity() is not None
    scheduler.seal_region()
    assert leftovers("two-halves") == []

    request = ReqContext("a")
    output = manager.prepare_store([key_of(1)], request)
    assert output is not None
    device = GPULoadStoreSpec([2], [1], [0])
    assert handlers.transfer_async(TransferJobId(0), TransferSpec(device, output.store_spec))
    handlers.wait({TransferJobId(0)})
    assert [result.success for result in handlers.get_finished()] == [True]
    manager.complete_store([key_of(1)], request)
    assert isinstance(manager, TieringOffloadingManager)
    row = np.asarray(manager.primary.get_kv_memoryview())[0]
    assert np.array_equal(row[:PAGE_BYTES], caches.tensors[0].tensor[2].numpy())
    assert not row[PAGE_BYTES:].any()
    del row
    worker.shutdown()
    scheduler.shutdown()
    scheduler.shutdown()


def test_a_tier_that_cannot_work_leaves_no_memory_behind() -> None:
    config = make_config(None, "bad-tier", secondary_tiers=[{"type": "example"}, {"type": "exampl"}])
    with pytest.raises(UnknownNameError, match="example"):
        TieringOffloadingSpec(config).get_manager()
    assert leftovers("bad-tier") == []


class UnableTier(ExampleSecondaryTier):
    """Cannot start: its server is not there, for example."""

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview) -> None:
        raise ConnectionError("nobody listens")


@pytest.fixture
def unable_tier() -> str:
    """The name under which a tier that cannot start is known."""
    if "unable" not in TIERS:
        TIERS.register("unable", f"{__name__}:UnableTier")
    return "unable"


def test_a_tier_that_cannot_start_is_left_out_unless_it_is_required(unable_tier: str) -> None:
    entries = [{"type": unable_tier}, {"type": "example"}]
    spec = TieringOffloadingSpec(make_config(None, "optional", secondary_tiers=entries))
    assert [name for name in spec.get_manager().stats() if name.endswith(".blocks")] == [
        "tier.0.example.blocks"
    ]
    spec.shutdown()
    entries[0]["required"] = True  # type: ignore[assignment]  # JSON has values of any type
    with pytest.raises(TierError, match="nobody listens"):
        TieringOffloadingSpec(make_config(None, "strict", secondary_tiers=entries)).get_manager()
    assert leftovers("strict") == []


def test_a_region_of_a_dead_engine_is_removed_when_the_next_one_starts() -> None:
    dead = make_region_path("dead-engine", Path(SHARED_MEMORY_DIRECTORY))
    dead.write_bytes(b"\0" * 4096)
    spec = TieringOffloadingSpec(make_config(None, "next-engine"))
    spec.get_manager()
    assert not dead.exists()
    spec.shutdown()


def test_after_shutdown_nothing_of_the_region_stays_mapped() -> None:
    spec = TieringOffloadingSpec(make_config(None, "mapped"))
    manager = spec.get_manager()
    assert "mapped" in Path("/proc/self/maps").read_text()
    spec.shutdown()
    assert manager.stats()["primary.held_blocks"] == 0
    assert "kvtier_" + str(os.getuid()) + "_mapped" not in Path("/proc/self/maps").read_text()


def test_a_worker_without_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank"):
        list(TieringOffloadingSpec(make_config(None, "no-rank")).get_handlers(make_caches()))
    assert leftovers("no-rank") == []


def test_a_second_engine_of_other_geometry_is_refused_while_the_first_lives() -> None:
    first = TieringOffloadingSpec(make_config(None, "twice"))
    first.get_manager()
    second = TieringOffloadingSpec(make_config(None, "twice", cpu_bytes_to_use=16 * 8192))
    with pytest.raises(KVTierError, match="twice"):
        second.get_manager()
    first.shutdown()
    assert leftovers("twice") == []


def test_settings_of_the_primary_reach_it() -> None:
    config = make_config(None, "settings", eviction_policy="arc", store_threshold=2, lookup_deadline_s=1.5)
    spec = TieringOffloadingSpec(config)
    manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    assert manager.primary.counts is not None
    assert type(manager.primary._policy).__name__ == "ARCCachePolicy"
    assert manager._waiting._lookup_deadline_s == 1.5
    spec.shutdown()
