"""Following an engine's block tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.connector.fakes import FakeRequest

from kvtier.connector.allocations import follow_states, list_written_blocks
from kvtier.connector.groups import GroupLayout
from kvtier.connector.request_state import KeptState, RequestState, follow_allocations, make_request_state
from kvtier.engines.common.step import CachedRequests, NamedStates, NewRequest, StepOutput

LAYOUTS = [GroupLayout(0, 4, 1, 1, None), GroupLayout(1, 8, 1, 2, None)]


@dataclass(frozen=True)
class FakeCopy:
    """A copy of one device block into another."""

    src_block_id: int
    dst_block_id: int


@dataclass(frozen=True, slots=True)
class CopyingStep(StepOutput):
    """A step of an engine that copies device blocks."""

    kv_cache_block_copies: Sequence[FakeCopy] = ()


def known(*tables: list[int]) -> dict[str, RequestState]:
    """Return one known request "r" with these block tables."""
    state = make_request_state(FakeRequest("r", []), len(LAYOUTS))
    if tables:
        state.blocks.replace(tables, 0)
    return {"r": state}


def follow(requests: dict[str, RequestState], step: StepOutput) -> list[int]:
    """Follow a step; return the device blocks that it may write to."""
    written = list_written_blocks(LAYOUTS, requests, step)
    follow_allocations(requests, step)
    return written


def test_a_new_request_writes_only_beyond_its_computed_tokens() -> None:
    requests = known()
    step = StepOutput([NewRequest("r", ([1, 2, 3, 4], [5, 6]), num_computed_tokens=8)])

    assert follow(requests, step) == [3, 4, 6]
    assert requests["r"].blocks.block_ids == [[1, 2, 3, 4], [5, 6]]
    assert requests["r"].blocks.num_computed_tokens == 8


def test_a_running_request_writes_what_was_appended() -> None:
    requests = known([1], [5])
    step = StepOutput(scheduled_cached_reqs=CachedRequests(["r"], (), [([2], [])], [4]))

    assert follow(requests, step) == [2]
    assert requests["r"].blocks.block_ids == [[1, 2], [5]]
    assert requests["r"].blocks.num_computed_tokens == 4


def test_a_request_without_new_blocks_writes_nothing_new() -> None:
    requests = known([1], [5])
    step = StepOutput(scheduled_cached_reqs=CachedRequests(["r"], (), [None], [3]))

    assert follow(requests, step) == []
    assert requests["r"].blocks.num_computed_tokens == 3


def test_a_pre_empted_request_gives_back_its_table_and_a_resumed_one_gets_another() -> None:
    requests = known([1, 2], [5])

    assert follow(requests, StepOutput(preempted_req_ids={"r"})) == [1, 2, 5]
    assert (requests["r"].blocks.block_ids, requests["r"].blocks.is_allocated) == ([[], []], False)

    step = StepOutput(scheduled_cached_reqs=CachedRequests(["r"], {"r"}, [([7, 8], [9])], [4]))
    assert follow(requests, step) == [8, 9]
    assert requests["r"].blocks.block_ids == [[7, 8], [9]]


def test_blocks_given_to_a_request_that_is_not_known_are_written_all_the_same() -> None:
    step = StepOutput(
        [NewRequest("stranger", ([1], [2]))],
        preempted_req_ids={"other"},
        scheduled_cached_reqs=CachedRequests(["third"], (), [([3], [4])], [0]),
    )

    assert follow({}, step) == [1, 2, 3, 4]


def test_blocks_that_another_is_copied_into_are_written() -> None:
    assert follow({}, CopyingStep(kv_cache_block_copies=[FakeCopy(3, 7), FakeCopy(4, 8)])) == [7, 8]


def test_the_states_that_a_step_keeps_are_noted_for_their_requests_and_for_that_step_alone() -> None:
    requests = known([1, 2], [0, 6])
    requests["r"].stores.next_tokens = 100
    kept = NamedStates({"r": [(1, 6, 16)], "stranger": [(1, 9, 8)]})

    follow_states(requests, StepOutput(num_scheduled_tokens={"r": 8}, kv_connector_block_state=kept))

    assert requests["r"].blocks.kept_states == [KeptState(1, 6, 16)]
    assert requests["r"].stores.next_tokens == 0, "they are stored now or never"

    kept = NamedStates({})
    follow_states(requests, StepOutput(num_scheduled_tokens={"r": 1}, kv_connector_block_state=kept))

    assert requests["r"].blocks.kept_states == []
