"""Blocks get their headers ahead of their writes, as far ahead as was asked for, and are written in their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.kit.disk import CHECKSUM_AHEAD_BYTES, checksum_ahead, plan_num_checksums_ahead


@given(num_blocks=st.integers(0, 20), num_ahead=st.integers(0, 8))
def test_each_block_comes_in_order_with_the_headers_of_so_many_after_it(
    num_blocks: int, num_ahead: int
) -> None:
    prepared: list[int] = []

    def add_header(block: int) -> str:
        prepared.append(block)
        return f"block {block} with header"

    written = checksum_ahead(range(num_blocks), add_header, num_ahead)
    for block in range(num_blocks):
        assert next(written) == f"block {block} with header"
        assert prepared == list(range(min(block + num_ahead + 1, num_blocks)))
    assert list(written) == []


def test_a_caller_that_stops_writing_computes_no_more_headers() -> None:
    prepared: list[int] = []
    for _ in checksum_ahead(range(10), prepared.append, num_ahead=2):
        break
    assert prepared == [0, 1, 2]


@pytest.mark.parametrize(
    ("block_bytes", "expected"),
    [
        (4096, CHECKSUM_AHEAD_BYTES // 4096),
        (CHECKSUM_AHEAD_BYTES // 4, 4),
        (CHECKSUM_AHEAD_BYTES, 1),
        (CHECKSUM_AHEAD_BYTES + 4096, 1),
        (2 * CHECKSUM_AHEAD_BYTES, 1),
        (2 * CHECKSUM_AHEAD_BYTES + 4096, 0),
        (16 * CHECKSUM_AHEAD_BYTES, 0),
    ],
)
def test_as_many_blocks_as_push_one_out_of_a_cache_are_sealed_ahead(block_bytes: int, expected: int) -> None:
    assert plan_num_checksums_ahead(block_bytes, has_direct_io=True) == expected


def test_what_the_core_copies_is_sealed_right_before() -> None:
    assert plan_num_checksums_ahead(4096, has_direct_io=False) == 0
