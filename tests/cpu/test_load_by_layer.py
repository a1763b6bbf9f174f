"""Handlers copy one ref after the other; whoever waits for one finds its bytes while later ones are held back."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.base import CanonicalKVCaches, TransferJobId, TransferSpec
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.row_copy import RowCopier
from kvtier.cpu.row_handler import CPU_TO_GPU, RowHandler
from kvtier.cpu.row_layout import GroupMoves, plan_layout
from kvtier.cpu.transfer_queue import CopyThread
from kvtier.testing.examples import num_examples
from kvtier.testing.handler_suite import TWO_BLOCKS, CopyCase, GroupCase, copy_cases, expect_device

HANG_GUARD_S = 60
FIRST, SECOND = TransferJobId(1), TransferJobId(2)

THREE_LAYERS = CopyCase((GroupCase((64, 64, 32), 8, (2, 0, 3), 0, (1, 3, 0)),), 1, 4, 4)


class Gate:
    """A way to copy refs of which each waits until the test lets it through."""

    def __init__(self, copier: RowCopier, num_refs: int) -> None:
        self._copier = copier
        self._may_go = [threading.Event() for _ in range(num_refs)]
        self.broken_ref: int | None = None

    def load(self, moves: Sequence[GroupMoves], places: slice) -> None:
        """Copy some refs once they may."""
        assert self._may_go[places.start].wait(HANG_GUARD_S)
        if places.start == self.broken_ref:
            raise OSError("broken on purpose")
        self._copier.load(moves, places)

    def let_through(self, *refs: int) -> None:
        """Let copies of these refs begin."""
        for ref in refs:
            self._may_go[ref].set()

    def open(self) -> None:
        """Let every copy begin."""
        self.let_through(*range(len(self._may_go)))


class Bench:
    """A handler of loads behind a gate."""

    def __init__(self, case: CopyCase) -> None:
        self.case = case
        self.caches = case.make_caches("cpu")
        layout = plan_layout(self.caches, case.factor)
        self.rows = np.random.default_rng(1).integers(
            -128, 128, (case.num_slots, layout.part_bytes), dtype=np.int8
        )
        self.expected = expect_device(case, self.caches, self.rows)
        self.copier = RowCopier(layout, [cache.tensor.numpy() for cache in self.caches.tensors], self.rows)
        self.gate = Gate(self.copier, len(self.caches.tensors))
        self.handler = RowHandler(CPU_TO_GPU, layout, case.num_slots, CopyThread(CPU_TO_GPU))
        self.handler.attach(self.copier.load, self.gate.load)

    def begin(self, job_id: TransferJobId = FIRST) -> bool:
        """Start the case's load."""
        device, rows = self.case.specs()
        return self.handler.transfer_by_ref(job_id, TransferSpec(rows, device))

    def is_loaded(self, ref: int) -> bool:
        """Return whether a ref has the bytes it should have."""
        return np.array_equal(self.caches.tensors[ref].tensor.numpy(), self.expected[ref])

    def finished(self) -> list[tuple[int, bool]]:
        """Return id and success of what was reported."""
        return [(result.job_id, result.success) for result in self.handler.get_finished()]


@contextmanager
def bench_of(case: CopyCase) -> Iterator[Bench]:
    """Build a case's bench, and end it whatever happens."""
    bench = Bench(case)
    try:
        yield bench
    finally:
        bench.gate.open()
        bench.handler.shutdown()
        bench.copier.release()


@contextmanager
def on_a_thread(call: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Run a call that blocks beside the test; what is yielded returns its answer."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield partial(future.result, HANG_GUARD_S)


@given(case=copy_cases().filter(lambda case: len(case.groups) == 1), data=st.data())
@settings(max_examples=num_examples(60), deadline=None)
def test_the_bytes_of_a_layer_are_there_while_later_ones_are_held_back(
    case: CopyCase, data: st.DataObject
) -> None:
    with bench_of(case) as bench:
        num_refs = bench.handler.num_refs()
        ref = data.draw(st.integers(0, num_refs - 1))
        untouched = [cache.tensor.numpy().copy() for cache in bench.caches.tensors[ref + 1 :]]
        assert bench.begin()
        bench.gate.let_through(*range(ref + 1))

        assert bench.handler.wait_for_ref({FIRST}, ref)

        assert all(bench.is_loaded(index) for index in range(ref + 1))
        for cache, before in zip(bench.caches.tensors[ref + 1 :], untouched, strict=True):
            np.testing.assert_array_equal(cache.tensor.numpy(), before)
        bench.gate.open()
        bench.handler.wait({FIRST})
        assert all(bench.is_loaded(index) for index in range(num_refs))
        (result,) = bench.handler.get_finished()
        assert (result.success, result.transfer_size) == (True, case.num_bytes)


def test_waiting_for_a_layer_blocks_until_it_is_there() -> None:
    with bench_of(THREE_LAYERS) as bench:
        bench.begin()
        with on_a_thread(lambda: bench.handler.wait_for_ref({FIRST}, 1)) as answer:
            bench.gate.let_through(0)
            assert bench.handler.wait_for_ref({FIRST}, 0)
            assert not bench.is_loaded(1)
            bench.gate.let_through(1)

            assert answer()
        assert bench.is_loaded(1)
        assert bench.finished() == []


def test_a_layer_that_fails_is_told_to_whoever_waits_and_reported_once() -> None:
    with bench_of(THREE_LAYERS) as bench:
        bench.gate.broken_ref = 1
        bench.gate.open()
        bench.begin()
        bench.handler.wait({FIRST})

        assert not bench.handler.wait_for_ref({FIRST}, 0)
        assert not bench.handler.wait_for_ref({FIRST}, 2)
        assert bench.finished() == [(FIRST, False)]
        assert bench.finished() == []


def test_two_loads_are_waited_for_together() -> None:
    other = replace(THREE_LAYERS.groups[0], device_blocks=(1,), slots=(2,))
    with bench_of(THREE_LAYERS) as bench:
        device, rows = replace(THREE_LAYERS, groups=(other,)).specs()
        bench.begin(FIRST)
        assert bench.handler.transfer_by_ref(SECOND, TransferSpec(rows, device))
        with on_a_thread(lambda: bench.handler.wait_for_ref({FIRST, SECOND}, 0)) as answer:
            bench.gate.let_through(0)
            # The second begins when the first has ended.
            bench.gate.let_through(1, 2)

            assert answer()
        np.testing.assert_array_equal(bench.caches.tensors[0].tensor.numpy()[1, :64], bench.rows[2, :64])
        bench.handler.wait({FIRST, SECOND})
        assert bench.finished() == [(FIRST, True), (SECOND, True)]


def test_unknown_and_reported_jobs_are_not_waited_for() -> None:
    with bench_of(THREE_LAYERS) as bench:
        bench.gate.open()
        bench.begin()
        bench.handler.wait({FIRST})
        bench.finished()

        assert bench.handler.wait_for_ref({FIRST, TransferJobId(99)}, 2)


def test_a_shutdown_lets_the_begun_load_end_and_fails_the_queued_one() -> None:
    with bench_of(THREE_LAYERS) as bench:
        bench.begin(FIRST)
        bench.begin(SECOND)
        bench.gate.let_through(0)
        assert bench.handler.wait_for_ref({FIRST}, 0)
        with (
            on_a_thread(lambda: bench.handler.wait_for_ref({SECOND}, 0)) as answer,
            ThreadPoolExecutor(1) as pool,
        ):
            ending = pool.submit(bench.handler.shutdown)
            bench.gate.open()
            ending.result(HANG_GUARD_S)

            # It had not begun, or it had: told well only when its bytes are there.
            is_good = answer()
        finished = bench.finished()
        assert finished[0] == (FIRST, True)
        assert finished[1] == (SECOND, is_good)
        assert not bench.begin(TransferJobId(3))


def test_a_cache_with_several_groups_is_not_loaded_by_layer() -> None:
    group = TWO_BLOCKS.groups[0]
    case = replace(TWO_BLOCKS, groups=(group, replace(group, slots=(0, 2))))
    with bench_of(case) as bench:
        assert bench.handler.num_refs() == 0
        assert not bench.begin()
        assert bench.finished() == []


def test_handlers_load_by_layer_and_do_not_while_they_have_no_cache() -> None:
    caches: CanonicalKVCaches = THREE_LAYERS.make_caches("cpu")
    handlers = CpuGpuOffloadingHandlers(caches, 1, 4)
    try:
        handlers.rows.copy_(torch.arange(4).unsqueeze(1))
        device, rows = THREE_LAYERS.specs()
        loads = handlers.cpu_to_gpu_handler
        assert isinstance(loads, RowHandler)
        assert (loads.num_refs(), handlers.gpu_to_cpu_handler.num_refs()) == (3, 0)  # type: ignore[attr-defined]  # both are RowHandlers

        assert loads.transfer_by_ref(FIRST, TransferSpec(rows, device))
        assert loads.wait_for_ref({FIRST}, 2)
        np.testing.assert_array_equal(caches.tensors[2].tensor.numpy()[[2, 0, 3], 0], [1, 3, 0])

        handlers.detach()
        assert loads.num_refs() == 0
        assert not loads.transfer_by_ref(SECOND, TransferSpec(rows, device))
    finally:
        handlers.shutdown()


@pytest.mark.parametrize("part", [0, 1, 7])
def test_a_lane_without_the_job_has_nothing_to_wait_for(part: int) -> None:
    transfer_queue = CopyThread(CPU_TO_GPU)
    try:
        assert transfer_queue.wait_for_part({FIRST}, part)
    finally:
        transfer_queue.shutdown()
