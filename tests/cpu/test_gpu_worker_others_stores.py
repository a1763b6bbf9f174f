"""Where every worker holds the same bytes, a row has them once: one worker stores, each loads."""

import subprocess
import sys
from dataclasses import replace

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
from kvtier.cpu.spec import CPUOffloadingSpec
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
rank, name = int(sys.argv[1]), sys.argv[2]
worker = Half(rank, name)
print("ready", flush=True)
for line in sys.stdin:
    verb, slot = line.split()
    fill(worker.caches, rank if verb == "store" else 100)
    print(worker.move(verb, int(slot)), int(worker.caches.tensors[0].tensor[2].float().mean()), flush=True)
worker.spec.shutdown()
"""


def make_config(rank: int | None, name: str, *groups: KVGroup, world_size: int = 2) -> OffloadingConfig:
    """Return the configuration of one half of an engine."""
    extra = {"cpu_bytes_to_use": 2**18, "secondary_tiers": [{"type": "example"}]}
    model = ModelIdentity("model")
    return OffloadingConfig(
        name, model, groups or (SHARED,), 16, rank=rank, world_size=world_size, extra_config=extra
    )


def fill(caches: CanonicalKVCaches, value: int) -> None:
    """Set each byte of the device."""
    caches.tensors[0].tensor.fill_(value)


class Half:
    """The production code of one worker, with a device cache of its own."""

    def __init__(self, rank: int, name: str, *groups: KVGroup, world_size: int = 2) -> None:
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.zeros((4, PAGE_BYTES), dtype=torch.int8), PAGE_BYTES)],
            [[CanonicalKVCacheRef(0, PAGE_BYTES)]],
        )
        self.spec = TieringOffloadingSpec(make_config(rank, name, *groups, world_size=world_size))
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


def test_two_workers_in_two_processes_keep_one_copy_that_both_load() -> None:
    name = "parts-once"
    scheduler = TieringOffloadingSpec(make_config(None, name))
    manager = scheduler.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), name],
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
        context = ReqContext("a")
        output = manager.prepare_store([key_of(1)], context)
        assert output is not None
        # The second worker ends its part at once, and what it holds goes nowhere.
        assert [tell(rank, "store 0") for rank in (1, 0)] == ["True 1", "True 0"]
        manager.complete_store([key_of(1)], context)
        row = np.asarray(manager.primary.get_kv_memoryview())[0]
        assert scheduler.row_stride == row.size == 8192  # two pages of 6,000 bytes would take 12,288
        assert not row.any()
        row[:PAGE_BYTES] = 7
        del row
        assert [tell(rank, "load 0") for rank in (0, 1)] == ["True 7", "True 7"]
    finally:
        for worker in workers:
            worker.communicate(timeout=HANG_GUARD_S)
        scheduler.shutdown()


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
        parts = np.asarray(manager.primary.get_kv_memoryview())[0, : 2 * PAGE_BYTES].reshape(2, PAGE_BYTES)
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
    # Private rows are of one process: each worker keeps its own.
    assert CPUOffloadingSpec(config).num_row_parts == world_size


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
