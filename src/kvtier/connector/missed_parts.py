"""Which parts of a prompt are computed, by position, as far as the search and the request's limits say why.

cut off by a short group | faster computed | missing | kept by a limit
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvtier.connector.features import Withheld
from kvtier.connector.prefix_search import SearchGroups
from kvtier.connector.request_state import FoundPrefix, RequestState
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.misses import HOST_ORIGIN, UNKNOWN_TENANT_REASON, Miss, MissCause

NOT_CONNECTED = Miss(MissCause.TIER_DOWN, HOST_ORIGIN, MappingProxyType({"reason": "workers not connected"}))
ENGINE_DECLINED = Miss(MissCause.LIMITED, "", MappingProxyType({"reason": "the engine did not load it"}))
UNKNOWN_TENANT = Miss(MissCause.LIMITED, "", MappingProxyType({"reason": UNKNOWN_TENANT_REASON}))


class Segment(NamedTuple):
    """A part of a prompt that was computed.

    Attributes:
        end_token: one past its last token; it begins where the one before it ends.
        miss: why; None: what the manager says of the first block in it.
    """

    end_token: int
    miss: Miss | None


def divide_missed(
    state: RequestState,
    groups: SearchGroups,
    first_token: int,
    loadable: int,
    num_loaded_tokens: int,
    withheld: Sequence[Withheld] = (),
) -> list[Segment]:
    """Return why each loadable token from ``first_token`` on is computed, as segments in order. Pure.

    What is behind them is the partial block.

    Args:
        state: the request, whose search has its final answer.
        groups: the KV groups.
        first_token: tokens before it are on the device or loaded.
        loadable: tokens that could be loaded and are not computed all the same, as the last one is.
        num_loaded_tokens: tokens that the engine loads.
        withheld: why features have tokens computed.
    """
    common = groups.common_tokens
    limit = state.limits.max_load_tokens
    allowed = loadable if limit is None else min(loadable, limit // common * common)
    found, segments = state.search.found, list[Segment]()
    whole = next((one for one in withheld if not one.tokens_by_tier), None)
    part = next((one for one in withheld if one.tokens_by_tier), None)
    if whole is not None and (found is None or whole.is_unsearched):
        segments.append(Segment(allowed, whole.miss))
    elif found is None:
        segments.append(Segment(allowed, NOT_CONNECTED))
    else:
        if whole is not None:
            segments.append(Segment(min(allowed, found.end_token), whole.miss))
        elif num_loaded_tokens == 0 and found.end_token > first_token:
            segments.append(Segment(min(allowed, found.end_token), ENGINE_DECLINED))
        segments += _divide_found(found, part, allowed)
    if limit is not None and allowed < loadable:
        detail = MappingProxyType({"max_load_tokens": limit})
        limited = UNKNOWN_TENANT if state.tenant is None else Miss(MissCause.LIMITED, "", detail)
        segments.append(Segment(loadable, limited))
    return segments


def _divide_found(found: FoundPrefix, part: Withheld | None, allowed: int) -> list[Segment]:
    """Return the segments up to ``allowed``, of tokens that were looked up or that a feature withholds. Pure."""
    segments = []
    if found.first_end_token > found.end_token:
        short = Miss(MissCause.GROUP_SHORT, HOST_ORIGIN, MappingProxyType({"group": found.short_group}))
        segments.append(Segment(min(allowed, found.first_end_token), short))
    if part is not None:
        at = found.first_end_token if part.first_token is None else part.first_token
        segments.append(Segment(min(allowed, at), None))
        for tier, num_tokens in part.tokens_by_tier.items():
            at += num_tokens
            segments.append(Segment(min(allowed, at), part.miss._replace(tier=origin_of(tier))))
    segments.append(Segment(allowed, None))
    return segments


def origin_of(tier: str) -> str:
    """Return the origin of tokens that a medium or a tier held. Pure."""
    return HOST_ORIGIN if tier == CPULoadStoreSpec.medium() else tier
