"""An offloading spec whose copies fail on purpose, on the rank and at the jobs that a test chose.

An engine whose handlers live in its own process is told while it runs. With tensor parallelism they live in worker
processes, and the faults travel in an environment variable.
A load that fails has copied its bytes and then spoiled one of its device blocks, as a broken transfer does: an
engine that used the block anyway would answer something else.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HandlerEntry,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.tiering.spec import TieringOffloadingSpec

ENVIRONMENT_NAME = "KVTIER_TEST_FAULTS"

GARBAGE = 0x3D
"""Byte that spoiled pages consist of: as float32 a harmless looking 0.046."""


Spoil = Literal["first", "middle", "last"]
"""Which of a load's device blocks is spoiled."""


@dataclass(frozen=True, slots=True)
class CopyFaults:
    """Which copies fail.

    Attributes:
        rank: the worker on which they do; None means all of them.
        fail_every_load: every so many loads one fails; 0 means none does.
        fail_every_store: likewise for stores.
        spoil: which device block of a failed load is spoiled.
    """

    rank: int | None = None
    fail_every_load: int = 0
    fail_every_store: int = 0
    spoil: Spoil = "first"

    def to_environment(self) -> dict[str, str]:
        """Return the variable that carries this to the engine's processes."""
        return {ENVIRONMENT_NAME: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> "CopyFaults":
        """Return those that came with an engine's environment."""
        return cls(**json.loads(os.environ.get(ENVIRONMENT_NAME, "{}")))


class FaultPlan:
    """The faults of this process's handlers; they are planned while no copy is under way."""

    def __init__(self, faults: CopyFaults) -> None:
        self.plan(faults)

    def plan(self, faults: CopyFaults) -> None:
        """Let copies fail from now on, counted from the next one."""
        self._faults = faults
        self._num_jobs = {True: 0, False: 0}

    def fails(self, rank: int | None, *, is_load: bool) -> bool:
        """Count a job; return whether it fails."""
        self._num_jobs[is_load] += 1
        every = self._faults.fail_every_load if is_load else self._faults.fail_every_store
        is_meant = self._faults.rank is None or self._faults.rank == rank
        return is_meant and every > 0 and self._num_jobs[is_load] % every == 0

    @property
    def spoil(self) -> Spoil:
        """Which device block of a failed load is spoiled."""
        return self._faults.spoil


FAULTS = FaultPlan(CopyFaults.of_environment())
"""Those of this process."""


class FaultySpec(TieringOffloadingSpec):
    """Tiered offloading with handlers that fail as the environment says."""

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        """Yield the usual handlers, each behind its faults."""
        return add_faults(super().get_handlers(kv_caches), kv_caches, self.config.rank)


class FaultyHostSpec(CPUOffloadingSpec):
    """Host memory alone with handlers that fail as the environment says."""

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        """Yield the usual handlers, each behind its faults."""
        return add_faults(super().get_handlers(kv_caches), kv_caches, self.config.rank)


def add_faults(
    entries: Iterator[HandlerEntry], kv_caches: CanonicalKVCaches, rank: int | None
) -> Iterator[HandlerEntry]:
    """Yield the handlers of one worker, each behind its faults."""
    for entry in entries:
        is_load = entry.destination is GPULoadStoreSpec
        yield entry._replace(handler=FaultyHandler(entry.handler, kv_caches, rank, is_load=is_load))


class FaultyHandler(OffloadingHandler):
    """One direction, of which the planned jobs fail."""

    def __init__(
        self, inner: OffloadingHandler, kv_caches: CanonicalKVCaches, rank: int | None, *, is_load: bool
    ) -> None:
        self._inner = inner
        self._kv_caches = kv_caches
        self._rank = rank
        self._is_load = is_load
        self._doomed: dict[TransferJobId, TransferSpec] = {}

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        """Start a transfer, and remember it if it is to fail."""
        if FAULTS.fails(self._rank, is_load=self._is_load):
            self._doomed[job_id] = spec
        return self._inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        """Return ended jobs; the doomed ones spoil a block first."""
        return [self._judge(result) for result in self._inner.get_finished()]

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Pass on."""
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        """Pass on."""
        self._inner.shutdown()

    def _judge(self, result: TransferResult) -> TransferResult:
        spec = self._doomed.pop(result.job_id, None)
        if spec is None:
            return result
        self._spoil_block(spec)
        return replace(result, success=False, transfer_size=None, transfer_time=None)

    def _spoil_block(self, spec: TransferSpec) -> None:
        if isinstance(spec.destination, GPULoadStoreSpec):
            blocks = spec.destination.block_ids
            position = {"first": 0, "middle": len(blocks) // 2, "last": -1}[FAULTS.spoil]
            for canonical in self._kv_caches.tensors:
                canonical.tensor[int(blocks[position])] = GARBAGE
