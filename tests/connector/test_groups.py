"""Which blocks a span of tokens touches, by kind of group."""

import pytest
from tests.connector.fakes import FakeSpec, make_config

from kvtier.config import GroupKind, KVGroup
from kvtier.connector.groups import BlockSpan, GroupLayout, make_group_layouts
from kvtier.connector.prefix_search import split_by_need

FULL = GroupLayout(0, device_block_tokens=4, block_size_factor=2, hashes_per_block=2, num_tail_tokens=None)
WINDOW = GroupLayout(1, device_block_tokens=4, block_size_factor=2, hashes_per_block=2, num_tail_tokens=9)


@pytest.mark.parametrize(
    ("first", "end", "span"),
    [
        (0, 16, BlockSpan(0, 4, 0, 2)),
        (4, 16, BlockSpan(1, 4, 0, 2)),
        (8, 16, BlockSpan(2, 4, 1, 2)),
        (0, 20, BlockSpan(0, 5, 0, 3)),
        (6, 8, BlockSpan(1, 2, 0, 1)),
    ],
)
def test_a_full_group_covers_everything_from_the_first_missing_token(
    first: int, end: int, span: BlockSpan
) -> None:
    assert FULL.span(first, end) == span


@pytest.mark.parametrize(
    ("first", "end", "span"),
    [(0, 32, BlockSpan(5, 8, 2, 4)), (28, 32, BlockSpan(7, 8, 3, 4)), (0, 8, BlockSpan(0, 2, 0, 1))],
)
def test_a_window_group_covers_its_window_and_enters_a_block_in_the_middle(
    first: int, end: int, span: BlockSpan
) -> None:
    assert WINDOW.span(first, end) == span


def test_a_window_of_one_token_needs_no_block_but_still_one_hit() -> None:
    layout = GroupLayout(0, 4, 1, 1, num_tail_tokens=0)

    assert layout.num_tail_blocks == 1
    assert layout.span(0, 8) == BlockSpan(2, 2, 2, 2)


def test_blocks_that_left_the_window_are_not_live() -> None:
    assert [WINDOW.first_live_block(num) for num in (0, 9, 12, 13, 17, 25)] == [0, 0, 0, 1, 1, 2]
    assert FULL.first_live_block(1000) == 0


def test_layouts_follow_the_kinds_of_the_groups() -> None:
    groups = (
        KVGroup(4, ("a",), 64),
        KVGroup(8, ("b",), 64, GroupKind.WINDOW, window_tokens=20),
        KVGroup(16, ("c",), 64, GroupKind.STATE),
    )

    layouts = make_group_layouts(FakeSpec(make_config(groups=groups)))

    assert [layout.num_tail_tokens for layout in layouts] == [None, 19, 16]
    assert [layout.num_tail_blocks for layout in layouts] == [None, 3, 1]
    assert [layout.hashes_per_block for layout in layouts] == [1, 2, 4]
    assert split_by_need(layouts) == (layouts[:1], layouts[1:], 16, layouts[0])


def test_of_a_state_only_the_block_of_the_last_token_is_live() -> None:
    (layout,) = make_group_layouts(FakeSpec(make_config(groups=(KVGroup(16, ("c",), 64, GroupKind.STATE),))))

    assert [layout.first_live_block(num) for num in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]
