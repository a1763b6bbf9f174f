"""An engine without a model: both halves of the connector, a device pool in host memory, and requests that only load.

It does what a real engine does with the connector, in the same order, and computes nothing: what is left is the time
of the connector, the manager, the tiers and the copies.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.engine.steps import BenchBlocks, BenchRequest
from benchmarks.harness.tier_jobs import make_keys
from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, ReqContext
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.engines.common.step import NewRequest, StepOutput, WorkerOutput
from kvtier.errors import KVTierError
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec

BLOCK_TOKENS = 16
NUM_LAYERS = 4
MAX_STEPS = 1_000_000
FIRST_FILLER = 2**40
"""Numbers from here on name blocks that nothing asks for."""

DRAIN_S = 60.0


class BurstEngine:
    """Stores and loads the prompts of requests that all arrive in one step.

    Args:
        block_bytes: length of a block, a multiple of 4096.
        num_blocks: slots of host memory, and blocks of the device.
        tiers: the entries of ``secondary_tiers``.
        name: of the engine, unique in this process.

    Attributes:
        manager: the tiers.
        layers: the device's bytes by layer, each shape (num_blocks, block_bytes / NUM_LAYERS), int8.
    """

    def __init__(
        self, block_bytes: int, num_blocks: int, tiers: Sequence[Mapping[str, Any]], name: str
    ) -> None:
        layers = tuple(f"layer.{number}" for number in range(NUM_LAYERS))
        config = OffloadingConfig(
            f"burst-{os.getpid()}-{name}",
            ModelIdentity("bench"),
            (KVGroup(BLOCK_TOKENS, layers, block_bytes),),
            BLOCK_TOKENS,
            extra_config={
                "cpu_bytes_to_use": num_blocks * block_bytes,
                # A real host memory is far larger than a burst, and so is the eighth of it that stores may hold.
                "secondary_tiers": [
                    {"max_in_flight_store_bytes": num_blocks * block_bytes, **tier} for tier in tiers
                ],
            },
        )
        self._num_blocks = num_blocks
        self._specs = (
            TieringOffloadingSpec(dataclasses.replace(config, rank=0)),
            TieringOffloadingSpec(config),
        )
        self.layers = [torch.zeros((num_blocks, block_bytes // NUM_LAYERS), dtype=torch.int8) for _ in layers]
        page_bytes = block_bytes // NUM_LAYERS
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(layer, page_bytes) for layer in self.layers],
            [[CanonicalKVCacheRef(number, page_bytes) for number in range(NUM_LAYERS)]],
        )
        self._scheduler = OffloadingConnectorScheduler(self._specs[1])
        manager = self._scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        self._worker = OffloadingConnectorWorker(self._specs[0])
        self._worker.register_kv_caches(caches)
        self._fillers = count()
        self._step(StepOutput())  # both halves compare their regions

    def store(self, requests: Sequence[BenchRequest]) -> None:
        """Compute all requests in one step and store them; returns when every tier has them."""
        tables = self._allocate(requests)
        for request in requests:
            while (found := self._scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
                self._step(StepOutput())
            if found:
                raise KVTierError(f"{request.request_id}: {found} tokens are held already")
            self._scheduler.update_state_after_alloc(request, tables[request.request_id], 0)
        new = [
            NewRequest(request.request_id, tables[request.request_id].get_block_ids(), 0)
            for request in requests
        ]
        scheduled = {request.request_id: request.num_tokens for request in requests}
        self._step(StepOutput(new, num_scheduled_tokens=scheduled))
        self._finish(requests)
        while self._scheduler.has_open_stores():
            self._step(StepOutput())
        if not self.manager.drain(DRAIN_S).has_ended:
            raise KVTierError("a tier hangs")

    def load(self, requests: Sequence[BenchRequest]) -> None:
        """Search all requests in one step and load what is held of them; returns when every load has ended."""
        tables = self._allocate(requests)
        waiting = list(requests)
        loading: set[str] = set()
        for _ in range(MAX_STEPS):
            still: list[BenchRequest] = []
            for request in waiting:
                num_tokens, _ = self._scheduler.get_num_new_matched_tokens(request, 0)
                if num_tokens is None:
                    still.append(request)
                    continue
                if num_tokens != request.num_tokens - 1:
                    raise KVTierError(f"{request.request_id}: {num_tokens} tokens are held, not all")
                self._scheduler.update_state_after_alloc(request, tables[request.request_id], num_tokens)
                loading.add(request.request_id)
            waiting = still
            loading -= self._step(StepOutput())
            if not (waiting or loading):
                break
        self._finish(requests)

    def clear_host(self) -> None:
        """Evict every block from host memory; the tiers keep theirs."""
        context = ReqContext("filler")
        generation = next(self._fillers)
        filler = make_keys(self._num_blocks, FIRST_FILLER + generation)
        if self.manager.prepare_store(filler, context) is None:
            raise KVTierError("something is pinned in host memory")
        self.manager.complete_store(filler, context, success=False)
        self.manager.request_finished(context)
        self._step(StepOutput())

    def pages_of(self, requests: Sequence[BenchRequest]) -> npt.NDArray[np.int8]:
        """Return the device's bytes of all requests, in order, shape (blocks, block_bytes)."""
        num_blocks = sum(len(request.block_hashes) for request in requests)
        return np.concatenate([layer.numpy()[:num_blocks] for layer in self.layers], axis=1)

    def shutdown(self) -> None:
        """End both halves."""
        self._worker.shutdown()
        self._scheduler.shutdown()
        for spec in self._specs:
            spec.shutdown()

    def _allocate(self, requests: Sequence[BenchRequest]) -> dict[str, BenchBlocks]:
        tables: dict[str, BenchBlocks] = {}
        first = 0
        for request in requests:
            end = first + len(request.block_hashes)
            tables[request.request_id] = BenchBlocks(list(range(first, end)))
            first = end
        return tables

    def _finish(self, requests: Sequence[BenchRequest]) -> None:
        for request in requests:
            self._scheduler.request_finished(request)

    def _step(self, output: StepOutput) -> set[str]:
        metadata = self._scheduler.build_connector_meta(output)
        self._worker.start_kv_transfers(metadata)
        self._worker.prepare_store_kv(metadata)
        _, loaded = self._worker.get_finished(())
        if self._worker.take_failed_loads():
            raise KVTierError("a load has failed")
        self._scheduler.update_connector_output(WorkerOutput(self._worker.build_connector_worker_meta()))
        return loaded


def make_requests(num_requests: int, num_blocks: int, generation: int) -> list[BenchRequest]:
    """Return requests with distinct prompts of that many blocks each, and one token more. Pure."""
    seed = generation.to_bytes(8, "big")
    return [
        BenchRequest(
            f"request-{generation}-{number}",
            num_blocks * BLOCK_TOKENS + 1,
            [seed + number.to_bytes(12, "big") + block.to_bytes(12, "big") for block in range(num_blocks)],
        )
        for number in range(num_requests)
    ]
