"""From which tier each token of a load comes.

It asks nobody and loads nothing. A token counts for one tier although each KV group holds a part of it: for the
one that its block came from in the first full-attention group, which loads each token's block; without such a
group in the first group. A block came from the tier that it was promoted from while the request waited for it.
Everything else was in host memory, tokens included whose block has left the window and is not loaded.
"""

from collections.abc import Mapping, Sequence

from kvtier.base import OffloadKey
from kvtier.connector.groups import GroupLayout
from kvtier.connector.request_state import RequestState
from kvtier.cpu.common import CPULoadStoreSpec


def count_hit_sources(
    layouts: Sequence[GroupLayout],
    state: RequestState,
    promoted: Mapping[OffloadKey, str],
    num_external_tokens: int,
) -> dict[str, int]:
    """Return how many tokens of the load that begins come from each tier, none of them zero. Pure.

    Args:
        layouts: the KV groups.
        state: the request.
        promoted: blocks that came up while it waited for them, by their tier's type.
        num_external_tokens: tokens of the load; what is returned sums to it.
    """
    layout = next((layout for layout in layouts if layout.num_tail_tokens is None), layouts[0])
    first_token = state.num_local_tokens or 0
    end_token = first_token + num_external_tokens
    span = layout.span(first_token, end_token)
    sources: dict[str, int] = {}
    keys, block_tokens = state.keys[layout.idx], layout.block_tokens
    for block in range(span.first_block, span.end_block) if promoted else ():
        tier = promoted.get(keys[block])
        if tier is not None:
            begin = max(first_token, block * block_tokens)
            end = min(end_token, (block + 1) * block_tokens)
            sources[tier] = sources.get(tier, 0) + end - begin
    num_held_tokens = num_external_tokens - sum(sources.values())
    return {CPULoadStoreSpec.medium(): num_held_tokens, **sources} if num_held_tokens else sources
