"""A trace is served in blocks that are as long as a state, as engines make them."""

import pytest

from kvtier.errors import ConfigError
from kvtier.sim.states import merge_into_pages
from kvtier.sim.trace import TraceRequest, make_trace, merge_blocks

TRACE = make_trace(
    [
        TraceRequest(0.0, 70, 1, (1, 2, 3, 4, 5, 6, 7)),
        TraceRequest(1.0, 58, 1, (1, 2, 3, 4, 8, 9)),
        TraceRequest(2.0, 5, 1, (10,)),
    ],
    10,
)
KV = 8
"""Bytes of a token; a block has 80."""


def test_a_longer_block_has_the_id_of_its_last_part_and_a_partial_one_has_none() -> None:
    merged = merge_blocks(TRACE, 3)

    assert [one.hash_ids for one in merged.requests] == [(3, 6), (3,), ()]
    assert (merged.block_tokens, merged.num_accesses, merged.num_unique_blocks) == (30, 3, 2)
    assert [one.num_prompt_tokens for one in merged.requests] == [70, 58, 5]
    assert merge_blocks(TRACE, 1) is TRACE
    with pytest.raises(ConfigError, match="num_blocks=0"):
        merge_blocks(TRACE, 0)


@pytest.mark.parametrize(
    ("state_bytes", "interval", "block_tokens"),
    [
        (1, None, 10),
        (80, None, 10),
        (81, None, 20),
        (250, None, 40),
        (250, 120, 40),
        (250, 60, 60),
        (250, 100, 50),
        (250, 20, 20),
        (250, 10, 10),
        (250, 15, 10),
    ],
)
def test_a_block_is_as_long_as_a_state_and_divides_the_interval(
    state_bytes: int, interval: int | None, block_tokens: int
) -> None:
    assert merge_into_pages(TRACE, KV, state_bytes, interval).block_tokens == block_tokens
