"""Blocks are sealed ahead of their writes, as far as was asked for and no further, and written in their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.kit.disk import CHECKSUM_AHEAD_BYTES, checksum_ahead, plan_num_checksums_ahead


@given(num_blocks=st.integers(0, 20), num_ahead=st.integers(0, 8))
def test_each_block_comes_in_order_with_so_many_sealed_after_it(num_blocks: int, num_ahead: int) -> None:
    sealed: list[int] = []

    def seal(block: int) -> str:
        sealed.append(block)
        return f"sealed {block}"

    written = checksum_ahead(range(num_blocks), seal, num_ahead)
    for block in range(num_blocks):
        assert next(written) == f"sealed {block}"
        assert sealed == list(range(min(block + num_ahead + 1, num_blocks)))
    assert list(written) == []


def test_whoever_stops_writing_seals_no_more() -> None:
    sealed: list[int] = []
    for _ in checksum_ahead(range(10), sealed.append, num_ahead=2):
        break
    assert sealed == [0, 1, 2]


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
