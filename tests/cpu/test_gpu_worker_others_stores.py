"""Where every worker holds the same bytes, a row has them once: one worker stores, each loads."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

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
from kvtier.connector.handshake import make_handshake
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY, make_region_path
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import ConfigError
from kvtier.limits import MemorySize
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec
from kvtier.worker.worker import OffloadingWorker

PAGE_BYTES = 6000
SHARED = KVGroup(16, ("latent",), PAGE_BYTES, is_replicated=True)
PAIRED = KVGroup(16, ("few heads",), PAGE_BYTES, workers_per_part=2)
SHARDED = KVGroup(16, ("heads",), PAGE_BYTES)
HANG_GUARD_S = 60.0

WORKER = """
import sys
from tests.cpu.test_gpu_worker_others_stores import Half, fill
rank, name, has_tiers = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
worker = Half(rank, name, has_tiers=has_tiers)
print("ready", flush=True)
for line in sys.stdin:
    verb, slot = line.split()
    fill(worker.caches, rank if verb == "store" else 100)
    print(worker.move(verb, int(slot)), int(worker.caches.tensors[0].tensor[2].float().mean()), flush=True)
worker.spec.shutdown()
"""


def make_config(
    rank: int | None, name: str, *groups: KVGroup, world_size: int = 2, has_tiers: bool = True
) -> OffloadingConfig:
    """Return the configuration of one half of an engine."""
    extra: dict[str, object] = {"cpu_bytes_to_use": 2**18}
    if has_tiers:
        extra["secondary_tiers"] = [{"type": "example"}]
    model = ModelIdentity("model")
    return OffloadingConfig(
        name, model, groups or (SHARED,), 16, rank=rank, world_size=world_size, extra_config=extra
    )


def fill(caches: CanonicalKVCaches, value: int) -> None:
    """Set each byte of the device."""
    caches.tensors[0].tensor.fill_(value)


class Half:
    """The production code of one worker, with a device cache of its own."""

    def __init__(
        self, rank: int, name: str, *groups: KVGroup, world_size: int = 2, has_tiers: bool = True
    ) -> None:
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.zeros((4, PAGE_BYTES), dtype=torch.int8), PAGE_BYTES)],
            [[CanonicalKVCacheRef(0, PAGE_BYTES)]],
        )
        config = make_config(rank, name, *groups, world_size=world_size, has_tiers=has_tiers)
        self.spec = TieringOffloadingSpec(config) if has_tiers else CPUOffloadingSpec(config)
        self.handlers = OffloadingWorker()
        for entry in self.spec.get_handlers(self.caches):
            self.handlers.register_handler(*entry)
        self._next_job = 0

    def move(self, verb: str, slot: int) -> bool:
        """Store device block 2 in a slot, or load it from there."""
        from kvtier.cpu.common import CPULoadStoreSpec

        device, row = GPULoadStoreSpec([2], [1], [0]), CPULoadStoreSpec([slot])
        job_id = TransferJobId(self._next_job)
        self._next_job += 1
        spec = TransferSpec(device, row) if verb == "store" else TransferSpec(row, device)
        assert self.handlers.transfer_async(job_id, spec)
        self.handlers.wait({job_id})
        (result,) = self.handlers.get_finished()
        return result.success


@contextmanager
def worker_processes(name: str, *, has_tiers: bool) -> Iterator[Callable[[int, str], str]]:
    """Start a worker in each of two processes; yield what gives one a command and returns its answer."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), name, str(has_tiers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]

    def tell(rank: int, command: str) -> str:
        stdin, stdout = workers[rank].stdin, workers[rank].stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(command + "\n")
        stdin.flush()
        return stdout.readline().strip()

    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        yield tell
    finally:
        for worker in workers:
            worker.communicate(timeout=HANG_GUARD_S)


@pytest.mark.slow
def test_two_workers_in_two_processes_keep_one_copy_that_both_load() -> None:
    name = "parts-once"
    scheduler = TieringOffloadingSpec(make_config(None, name))
    manager = scheduler.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    try:
        with worker_processes(name, has_tiers=True) as tell:
            context = ReqContext("a")
            output = manager.prepare_store([key_of(1)], context)
            assert output is not None
            # The second worker ends its part at once, and what it holds goes nowhere.
            assert [tell(rank, "store 0") for rank in (1, 0)] == ["True 1", "True 0"]
            manager.complete_store([key_of(1)], context)
            row = np.asarray(manager.primary_tier.get_kv_memoryview())[0]
            assert scheduler.row_stride == row.size == 8192  # two pages of 6,000 bytes would take 12,288
            assert not row.any()
            row[:PAGE_BYTES] = 7
            del row
            assert [tell(rank, "load 0") for rank in (0, 1)] == ["True 7", "True 7"]
    finally:
        scheduler.shutdown()


@pytest.mark.slow
def test_host_memory_alone_has_one_copy_too_in_a_region_that_every_half_proves() -> None:
    name = f"parts-host-{uuid4().hex}"
    scheduler = CPUOffloadingSpec(make_config(None, name, has_tiers=False))
    manager = scheduler.get_manager()
    assert isinstance(manager, CPUOffloadingManager)
    handshake = make_handshake(scheduler)
    assert handshake is not None
    try:
        with worker_processes(name, has_tiers=False) as tell:
            assert scheduler.row_stride == PAGE_BYTES
            assert scheduler.num_blocks == 2**18 // PAGE_BYTES
            assert [tell(rank, "store 3") for rank in (1, 0)] == ["True 1", "True 0"]
            assert [tell(rank, "load 3") for rank in (1, 0)] == ["True 0", "True 0"]
            joined = Half(0, name, has_tiers=False)
            identity = joined.spec.region_identity()
            assert identity is not None
            assert identity == scheduler.region_identity()
            handshake.record([identity, identity])
            assert handshake.is_open
            assert not make_region_path(name).exists()
            joined.spec.shutdown()
    finally:
        manager.check()
        scheduler.shutdown()
    assert not [path for path in SHARED_MEMORY_DIRECTORY.iterdir() if name in path.name]


def test_a_second_engine_with_the_same_instance_id_is_refused_where_rows_are_shared() -> None:
    name = f"parts-taken-{uuid4().hex}"
    first = CPUOffloadingSpec(make_config(None, name, has_tiers=False))
    first.get_manager()
    with pytest.raises(ConfigError, match="taken by a running engine"):
        CPUOffloadingSpec(make_config(None, name, has_tiers=False)).get_manager()
    first.shutdown()
    again = CPUOffloadingSpec(make_config(None, name, has_tiers=False))
    again.get_manager()
    assert again.region_identity() not in (None, first.region_identity())
    again.shutdown()


def test_what_only_one_worker_holds_stays_in_private_rows() -> None:
    spec = CPUOffloadingSpec(make_config(None, "parts-private", SHARDED, has_tiers=False))
    spec.get_manager()

    assert not spec.has_region
    assert make_handshake(spec) is None
    spec.shutdown()


@pytest.mark.parametrize("reason", ["no mount", "a small mount", "workers may be on other machines"])
def test_where_workers_cannot_share_host_memory_alone_each_keeps_its_own(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class SpecThere(CPUOffloadingSpec):
        system_root = tmp_path if reason == "no mount" else Path("/")

    config = make_config(None, "parts-apart", has_tiers=False)
    if reason == "a small mount":
        config = replace(config, extra_config={"cpu_bytes_to_use": 2**60})
    is_local = reason != "workers may be on other machines"
    spec = SpecThere(replace(config, has_local_workers=is_local))

    assert (spec.has_region, spec.num_row_parts) == (False, 2)
    assert spec.region_identity() is None
    assert ("kept once for each" in caplog.text) == is_local


@pytest.mark.parametrize(("mount_gib", "is_shared"), [(64, True), (32, True), (20, False)])
def test_auto_shares_rows_where_the_mount_holds_as_many_blocks_as_private_memory(
    mount_gib: int, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SpecThere(CPUOffloadingSpec):
        system_root = tmp_path

    def mount_size(mount: Path) -> MemorySize:
        return MemorySize(mount_gib * 2**30, str(mount))

    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\n")
    for module in ("kvtier.cpu.spec", "kvtier.cpu.auto_size"):
        monkeypatch.setattr(f"{module}.find_mount_size", mount_size)
    config = make_config(None, "parts-auto", has_tiers=False)
    extra = {"cpu_bytes_to_use": "auto"}
    # 64 GiB less a tenth and 4 GiB are 53.6: private rows hold as much as 26.8 GiB that both share.
    specs = [
        SpecThere(replace(config, rank=rank, engine_host_bytes=4 * 2**30, extra_config=extra))
        for rank in (None, 0, 1)
    ]

    assert [spec.has_region for spec in specs] == [is_shared] * 3
    assert len({spec.num_blocks for spec in specs}) == 1


def test_of_two_workers_with_the_same_head_the_first_stores_and_both_load_it() -> None:
    name = "parts-of-pairs"
    scheduler = TieringOffloadingSpec(make_config(None, name, PAIRED, world_size=4))
    manager = scheduler.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    workers = [Half(rank, name, PAIRED, world_size=4) for rank in range(4)]
    try:
        for rank, worker in enumerate(workers):
            fill(worker.caches, 10 + rank)
            assert worker.move("store", 0)
        parts = np.asarray(manager.primary_tier.get_kv_memoryview())[0, : 2 * PAGE_BYTES].reshape(
            2, PAGE_BYTES
        )
        assert [set(part.tolist()) for part in parts] == [{10}, {12}]
        assert scheduler.row_stride == 12_288
        del parts
        for worker in workers:
            assert worker.move("load", 0)
        assert [int(worker.caches.tensors[0].tensor[2].float().mean()) for worker in workers] == [
            10,
            10,
            12,
            12,
        ]
    finally:
        for worker in workers:
            worker.spec.shutdown()
        scheduler.shutdown()


@pytest.mark.parametrize(
    ("groups", "world_size", "num_parts"),
    [
        ((SHARED,), 2, 1),
        ((SHARED, SHARED), 4, 1),
        ((SHARED, SHARDED), 2, 2),
        ((SHARDED,), 2, 2),
        ((SHARED,), 1, 1),
        ((PAIRED,), 4, 2),
        ((SHARED, PAIRED), 4, 2),
        ((SHARED, PAIRED, SHARDED), 4, 4),
        ((PAIRED,), 1, 1),
    ],
)
def test_a_row_has_bytes_once_as_far_as_workers_share_those_of_all_groups(
    groups: tuple[KVGroup, ...], world_size: int, num_parts: int
) -> None:
    config = make_config(None, "parts", *groups, world_size=world_size)

    assert TieringOffloadingSpec(config).num_row_parts == num_parts
    assert CPUOffloadingSpec(config).num_row_parts == num_parts


def test_blocks_of_another_number_of_parts_are_not_found_and_others_still_are() -> None:
    sharded, shared = make_config(None, "a", SHARDED), make_config(None, "a", SHARED)
    mixed = make_config(None, "a", SHARED, SHARDED)
    unmarked = make_config(None, "a", replace(SHARED, is_replicated=False), SHARDED)

    paired = make_config(None, "a", PAIRED, world_size=4)
    alone = replace(paired, groups=(replace(PAIRED, workers_per_part=1),))

    assert make_namespace(paired, 12_288).digest != make_namespace(alone, 12_288).digest
    # Rows may be equally long by alignment.
    assert (
        make_namespace(shared, 8192).digest
        != make_namespace(replace(shared, groups=(replace(SHARED, is_replicated=False),)), 8192).digest
    )
    assert make_namespace(mixed, 8192).digest == make_namespace(unmarked, 8192).digest
    assert "parts" not in make_namespace(sharded, 8192).document
