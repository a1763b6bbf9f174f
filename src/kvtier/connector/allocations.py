"""What an engine's step tells about device blocks beside the block tables: which are written to, and which hold states.

An engine may say which device blocks hold a recurrent state after the step, because a block table does not.
"""

from collections.abc import Mapping, Sequence

from kvtier.connector.groups import GroupLayout
from kvtier.connector.protocols import SchedulerOutput
from kvtier.connector.request_state import KeptState, RequestState, follow_allocations


def list_written_blocks(
    layouts: Sequence[GroupLayout], requests: Mapping[str, RequestState], output: SchedulerOutput
) -> list[int]:
    """Return the device blocks that a step may write to or takes from a request. Pure.

    Stores that read them must end first. Blocks given to a request that is not known are among them.

    Args:
        layouts: the KV groups.
        requests: the requests that are known, before ``follow_allocations`` for this step.
        output: the step.
    """
    # vLLM from 0.32 on copies blocks that requests share the first part of; no other list has where to.
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    written: list[int] = [copy.dst_block_id for copy in copies]
    for req_id in output.preempted_req_ids or ():
        if (state := requests.get(req_id)) is not None:
            written.extend(block_id for table in state.blocks.block_ids for block_id in table)
    for new in output.scheduled_new_reqs:
        written += list_uncomputed_blocks(layouts, new.block_ids, new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for req_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if block_ids is None:
            continue
        if req_id in cached.resumed_req_ids:
            written += list_uncomputed_blocks(layouts, block_ids, num_computed_tokens)
        else:
            written.extend(block_id for ids in block_ids for block_id in ids)
    return written


def list_uncomputed_blocks(
    layouts: Sequence[GroupLayout], block_ids: Sequence[Sequence[int]], num_computed_tokens: int
) -> list[int]:
    """Return the device blocks of a new block table that do not hold computed tokens alone. Pure.

    The blocks before those may be shared with the request that computed them; reading them needs no fence.
    """
    return [
        block_id
        for layout, table in zip(layouts, block_ids, strict=True)
        for block_id in table[num_computed_tokens // layout.device_block_tokens :]
    ]


def follow_states(requests: Mapping[str, RequestState], output: SchedulerOutput) -> None:
    """Bring the block tables of the known requests up to date with a step, and the states that they hold after it."""
    follow_allocations(requests, output)
    # vLLM from 0.32 on. Its block tables do not tell: states move between blocks, and interior ones are never written.
    handed_over = getattr(output, "kv_connector_block_state", None)
    if handed_over is None:
        return
    kept: Mapping[str, Sequence[tuple[int, int, int]]] = handed_over.boundary_state_offloads
    for req_id in output.num_scheduled_tokens:
        if (state := requests.get(req_id)) is None:
            continue
        state.blocks.kept_states = [KeptState(*one) for one in kept.get(req_id, ())]
        if state.blocks.kept_states:
            # They are stored in this step or never: the next one may overwrite them.
            state.stores.next_tokens = 0
