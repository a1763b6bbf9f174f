"""What one step of the engine did to the device block tables of its requests.

It frees and allocates nothing. The connector follows the tables because a store must know where a block's bytes
are, and because a block that changes hands may still be read by an unfinished store.
"""

from collections.abc import Mapping, Sequence

from kvtier.connector.groups import GroupLayout
from kvtier.connector.protocols import SchedulerOutput
from kvtier.connector.request_state import RequestState


def follow_allocations(
    layouts: Sequence[GroupLayout], requests: Mapping[str, RequestState], output: SchedulerOutput
) -> list[int]:
    """Bring the block tables up to date with a step.

    Args:
        layouts: the KV groups.
        requests: the requests that are known; blocks of others are returned all the same.
        output: the step.

    Returns:
        Device blocks that this step may write to, or that were taken from a request; stores that read them
        must end first.

    Effects:
        Changes the states' block tables and computed tokens.
    """
    written: list[int] = []
    for req_id in output.preempted_req_ids or ():
        if (state := requests.get(req_id)) is not None:
            written.extend(block_id for table in state.block_ids for block_id in table)
            state.drop_blocks()
    for new in output.scheduled_new_reqs:
        if (state := requests.get(new.req_id)) is not None:
            state.replace_blocks(new.block_ids, new.num_computed_tokens)
        written.extend(list_written_blocks(layouts, new.block_ids, new.num_computed_tokens))
    if output.scheduled_cached_reqs.req_ids:
        written.extend(_follow_cached_requests(layouts, requests, output))
    return written


def list_written_blocks(
    layouts: Sequence[GroupLayout], block_ids: Sequence[Sequence[int]], num_computed_tokens: int
) -> list[int]:
    """Return the device blocks of a new block table that do not hold computed tokens alone. Pure.

    The blocks before those may be shared with whoever computed them, and reading them needs no fence.
    """
    return [
        block_id
        for layout, table in zip(layouts, block_ids, strict=True)
        for block_id in table[num_computed_tokens // layout.device_block_tokens :]
    ]


def _follow_cached_requests(
    layouts: Sequence[GroupLayout], requests: Mapping[str, RequestState], output: SchedulerOutput
) -> list[int]:
    cached = output.scheduled_cached_reqs
    written: list[int] = []
    for req_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        state = requests.get(req_id)
        if req_id in cached.resumed_req_ids and block_ids is not None:
            written.extend(list_written_blocks(layouts, block_ids, num_computed_tokens))
            if state is not None:
                state.replace_blocks(block_ids, num_computed_tokens)
            continue
        if block_ids is not None:
            written.extend(block_id for ids in block_ids for block_id in ids)
        if state is not None:
            state.append_blocks(block_ids, num_computed_tokens)
    return written
