"""A trace keeps its requests in order and counts their blocks; a block always has one key."""

from kvtier.base import get_offload_block_hash, get_offload_group_idx
from kvtier.sim.trace import BlockKeys, Trace, TraceRequest, make_trace


def request(arrival_s: float, *hash_ids: int) -> TraceRequest:
    return TraceRequest(arrival_s, 512 * len(hash_ids), 1, hash_ids)


def test_requests_are_ordered_by_arrival_and_keep_their_order_within_an_instant() -> None:
    trace = make_trace([request(2, 1), request(1, 2), request(2, 3)], 512)

    assert [one.hash_ids for one in trace.requests] == [(2,), (1,), (3,)]
    assert trace.duration_s == 2


def test_accesses_count_repeats_and_unique_blocks_do_not() -> None:
    trace = make_trace([request(0, 1, 2), request(1, 1, 3)], 512)

    assert (trace.num_accesses, trace.num_unique_blocks) == (4, 3)


def test_a_trace_without_requests_lasts_no_time() -> None:
    assert make_trace([], 512).duration_s == 0


def test_equal_ids_have_the_same_key_object_and_unequal_ids_other_keys() -> None:
    keys = BlockKeys()

    first, second = keys.of([0, 7]), keys.of([7, 2**63 - 1])

    assert first[1] is second[0]
    assert len({*first, *second}) == 3
    assert get_offload_block_hash(first[1]) == (7).to_bytes(8, "big")
    assert get_offload_group_idx(first[1]) == 0


def test_the_recorded_traces_are_what_their_page_says(conversation: Trace, agentic_dev: Trace) -> None:
    def counts(trace: Trace) -> tuple[int, int, int]:
        return len(trace.requests), trace.num_accesses, trace.num_unique_blocks

    assert counts(conversation) == (12_031, 288_500, 182_790)
    assert counts(agentic_dev) == (3_802, 804_339, 32_348)
