"""What is remembered of a request."""

import logging
from typing import Any

import pytest
from tests.connector.fakes import FakeRequest, hash_tokens

from kvtier.base import make_offload_key
from kvtier.connector.groups import GroupLayout
from kvtier.connector.request_limits import RequestLimits, parse_request_limits
from kvtier.connector.request_state import make_request_state

NARROW = GroupLayout(0, 4, 1, 1, None)
WIDE = GroupLayout(1, 4, 2, 2, None)


@pytest.mark.parametrize(
    ("params", "limits"),
    [
        (None, RequestLimits()),
        ({}, RequestLimits()),
        ({"skip_load": True}, RequestLimits(max_load_tokens=0)),
        ({"skip_store": True, "max_load_tokens": 7}, RequestLimits(7, 0)),
        ({"skip_load": False, "max_store_tokens": 0}, RequestLimits(None, 0)),
    ],
)
def test_limits_are_read_from_the_clients_hints(params: dict[str, Any] | None, limits: RequestLimits) -> None:
    assert parse_request_limits(params) == limits


@pytest.mark.parametrize(("limit", "expected"), [(None, 9), (5, 5), (0, 0), (12, 9)])
def test_within_the_prompt_the_smaller_limit_counts_and_loads_are_not_touched(
    limit: int | None, expected: int
) -> None:
    assert RequestLimits(20, limit).within_prompt(9) == RequestLimits(20, expected)


@pytest.mark.parametrize("value", ["7", -1, True, 1.5, [1]])
def test_a_limit_that_makes_no_sense_is_said_and_ignored(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_request_limits({"max_load_tokens": value}) == RequestLimits()
    assert "max_load_tokens" in caplog.text


def nested(depth: int) -> list[Any]:  # Any: lists in lists
    """Return a list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "value", ["x" * 10**6, nested(5_000), -(10**5_000)], ids=["long", "nested", "thousands of digits"]
)
def test_a_limit_that_no_log_could_show_is_one_short_line_and_ends_nothing(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_request_limits({"max_store_tokens": value}) == RequestLimits()
    (line,) = (record.getMessage() for record in caplog.records)
    assert len(line) < 250


def test_keys_come_from_the_hash_at_the_end_of_each_offloaded_block_and_only_grow() -> None:
    request = FakeRequest("r", list(range(11)))
    state = make_request_state(request, 2)
    state.grow_keys([NARROW, WIDE])
    request.tokens += range(11, 17)
    state.grow_keys([NARROW, WIDE])

    hashes = hash_tokens(request.tokens)
    assert state.keys[0] == [make_offload_key(found, 0) for found in hashes]
    assert state.keys[1] == [make_offload_key(hashes[1], 1), make_offload_key(hashes[3], 1)]


def test_keys_of_several_groups_are_ordered_by_position() -> None:
    state = make_request_state(FakeRequest("r", list(range(16))), 2)
    state.grow_keys([NARROW, WIDE])
    narrow, wide = state.keys

    assert state.keys_by_position([NARROW, WIDE], 12) == [narrow[0], narrow[1], wide[0], narrow[2]]
    assert state.keys_by_position([NARROW], 12) == narrow[:3]


def test_the_context_carries_the_clients_hints() -> None:
    state = make_request_state(FakeRequest("r", [], {"skip_load": True}), 1)

    assert (state.context.req_id, state.context.kv_transfer_params) == ("r", {"skip_load": True})


def test_rejected_drafts_do_not_bring_back_what_left_a_window() -> None:
    state = make_request_state(FakeRequest("r", []), 1)
    state.blocks.append(None, 20)
    state.blocks.append(None, 17)

    assert (state.blocks.num_computed_tokens, state.blocks.num_freed_tokens) == (17, 20)


def test_blocks_computed_before_a_reset_are_stale_until_computed_from_the_first_token() -> None:
    state = make_request_state(FakeRequest("r", []), 1)
    state.blocks.replace([[1, 2]], 4)

    state.on_reset()
    assert state.blocks.is_stale
    state.blocks.replace([[3, 4]], 4)
    assert state.blocks.is_stale
    state.blocks.replace([[3, 4]], 0)
    assert not state.blocks.is_stale


def test_another_salt_makes_other_keys_of_the_same_tokens() -> None:
    request = FakeRequest("r", list(range(16)))
    plain, salted, other = (
        make_request_state(request, 1, key_salt=salt) for salt in (b"", b"adapter", b"other")
    )
    for state in (plain, salted, other):
        state.grow_keys([NARROW])

    assert len({*plain.keys[0], *salted.keys[0], *other.keys[0]}) == 3 * len(plain.keys[0])
    assert {len(key) for key in salted.keys[0]} == {len(key) for key in plain.keys[0]}
