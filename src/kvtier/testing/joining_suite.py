"""The contract of handlers that copy small transfers of many requests with one call, as a suite of tests to inherit.

Several random transfers, some of them in the middle of a block or bad, go in with one call; what they move is compared
byte by byte with what each would move alone::

    class TestMyHandlers(JoiningHandlerSuite):
        def make_handlers(self, kv_caches, block_size_factor, num_cpu_blocks):
            return MyHandlers(kv_caches, block_size_factor, num_cpu_blocks)
"""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier.base import (
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.testing.examples import num_examples
from kvtier.testing.handler_suite import (
    CopyCase,
    GroupCase,
    HandlerSuite,
    expect_device,
    expect_rows,
)


@st.composite
def several_copy_cases(draw: st.DrawFn) -> list[CopyCase]:
    """Draw transfers of one cache that share neither device blocks nor slots."""
    factor, num_groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = st.lists(st.sampled_from((1, 8, 48, 4096)), min_size=1, max_size=2)
    geometry = [(tuple(draw(sizes)), draw(st.integers(0, 9))) for _ in range(num_groups)]
    # First index and number of device blocks of each group; most transfers are of whole blocks.
    whole = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda pair: (pair[0] * factor, pair[1] * factor)
    )
    any_part = st.tuples(st.integers(0, 9), st.integers(0, 3 * factor))
    wholes, any_parts = (
        st.lists(part, min_size=num_groups, max_size=num_groups) for part in (whole, any_part)
    )
    parts = st.lists(st.one_of(wholes, wholes, any_parts), min_size=2, max_size=6)
    drawn = draw(parts)
    num_blocks = sum(size for groups in drawn for _, size in groups)
    num_slots = sum(
        -(-(index % factor + size) // factor) for groups in drawn for index, size in groups if size
    )
    blocks = iter(draw(st.permutations(range(num_blocks))))
    slots = iter(draw(st.permutations(range(num_slots))))
    cases: list[CopyCase] = []
    for groups in drawn:
        group_cases: list[GroupCase] = []
        for (index, size), (page_sizes, padding) in zip(groups, geometry, strict=True):
            num_own_slots = -(-(index % factor + size) // factor) if size else 0
            own_blocks = tuple(next(blocks) for _ in range(size))
            own_slots = tuple(next(slots) for _ in range(num_own_slots))
            group_cases.append(GroupCase(page_sizes, padding, own_blocks, index, own_slots))
        cases.append(CopyCase(tuple(group_cases), factor, num_blocks + 1, num_slots + 1))
    return cases


def make_pairs(num_cases: int) -> list[CopyCase]:
    """Return transfers of two whole blocks each."""
    return [
        CopyCase(
            (GroupCase((64, 32), 8, (2 * number, 2 * number + 1), 0, (2 * number + 1, 2 * number)),),
            1,
            2 * num_cases + 1,
            2 * num_cases + 1,
        )
        for number in range(num_cases)
    ]


TWO_GROUPS = [
    CopyCase((GroupCase((8, 3), 1, first, 2, slots), GroupCase((16,), 0, second, 0, more_slots)), 2, 12, 8)
    for first, slots, second, more_slots in (
        ((4, 1), (2,), (0, 7, 3, 2), (0, 5)),
        ((), (), (10, 11), (7,)),
        ((5, 6, 9, 8), (1, 6), (), ()),
    )
]
"""A plain case: three transfers of two groups of whole blocks, two device blocks each."""


class JoiningHandlerSuite(HandlerSuite):
    """The contract of a pair of joining handlers, beside that of any. Inherit it and implement make_handlers."""

    @given(cases=several_copy_cases())
    @example(cases=TWO_GROUPS)
    @settings(
        max_examples=num_examples(40), deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    def test_joined_stores_write_what_each_writes_alone(self, cases: list[CopyCase]) -> None:
        with self.open(cases[0]) as (handlers, caches):
            handlers.rows.fill_(7)
            expected = handlers.rows.numpy().copy()
            for case in cases:
                expected = expect_rows(case, caches, expected)

            results = transfer_joined(handlers.gpu_to_cpu_handler, [_as_store(case) for case in cases])

            np.testing.assert_array_equal(handlers.rows.numpy(), expected)
            assert_all_succeeded(results, cases)

    @given(cases=several_copy_cases())
    @example(cases=TWO_GROUPS)
    @settings(
        max_examples=num_examples(40), deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    def test_joined_loads_write_what_each_writes_alone(self, cases: list[CopyCase]) -> None:
        with self.open(cases[0]) as (handlers, caches):
            random = np.random.default_rng(1)
            rows = random.integers(-128, 128, tuple(handlers.rows.shape), dtype=np.int8)
            handlers.rows.copy_(torch.from_numpy(rows))
            written = [expect_device(case, caches, rows) for case in cases]
            expected = [cache.tensor.cpu().numpy().copy() for cache in caches.tensors]
            for case, tensors in zip(cases, written, strict=True):
                for tensor, block, _, _, _ in case.pieces():
                    expected[tensor][block] = tensors[tensor][block]

            results = transfer_joined(handlers.cpu_to_gpu_handler, [_as_load(case) for case in cases])

            for cache, wanted in zip(caches.tensors, expected, strict=True):
                np.testing.assert_array_equal(cache.tensor.cpu().numpy(), wanted)
            assert_all_succeeded(results, cases)

    def test_a_bad_transfer_is_declined_and_costs_no_other(self) -> None:
        cases = make_pairs(4)
        with self.open(cases[0]) as (handlers, caches):
            handlers.rows.fill_(7)
            specs = [_as_store(case) for case in cases]
            device, rows = specs[1]
            assert isinstance(device, GPULoadStoreSpec)
            for bad in (
                TransferSpec(device, CPULoadStoreSpec([3])),
                TransferSpec(device, CPULoadStoreSpec([3, 2, 8])),
                TransferSpec(device, CPULoadStoreSpec([3, 99])),
                TransferSpec(GPULoadStoreSpec([2, -1], [2], [0]), rows),
                TransferSpec(GPULoadStoreSpec([2, 3], [1, 1], [0, 0]), rows),
                TransferSpec(GPULoadStoreSpec([2, 3], [2], [-1]), rows),
                TransferSpec(rows, device),
            ):
                expected = handlers.rows.numpy().copy()
                for case in (cases[0], *cases[2:]):
                    expected = expect_rows(case, caches, expected)

                results = transfer_joined(handlers.gpu_to_cpu_handler, [specs[0], bad, *specs[2:]])

                assert [(result.job_id, result.success) for result in results] == [
                    (0, True),
                    (2, True),
                    (3, True),
                ]
                np.testing.assert_array_equal(handlers.rows.numpy(), expected)

    def test_what_one_lacks_and_another_has_too_much_is_not_shared_out(self) -> None:
        cases = make_pairs(3)
        with self.open(cases[0]) as (handlers, _):
            handlers.rows.fill_(7)
            specs = [_as_store(case) for case in cases]
            short = TransferSpec(specs[0].source, CPULoadStoreSpec([1]))
            long = TransferSpec(specs[1].source, CPULoadStoreSpec([0, 3, 2]))

            results = transfer_joined(handlers.gpu_to_cpu_handler, [short, long, specs[2]])

            assert [result.job_id for result in results] == [2]
            assert bool((handlers.rows[:4] == 7).all())

    def test_a_transfer_that_enters_a_block_in_its_middle_needs_a_slot_more(self) -> None:
        with self.open(TWO_GROUPS[0]) as (handlers, _):
            handlers.rows.fill_(7)
            bad = TransferSpec(GPULoadStoreSpec([4, 1], [2, 0], [1, 0]), CPULoadStoreSpec([2]))
            good = [_as_store(case) for case in TWO_GROUPS[1:]]

            results = transfer_joined(handlers.gpu_to_cpu_handler, [bad, *good])

            assert [result.job_id for result in results] == [1, 2]
            assert bool((handlers.rows[2] == 7).all())

    def test_of_two_transfers_to_the_same_place_the_later_one_stays(self) -> None:
        cases = make_pairs(3)
        with self.open(cases[0]) as (handlers, caches):
            expected = handlers.rows.numpy().copy()
            slots = CPULoadStoreSpec([0, 1])
            specs = [TransferSpec(_as_store(case).source, slots) for case in cases]
            for case in cases:
                expected = expect_rows(_with_slots(case, (0, 1)), caches, expected)

            results = transfer_joined(handlers.gpu_to_cpu_handler, specs)

            assert [result.success for result in results] == [True] * 3
            np.testing.assert_array_equal(handlers.rows.numpy(), expected)

    def test_shutdown_reports_what_was_joined_once_and_declines_what_comes_later(self) -> None:
        cases = make_pairs(3)
        with self.open(cases[0]) as (handlers, _):
            specs = {TransferJobId(number): _as_store(case) for number, case in enumerate(cases)}
            handler = handlers.gpu_to_cpu_handler
            assert handler.transfer_joined(specs) == set(specs)
            handlers.shutdown()

            assert handler.transfer_joined(specs) == set()
            assert [result.job_id for result in handler.get_finished()] == list(specs)


def transfer_joined(handler: OffloadingHandler, specs: Sequence[TransferSpec]) -> list[TransferResult]:
    """Transfer with one call, under the ids from 0 on, and return what is reported; each is reported once."""
    started = handler.transfer_joined({TransferJobId(number): spec for number, spec in enumerate(specs)})
    handler.wait(started)
    results = handler.get_finished()
    assert [result.job_id for result in results] == sorted(started)
    assert handler.get_finished() == []
    return results


def assert_all_succeeded(results: Sequence[TransferResult], cases: Sequence[CopyCase]) -> None:
    """Assert that each transfer has succeeded with its own bytes."""
    assert [(result.success, result.transfer_size) for result in results] == [
        (True, case.num_bytes) for case in cases
    ]


def _as_store(case: CopyCase) -> TransferSpec:
    return TransferSpec(*case.specs())


def _as_load(case: CopyCase) -> TransferSpec:
    device, rows = case.specs()
    return TransferSpec(rows, device)


def _with_slots(case: CopyCase, slots: tuple[int, ...]) -> CopyCase:
    (group,) = case.groups
    moved = GroupCase(group.page_sizes, group.padding, group.device_blocks, group.first_index, slots)
    return CopyCase((moved,), case.factor, case.num_device_blocks, case.num_slots)
