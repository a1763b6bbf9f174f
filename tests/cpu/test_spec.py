"""The spec derives sizes, refuses what cannot work, and builds each half once."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from tests.own_classes import write_package

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
from kvtier.config import CudaCopier, GroupKind, KVGroup, ModelIdentity, OffloadingConfig, StatePart
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.instance_lock import make_lock_path
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import ConfigError, KVCacheLayoutError, UnknownNameError
from kvtier.factory import OffloadingSpecFactory
from kvtier.tiering.spec import TieringOffloadingSpec
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


@pytest.mark.parametrize(("value", "way"), [(None, CudaCopier.AUTO), ("batch", CudaCopier.BATCH)])
@pytest.mark.parametrize("spec_class", [CPUOffloadingSpec, TieringOffloadingSpec])
def test_handlers_are_told_how_to_copy_on_cuda(
    spec_class: type[CPUOffloadingSpec],
    value: str | None,
    way: CudaCopier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []

    class Handlers(CpuGpuOffloadingHandlers):
        def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  # as given
            told.append(named["cuda_copier"])
            super().__init__(*arguments, **named)

    monkeypatch.setattr("kvtier.cpu.spec.CpuGpuOffloadingHandlers", Handlers)
    settings: dict[str, Any] = {"cpu_bytes_to_use": "1MB", "secondary_tiers": []}  # Any: as JSON brings them
    if value is not None:
        settings["cuda_copier"] = value
    config = config_of(engine_id=f"told-{uuid4().hex}", **settings)
    spec = spec_class(replace(config, rank=0, hash_seed="0"))

    list(spec.get_handlers(caches_of(1000, 600)))
    spec.shutdown()

    assert told == [way]


def test_missing_memory_is_refused_naming_the_setting_and_an_example() -> None:
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use.*8GiB.*1000 bytes"):
        CPUOffloadingSpec(config_of())


def test_memory_below_one_block_is_refused_naming_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use=3999.*at least 4000 bytes"):
        CPUOffloadingSpec(config_of(world_size=4, cpu_bytes_to_use=3999))


def test_more_memory_than_the_machine_has_is_refused_before_its_table_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    monkeypatch.setattr(CPUOffloadingSpec, "system_root", tmp_path)
    with pytest.raises(
        ConfigError, match=r'cpu_bytes_to_use=2000: this machine has 1.0 KiB of memory.*"auto"'
    ):
        CPUOffloadingSpec(config_of(cpu_bytes_to_use=2000)).get_manager()
    CPUOffloadingSpec(config_of(cpu_bytes_to_use="1000B")).get_manager().shutdown()
    elsewhere = replace(config_of(cpu_bytes_to_use=2000), has_local_workers=False)
    CPUOffloadingSpec(elsewhere).get_manager().shutdown()


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


@pytest.mark.parametrize("registered_bytes", [500, 999, 1001, 2000])
def test_pages_of_another_size_than_configured_are_refused_with_both_sizes(
    spec: CPUOffloadingSpec, registered_bytes: int
) -> None:
    with pytest.raises(
        KVCacheLayoutError, match=rf"group 0 .*have {registered_bytes} bytes.*page_size_bytes=1000"
    ):
        list(spec.get_handlers(caches_of(registered_bytes, 600)))


def test_a_region_has_the_specs_geometry_and_the_engines_name() -> None:
    instance_id = f"kvtier-test-spec-region-{os.getpid()}"
    config = config_of(world_size=2, cpu_bytes_to_use=100_000, instance_id=instance_id)
    spec = AlignedSpec(config)
    scheduler: SharedOffloadRegion = spec.make_region(None)
    worker = spec.make_region(1)

    shape = (scheduler.num_blocks, scheduler.row_stride, worker.cpu_page_size, worker.num_workers)

    assert shape == (24, 4096, 1000, 2)
    assert scheduler.identity == worker.identity
    assert scheduler.mmap_path.endswith(instance_id)
    scheduler.cleanup()
    worker.cleanup()


def named_spec(instance_id: str, eviction_policy: str = "lru") -> CPUOffloadingSpec:
    """Return a spec whose user gave it an instance id."""
    return CPUOffloadingSpec(
        config_of(cpu_bytes_to_use="1MiB", instance_id=instance_id, eviction_policy=eviction_policy)
    )


def test_an_instance_id_that_a_user_gave_two_engines_is_refused_by_the_second_until_the_first_ends() -> None:
    first, second = named_spec("kvtier-test-named"), named_spec("kvtier-test-named")
    first.get_manager()

    with pytest.raises(ConfigError, match=r"instance_id='kvtier-test-named'.*its own instance_id"):
        second.get_manager()

    first.shutdown()
    second.get_manager()
    second.shutdown()
    assert not make_lock_path("kvtier-test-named").exists()


def test_engines_that_were_given_no_instance_id_may_have_the_same_engine_id() -> None:
    specs = [CPUOffloadingSpec(config_of(cpu_bytes_to_use="1MiB", engine_id="same")) for _ in range(2)]

    managers = [spec.get_manager() for spec in specs]

    assert managers[0] is not managers[1]


def test_an_engine_that_cannot_start_does_not_keep_its_instance_id() -> None:
    failed = named_spec("kvtier-test-failed", eviction_policy="lruu")
    with pytest.raises(UnknownNameError):
        failed.get_manager()

    spec = named_spec("kvtier-test-failed")
    spec.get_manager()
    spec.shutdown()


def test_a_policy_of_one_s_own_is_named_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, "spec_package")
    monkeypatch.syspath_prepend(tmp_path)
    spec = named_spec("kvtier-test-own", eviction_policy="spec_package.parts:Mine")
    manager = spec.get_manager()
    request = ReqContext("a")
    keys = [make_offload_key(number.to_bytes(4, "big"), 0) for number in range(spec.num_blocks + 1)]
    for key in keys[:-1]:
        assert manager.prepare_store([key], request) is not None
        manager.complete_store([key], request)
    manager.touch(keys[:1], request)

    output = manager.prepare_store(keys[-1:], request)

    assert output is not None
    assert output.evicted_keys == keys[:1]
    spec.shutdown()


def test_what_killed_engines_left_of_their_ids_is_removed_when_one_starts() -> None:
    dead = make_lock_path("kvtier-test-dead")
    dead.touch()
    spec = named_spec("kvtier-test-next")

    spec.get_manager()

    assert not dead.exists()
    spec.shutdown()


@pytest.fixture
def unlockable_id() -> Iterator[str]:
    """Return an id whose lock cannot be made: there is a folder in its place."""
    path = make_lock_path("kvtier-test-unlockable")
    path.mkdir()
    yield "kvtier-test-unlockable"
    path.rmdir()


def test_private_rows_start_with_a_warning_where_no_lock_can_be_made(
    unlockable_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = named_spec(unlockable_id)

    spec.get_manager()

    assert "instance_id is not checked" in caplog.text
    spec.shutdown()


def move(spec: CPUOffloadingSpec, caches: CanonicalKVCaches, *, is_store: bool) -> bool:
    """Copy device block 5 of the first group to or from slot 9; return whether it arrived."""
    store, load = (entry.handler for entry in spec.get_handlers(caches))
    device, rows, job = GPULoadStoreSpec([5], [1, 0], [0, 0]), CPULoadStoreSpec([9]), TransferJobId(1)
    handler = store if is_store else load
    if not handler.transfer_async(
        job, TransferSpec(device, rows) if is_store else TransferSpec(rows, device)
    ):
        return False
    handler.wait({job})
    return [result.success for result in handler.get_finished()] == [True]


def test_what_was_stored_before_the_cache_was_taken_away_is_loaded_into_the_one_that_came_back(
    spec: CPUOffloadingSpec,
) -> None:
    first, second = caches_of(1000, 600), caches_of(1000, 600)
    first.tensors[0].tensor[5] = 7
    assert move(spec, first, is_store=True)
    handlers = [entry.handler for entry in spec.get_handlers(first)]

    spec.detach_kv_caches()
    spec.detach_kv_caches()

    assert [entry.handler for entry in spec.get_handlers(second)] == handlers
    assert move(spec, second, is_store=False)
    assert bool((second.tensors[0].tensor[5] == 7).all())


def test_a_cache_that_comes_back_in_another_layout_is_refused(spec: CPUOffloadingSpec) -> None:
    list(spec.get_handlers(caches_of(1000, 600)))
    spec.detach_kv_caches()

    with pytest.raises(KVCacheLayoutError, match="same layout"):
        list(spec.get_handlers(caches_of(1000, 592)))


def test_a_cache_may_be_taken_away_before_there_was_one_and_after_the_end(spec: CPUOffloadingSpec) -> None:
    spec.detach_kv_caches()
    assert move(spec, caches_of(1000, 600), is_store=True)

    spec.shutdown()
    spec.detach_kv_caches()

    assert not move(spec, caches_of(1000, 600), is_store=True)


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


KNOWN = (StatePart("float32", 600),)


@pytest.mark.parametrize(
    ("kind", "parts", "audit_ratio", "rank", "num_lines"),
    [
        (GroupKind.STATE, (), 0.1, None, 1),
        (GroupKind.STATE, (), 0.1, 0, 0),  # the scheduler's half speaks for all
        (GroupKind.STATE, (), 0.0, None, 0),
        (GroupKind.STATE, KNOWN, 0.1, None, 0),
        (GroupKind.FULL, (), 0.1, None, 0),
    ],
)
def test_an_audit_says_at_the_start_which_states_it_leaves_out(
    caplog: pytest.LogCaptureFixture,
    kind: GroupKind,
    parts: tuple[StatePart, ...],
    audit_ratio: float,
    rank: int | None,
    num_lines: int,
) -> None:
    groups = (KVGroup(16, ("a",), 600), KVGroup(16, ("b",), 600, kind, state_parts=parts))
    extra = {"cpu_bytes_to_use": "1MiB", "audit_ratio": audit_ratio}
    model = ModelIdentity("m", dtype="bfloat16")
    spec = CPUOffloadingSpec(
        OffloadingConfig("e", model, groups, 16, rank=rank, kv_dtype="bfloat16", extra_config=extra)
    )

    named = "leaves out the recurrent states of KV groups [1]"
    assert sum(named in line for line in caplog.messages) == num_lines
    is_known = kind is not GroupKind.STATE or bool(parts)
    assert spec.audited_groups() == (set() if not audit_ratio else {0, 1} if is_known else {0})
