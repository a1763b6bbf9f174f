"""What is storable, and how it is offered."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connector.fakes import FakeRequest

from kvtier.base import OffloadKey, PrepareStoreOutput, ReqContext
from kvtier.connector.groups import GroupLayout
from kvtier.connector.planning import (
    PinnedBlock,
    StorePlan,
    find_computed,
    list_storable_blocks,
    offer_blocks,
)
from kvtier.connector.request_state import KeptState, RequestState, make_request_state
from kvtier.cpu.common import CPULoadStoreSpec

FULL = GroupLayout(0, 4, 1, 1, None)
PAIRS = GroupLayout(0, 4, 2, 2, None)
STATE = GroupLayout(1, 4, 1, 1, num_tail_tokens=4, num_live_tokens=1, is_state=True)
WINDOW = GroupLayout(1, 4, 1, 1, num_tail_tokens=7)


class Room:
    """A manager's prepare_store that has room for so many blocks, and refuses what does not fit whole."""

    def __init__(self, num_blocks: int, held: Collection[OffloadKey] = ()) -> None:
        self.num_blocks = num_blocks
        self.held = set(held)
        self.num_calls = 0

    def prepare_store(self, keys: list[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve, or refuse."""
        self.num_calls += 1
        missing = [key for key in keys if key not in self.held]
        if len(missing) > self.num_blocks:
            return None
        slots = [len(self.held) + position for position in range(len(missing))]
        self.num_blocks -= len(missing)
        self.held.update(missing)
        return PrepareStoreOutput(missing, CPULoadStoreSpec(slots), [])


def running(
    num_tokens: int,
    num_computed_tokens: int,
    *tables: list[int],
    params: dict[str, int] | None = None,
    num_prompt_tokens: int | None = None,
) -> RequestState:
    """Return a running request; with ``num_prompt_tokens`` nothing beyond those is stored."""
    request = FakeRequest("r", list(range(num_tokens)), params)
    request.num_prompt_tokens = num_prompt_tokens or num_tokens
    state = make_request_state(request, len(tables), is_prompt_only=num_prompt_tokens is not None)
    state.blocks.replace(tables, num_computed_tokens)
    return state


def blocks_of(layouts: list[GroupLayout], state: RequestState, num_scheduled: int) -> list[tuple[int, int]]:
    """Return (group, block) of what is storable."""
    return [(found.group_idx, found.block) for found in list_storable_blocks(layouts, state, num_scheduled)]


@pytest.mark.parametrize(
    ("num_computed", "num_scheduled", "num_blocks"), [(0, 3, 0), (0, 4, 1), (4, 7, 2), (8, 4, 3), (0, 99, 3)]
)
def test_only_full_blocks_of_computed_tokens_are_storable(
    num_computed: int, num_scheduled: int, num_blocks: int
) -> None:
    state = running(14, num_computed, [1, 2, 3, 4])

    assert blocks_of([FULL], state, num_scheduled) == [(0, block) for block in range(num_blocks)]


def test_drafts_are_not_confirmed_and_make_no_block_storable() -> None:
    state = running(7, 6, [1, 2, 3])

    assert blocks_of([FULL], state, num_scheduled=5) == [(0, 0)]


def test_an_offloaded_block_needs_all_its_device_blocks() -> None:
    assert blocks_of([PAIRS], running(32, 0, [1, 2, 3]), 32) == [(0, 0)]


def test_the_clients_limit_ends_what_is_storable() -> None:
    state = running(16, 0, [1, 2, 3, 4], params={"max_store_tokens": 9})

    assert blocks_of([FULL], state, 16) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(("num_prompt_tokens", "num_blocks"), [(3, 0), (7, 1), (8, 2), (99, 4)])
def test_prompt_only_a_block_with_one_generated_token_is_not_storable(
    num_prompt_tokens: int, num_blocks: int
) -> None:
    state = running(16, 0, [1, 2, 3, 4], num_prompt_tokens=num_prompt_tokens)

    assert blocks_of([FULL], state, 16) == [(0, block) for block in range(num_blocks)]


def test_of_the_prompt_and_the_clients_limit_the_smaller_ends_what_is_storable() -> None:
    short = running(16, 0, [1, 2, 3, 4], params={"max_store_tokens": 5}, num_prompt_tokens=12)
    long = running(16, 0, [1, 2, 3, 4], params={"max_store_tokens": 13}, num_prompt_tokens=8)

    assert [len(blocks_of([FULL], state, 16)) for state in (short, long)] == [1, 2]


def test_prompt_only_what_was_generated_before_a_pre_emption_is_no_prompt_after_it() -> None:
    state = running(16, 0, [1, 2], num_prompt_tokens=8)
    state.blocks.drop()
    state.blocks.replace([[5, 6, 7, 8]], 0)

    assert blocks_of([FULL], state, 16) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(("num_prompt_tokens", "may_fill"), [(7, False), (8, True)])
def test_a_request_is_planned_for_until_no_further_block_can_be_within_its_limit(
    num_prompt_tokens: int, may_fill: bool
) -> None:
    state = running(9, 0, [1, 2, 3], num_prompt_tokens=num_prompt_tokens)
    store(state, [FULL], Room(9), 4)

    assert (state.blocks.num_computed_tokens + 1_000 >= state.stores.next_tokens) is may_fill


def test_stale_blocks_are_not_storable() -> None:
    state = running(8, 0, [1, 2])
    state.on_reset()

    assert blocks_of([FULL], state, 8) == []


def test_blocks_that_left_a_window_are_passed_over_for_ever() -> None:
    state = running(40, 24, list(range(1, 11)), [0, 0, 0, 0, 15, 16, 17, 18, 19, 20])

    found = blocks_of([FULL, WINDOW], state, 8)

    assert [block for group, block in found if group == 1] == [4, 5, 6, 7]
    assert [block for group, block in found if group == 0] == list(range(8))


def test_blocks_of_several_groups_are_listed_by_position() -> None:
    assert blocks_of([FULL, WINDOW], running(8, 0, [1, 2], [3, 4]), 8) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def store(state: RequestState, layouts: list[GroupLayout], room: Room, num_scheduled: int) -> list[StorePlan]:
    """Plan one step."""
    storable = list_storable_blocks(layouts, state, num_scheduled)
    return offer_blocks(layouts, state, storable, room.prepare_store).plans


def test_what_fits_is_stored_in_one_job_and_never_offered_again() -> None:
    state, room = running(12, 0, [5, 6, 7]), Room(9)

    [plan] = store(state, [FULL], room, 12)

    assert plan.keys == state.keys[0]
    assert plan.device_spec.block_ids.tolist() == [5, 6, 7]
    assert store(state, [FULL], room, 12) == []
    assert room.num_calls == 1


def test_blocks_that_are_held_are_left_out_of_the_transfer() -> None:
    state = running(24, 0, [1, 2, 3, 4, 5, 6])
    state.grow_keys([PAIRS])
    room = Room(9, held=[state.keys[0][1]])

    [plan] = store(state, [PAIRS], room, 24)

    assert plan.keys == [state.keys[0][0], state.keys[0][2]]
    assert plan.device_spec.block_ids.tolist() == [1, 2, 5, 6]
    assert plan.device_spec.block_indices == (0,)


def test_a_store_of_several_groups_is_ordered_by_group_like_its_slots() -> None:
    state = running(8, 0, [1, 2], [3, 4])

    [plan] = store(state, [FULL, WINDOW], Room(9), 8)

    assert plan.keys == [*state.keys[0], *state.keys[1]]
    assert plan.device_spec.block_ids.tolist() == [1, 2, 3, 4]
    assert plan.device_spec.group_sizes == (2, 2)


def test_when_the_whole_has_no_room_its_head_is_stored_and_the_rest_offered_in_the_next_step() -> None:
    state, room = running(40, 0, list(range(10))), Room(6)

    plans = store(state, [FULL], room, 40)

    stored = [key for plan in plans for key in plan.keys]
    assert stored == state.keys[0][:6]
    room.num_blocks = 4
    state.blocks.append(None, 40)
    plans = store(state, [FULL], room, 0)
    assert [key for plan in plans for key in plan.keys] == state.keys[0][6:]


def test_without_room_a_step_makes_one_call() -> None:
    state, room = running(40, 0, list(range(10))), Room(0)
    store(state, [FULL], room, 40)
    room.num_calls = 0

    store(state, [FULL], room, 40)

    assert room.num_calls == 1


@given(num_blocks=st.integers(1, 40), rooms=st.lists(st.integers(0, 40), max_size=6))
def test_every_block_is_stored_once_and_in_order_however_little_room_there_is(
    num_blocks: int, rooms: list[int]
) -> None:
    state, room = running(4 * num_blocks, 0, list(range(num_blocks))), Room(0)
    stored: list[OffloadKey] = []

    for num_free in [*rooms, num_blocks]:
        room.num_blocks = num_free
        num_before = room.num_calls
        plans = store(state, [FULL], room, 4 * num_blocks)
        stored += [key for plan in plans for key in plan.keys]
        assert room.num_calls - num_before <= 2 * num_blocks.bit_length() + 2

    assert stored == state.keys[0]


def test_states_that_an_engine_has_passed_over_are_not_stored() -> None:
    states = GroupLayout(0, 4, 1, 1, num_tail_tokens=4, num_live_tokens=1)
    state = make_request_state(FakeRequest("request", list(range(16))), 1)
    state.blocks.replace([[-1, -1, -1, 7]], 0)
    assert [block.block for block in list_storable_blocks([states], state, 16)] == [3]


def test_of_a_state_only_what_the_engine_keeps_is_storable_and_from_where_it_says() -> None:
    state = running(16, 0, [1, 2, 3, 4], [0, 0, 0, 7])
    state.blocks.kept_states = [KeptState(1, 9, 8), KeptState(1, 7, 14), KeptState(1, 8, 20)]

    storable = list_storable_blocks([FULL, STATE], state, 16)
    (plan,) = offer_blocks([FULL, STATE], state, storable, Room(10).prepare_store).plans

    assert [(found.group_idx, found.block) for found in storable] == [(0, 0), (0, 1), (1, 1), (0, 2), (0, 3)]
    assert plan.device_blocks == [1, 2, 3, 4, 9]
    assert tuple(plan.device_spec.group_sizes) == (4, 1)
    assert plan.keys[-1] == state.keys[1][1]


def test_states_are_offered_once_and_not_where_the_engine_keeps_none() -> None:
    state = running(16, 0, [1, 2, 3, 4], [0, 0, 0, 7])
    state.blocks.kept_states = [KeptState(1, 9, 8)]

    assert (1, 1) in blocks_of([FULL, STATE], state, 16)

    state.stores.next_tokens = 0
    assert not [group for group, _ in blocks_of([FULL, STATE], state, 16) if group == 1]


def test_states_beyond_the_requests_limit_are_not_stored() -> None:
    state = running(16, 0, [1, 2, 3, 4], [0, 0, 0, 7], params={"max_store_tokens": 9})
    state.blocks.kept_states = [KeptState(1, 9, 8), KeptState(1, 7, 12)]

    assert [found for found in blocks_of([FULL, STATE], state, 16) if found[0] == 1] == [(1, 1)]


def test_states_computed_before_a_reset_are_not_stored() -> None:
    state = running(16, 0, [1, 2, 3, 4], [0, 0, 0, 7])
    state.blocks.kept_states = [KeptState(1, 9, 8)]
    state.on_reset()

    assert blocks_of([FULL, STATE], state, 16) == []


def audited(
    layout: GroupLayout, state: RequestState, end_token: int, *blocks: int
) -> tuple[dict[int, list[int]], list[int]]:
    """Return the device blocks of the pinned blocks that a step completes, and which of them are lost."""
    names = {OffloadKey(bytes([block])): block for block in blocks}
    pinned = {key: PinnedBlock(layout.idx, block, 0) for key, block in names.items()}
    other = {OffloadKey(b"other"): PinnedBlock(7, 0, 0)}
    found = find_computed(layout, state.blocks, pinned | other, end_token)
    return {names[key]: list(ids) for key, ids in found.device_blocks.items()}, [
        names[key] for key in found.lost
    ]


def test_attention_is_compared_as_far_as_it_is_computed() -> None:
    state = running(16, 0, [1, 2, 3, 4])

    assert audited(FULL, state, 11, 0, 1, 2) == ({0: [1], 1: [2]}, [])
    assert audited(FULL, state, 16, 2, 3) == ({2: [3], 3: [4]}, [])


def test_a_window_is_compared_while_the_engine_keeps_it() -> None:
    state = running(16, 12, [0, 0, 0, 0], [0, 2, 3, 4])

    assert audited(WINDOW, state, 16, 0, 1, 3) == ({1: [2], 3: [4]}, [0])


def test_a_state_is_compared_where_the_engine_says_and_lost_where_it_keeps_none() -> None:
    state = running(16, 0, [1, 2, 3, 4], [0, 0, 0, 7])
    state.blocks.kept_states = [KeptState(1, 9, 8), KeptState(0, 8, 4)]

    assert audited(STATE, state, 12, 0, 1, 2, 3) == ({1: [9]}, [0, 2])


def test_a_state_whose_device_block_is_not_in_the_table_yet_is_compared() -> None:
    state = running(16, 0, [1], [])
    state.blocks.kept_states = [KeptState(1, 9, 8)]

    assert audited(STATE, state, 8, 1) == ({1: [9]}, [])


def test_without_word_of_the_engine_a_state_is_in_its_place_until_the_next_token() -> None:
    state = running(16, 0, [1, 2, 3, 4], [-1, 6, 7, 8])

    assert audited(STATE, state, 8, 0, 1, 2) == ({1: [6]}, [0])
    state.blocks.append(None, 8)
    assert audited(STATE, state, 12, 1, 2) == ({1: [6], 2: [7]}, [])
    state.blocks.append(None, 9)
    assert audited(STATE, state, 12, 1, 2) == ({2: [7]}, [1])
