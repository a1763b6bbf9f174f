"""Every way to copy moves the same bytes, whole transfers and single refs; on CPU tensors a launch is the copy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.cpu.cuda.fakes import FakeBindings, PlainKernel, interpreted_kernel

from kvtier.base import CanonicalKVCaches
from kvtier.cpu.cuda.copy_methods import BatchLauncher, KernelLauncher, RunLauncher, StagedCopier
from kvtier.cpu.cuda.span_copier import Build, DeviceCopier, Memories, SpanCopier, SpanLauncher
from kvtier.cpu.row_layout import GroupMoves, plan_layout, plan_moves
from kvtier.testing.examples import num_examples
from kvtier.testing.handler_suite import CopyCase, GroupCase, copy_cases, expect_device, expect_rows

ROW_GAP_BYTES = 5
"""Rows of a region stand apart: other workers' parts lie between."""


def spans_with(make_launcher: Callable[[Memories], SpanLauncher]) -> Build:
    """Return how a copier of spans is built."""
    return lambda layout, pages, rows, chunk: SpanCopier(layout, pages, rows, chunk, make_launcher)


BUILDS: dict[str, Callable[[], Build]] = {
    "runs": lambda: spans_with(RunLauncher),
    "batch": lambda: spans_with(lambda memories: BatchLauncher(memories, FakeBindings(), lambda: 7)),
    "kernel": lambda: spans_with(lambda memories: KernelLauncher(memories, PlainKernel())),
    "staged": lambda: lambda layout, pages, rows, _: StagedCopier(layout, pages, rows, 2 * layout.part_bytes),
}


def build_interpreted() -> Build:
    """Return how a copier with the kernel's source is built, or skip the test."""
    kernel = interpreted_kernel()
    return spans_with(lambda memories: KernelLauncher(memories, kernel))


BUILDS["interpreted"] = build_interpreted
TWO_REFS = CopyCase((GroupCase((16, 24), 0, (2,), 0, (1,)),), 1, 4, 3)
NUM_EXAMPLES = {"interpreted": 10}


class Scene:
    """A case's cache, rows with gaps, and a copier between them."""

    def __init__(self, case: CopyCase, build: Build) -> None:
        self.case = case
        self.caches: CanonicalKVCaches = case.make_caches("cpu")
        layout = plan_layout(self.caches, case.factor)
        self.whole_rows = torch.full((case.num_slots, layout.part_bytes + ROW_GAP_BYTES), 7, dtype=torch.int8)
        self.rows = self.whole_rows[:, : layout.part_bytes]
        pages = [cache.tensor for cache in self.caches.tensors]
        self.copier: DeviceCopier = build(layout, pages, self.rows, 2)
        self.moves: list[GroupMoves] = plan_moves(layout, *case.specs(), case.num_slots)

    def check_store(self, store: Callable[[], None]) -> None:
        expected = expect_rows(self.case, self.caches, self.rows.numpy())
        store()
        np.testing.assert_array_equal(self.rows.numpy(), expected)
        assert bool((self.whole_rows[:, self.rows.shape[1] :] == 7).all())

    def check_load(self, load: Callable[[], None]) -> None:
        random = np.random.default_rng(1).integers(-128, 128, tuple(self.rows.shape), dtype=np.int8)
        self.rows.copy_(torch.from_numpy(random))
        expected = expect_device(self.case, self.caches, random)
        load()
        for cache, wanted in zip(self.caches.tensors, expected, strict=True):
            np.testing.assert_array_equal(cache.tensor.numpy(), wanted)
        np.testing.assert_array_equal(self.rows.numpy(), random)


@pytest.mark.hypothesis  # of the test inside, which the plugin does not see
@pytest.mark.parametrize("name", BUILDS)
def test_a_transfer_moves_its_bytes_and_no_others(name: str) -> None:
    build = BUILDS[name]()

    @given(case=copy_cases())
    @settings(
        max_examples=num_examples(NUM_EXAMPLES.get(name, 60)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: CopyCase) -> None:
        scene = Scene(case, build)
        scene.check_store(lambda: scene.copier.store(scene.moves))
        scene.check_load(lambda: scene.copier.load(scene.moves))

    check()


@pytest.mark.parametrize("name", BUILDS)
def test_a_released_copier_holds_no_memory(name: str) -> None:
    scene = Scene(TWO_REFS, BUILDS[name]())
    pointers = {cache.tensor.data_ptr() for cache in scene.caches.tensors} | {scene.rows.data_ptr()}

    scene.copier.release()
    scene.copier.release()

    held = [value for value in vars(scene.copier).values() if isinstance(value, torch.Tensor)]
    assert not pointers & {tensor.data_ptr() for tensor in held if tensor.numel()}
