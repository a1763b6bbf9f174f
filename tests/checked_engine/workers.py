"""The checked engine's workers: they carry out steps and check each byte before they compute with it.

Before a token is computed, each KV that it attends to must be what the oracle says: a function of the tokens
before it, of the group, of the weights, of the tenant and of the worker. A state-space group has one state in a block,
that after the block's last computed token.
"""

from collections.abc import Sequence

import numpy as np
from tests.checked_engine.blocks import CheckedGroup
from tests.checked_engine.memory import (
    GARBAGE,
    NULL_BLOCK,
    PAGE_CELLS,
    Cells,
    HostRows,
    SlowHandler,
    kv_of,
    next_token,
)
from tests.checked_engine.requests import Step, Work
from tests.connector.fakes import FakeSpec

from kvtier.base import CanonicalKVCaches, GPULoadStoreSpec, HandlerEntry, TransferJobId
from kvtier.config import GroupKind, OffloadingConfig
from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.common.step import end_step


class CheckedWorker:
    """One worker: device memory, both handlers, the worker half."""

    def __init__(
        self,
        rank: int,
        config: OffloadingConfig,
        rows: HostRows,
        num_device_blocks: int,
        spec: type[FakeSpec],
    ) -> None:
        self.rank = rank
        self.device = np.full((num_device_blocks, PAGE_CELLS), GARBAGE, dtype=np.int64)
        factor = config.block_size_factor
        busy: dict[TransferJobId, tuple[set[int], bool]] = {}
        self.broken_laws: list[str] = []
        self.loads = SlowHandler(self.device, rows.part(rank), factor, busy, self.broken_laws)
        self.stores = SlowHandler(self.device, rows.part(rank), factor, busy, self.broken_laws)
        entries = [
            HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self.loads),
            HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, self.stores),
        ]
        self.half = OffloadingConnectorWorker(spec(config, entries=entries), pause=lambda _: None)
        self.half.register_kv_caches(CanonicalKVCaches([], []))


def execute_step(
    step: Step,
    workers: Sequence[CheckedWorker],
    groups: Sequence[CheckedGroup],
    *,
    calls_preemption_hook: bool,
) -> None:
    """Carry out one step on every worker; its output is left in it."""
    step.report = OffloadingWorkerMetadata()
    for worker in workers:
        if calls_preemption_hook:
            worker.half.handle_preemptions(step.metadata)
        worker.half.start_kv_transfers(step.metadata)
    step.sampled = [_compute(work, step.weights, workers, groups) for work in step.works]
    for worker in workers:
        assert (worker.device[NULL_BLOCK] == GARBAGE).all(), "somebody has written to the null block"
        # An engine's step without tokens has nothing to store and skips this.
        assert step.works or not step.metadata.store_jobs
        loads, report = end_step(worker.half, step.metadata)
        assert not worker.stores.begun & step.metadata.store_jobs.keys(), "a store begins in its own step"
        step.ended_loads += [(worker.rank, req_id, failed) for req_id, failed in loads.items()]
        step.report = step.report.aggregate(report)


def _compute(
    work: Work, weights: int, workers: Sequence[CheckedWorker], groups: Sequence[CheckedGroup]
) -> list[int]:
    """Compute a request's tokens on every worker and return what was sampled."""
    run, tenant = work.run, work.request.tenant.name
    first = run.num_computed
    tokens = run.tokens[: first + work.num_tokens - len(work.drafts)]
    num_accepted, is_accepting = 0, True
    for is_right in work.drafts:
        tokens.append(next_token(tokens) + (not is_right))
        is_accepting &= is_right
        num_accepted += is_accepting
    end = first + work.num_tokens - len(work.drafts) + num_accepted
    all_weights = run.weights + [weights] * work.num_tokens
    for worker in workers:
        for idx, (group, table) in enumerate(zip(groups, work.tables, strict=True)):
            _check_context(worker, work, idx, group)
            values = expected_kv(tokens, idx, all_weights, worker.rank, tenant)
            if group.kind is GroupKind.STATE:
                _write_states(worker.device, table, group.block_tokens, values, first, end)
            else:
                for position in range(first, first + work.num_tokens):
                    block, cell = divmod(position, group.block_tokens)
                    worker.device[table[block], cell] = values[position]
    run.weights = all_weights[:end]
    if not work.is_sampling:
        return []
    sampled = [*tokens[end - num_accepted : end], next_token(tokens[:end])]
    run.tokens = run.tokens[: end - num_accepted] + sampled
    return sampled


def _write_states(
    device: Cells, table: list[int], block_tokens: int, values: list[int], first: int, end: int
) -> None:
    """Leave a state in each block that was entered; what drafts left in later blocks is wrong if they were."""
    for position in range(first, len(values)):
        is_last_of_block = (position + 1) % block_tokens == 0
        if is_last_of_block or position == end - 1:
            device[table[position // block_tokens], 0] = values[position]
    device[table[(end - 1) // block_tokens], 0] = values[end - 1]


def _check_context(worker: CheckedWorker, work: Work, idx: int, group: CheckedGroup) -> None:
    """Compare what the first token of the step attends to with the oracle."""
    run, table = work.run, work.tables[idx]
    first = run.num_computed
    if first == 0:
        return
    expected = expected_kv(run.tokens[:first], idx, run.weights, worker.rank, work.request.tenant.name)
    if group.kind is GroupKind.STATE:
        oldest = first - 1
        found = [int(worker.device[table[oldest // group.block_tokens], 0])]
    else:
        oldest = 0 if group.window is None else max(0, first - group.window + 1)
        found = worker.device[table, : group.block_tokens].reshape(-1)[oldest:first].tolist()
    pairs = zip(found, expected[oldest:], strict=True)
    wrong = [oldest + n for n, (is_there, should_be) in enumerate(pairs) if is_there != should_be]
    assert not wrong, (
        f"worker {worker.rank}, request {work.request.request_id}, group {idx}: wrong bytes at {wrong}"
    )


def expected_kv(
    tokens: Sequence[int], group: int, weights: Sequence[int], rank: int, tenant: str
) -> list[int]:
    """Return what the oracle says of each token.

    Args:
        tokens: from the request's first on.
        group: the KV group.
        weights: for each token the weights that computed it.
        rank: the worker.
        tenant: whose tokens they are.
    """
    by_weights = {each: kv_of(tuple(tokens), group, each, tenant) for each in set(weights)}
    return [by_weights[each][position] + rank for position, each in enumerate(weights[: len(tokens)])]


def expect_stores(step: Step, workers: Sequence[CheckedWorker], groups: Sequence[CheckedGroup]) -> None:
    """Tell the handlers what the device blocks of a step's stores must hold whenever they are read."""
    runs = {work.request.request_id: work for work in step.works}
    for job_id, job in step.metadata.store_jobs.items():
        work, source = runs[job.req_id], job.transfer_spec.source
        assert isinstance(source, GPULoadStoreSpec)
        tokens = work.request.tokens
        weights = (work.run.weights + [step.weights] * len(tokens))[: len(tokens)]
        block_ids = source.block_ids.tolist()
        for worker in workers:
            expected: list[list[int]] = []
            for idx, group in enumerate(groups):
                values = expected_kv(tokens, idx, weights, worker.rank, work.request.tenant.name)
                first = sum(source.group_sizes[:idx])
                for block_id in block_ids[first : first + source.group_sizes[idx]]:
                    end = (work.tables[idx].index(block_id) + 1) * group.block_tokens
                    first_cell = end - 1 if group.kind is GroupKind.STATE else end - group.block_tokens
                    expected.append(values[first_cell:end])
            worker.stores.expected[job_id] = expected
