"""Tells where loaded tokens were: in host memory already, or in a tier that promoted them just now.

It asks nobody; it compares two readings of the manager's counters. That is exact while requests are served one
after another, because then every promotion that arrives during a request's search was made for it.
"""

import re
from collections import Counter
from collections.abc import Mapping

from kvtier.engines.transformers.result import HOST

PROMOTED_COUNTER = re.compile(r"tier\.\d+\.(?P<tier>.+)\.promoted_blocks")
"""The manager's count of blocks that a tier brought into the primary."""


def count_promoted_blocks(stats: Mapping[str, float]) -> Counter[str]:
    """Return how many blocks each type of tier has promoted so far. Pure."""
    counts: Counter[str] = Counter()
    for name, value in stats.items():
        found = PROMOTED_COUNTER.fullmatch(name)
        if found is not None:
            counts[found["tier"]] += int(value)
    return counts


def split_origins(num_loaded_tokens: int, promoted_tokens: Mapping[str, int]) -> dict[str, int]:
    """Divide loaded tokens among the tiers that promoted them and host memory. Pure.

    Args:
        num_loaded_tokens: tokens that arrived on the device.
        promoted_tokens: tokens that each tier promoted during the search; more than were loaded when the
            search found a hole.
    """
    origins: dict[str, int] = {}
    num_left = num_loaded_tokens
    for tier, num_tokens in promoted_tokens.items():
        origins[tier] = min(num_tokens, num_left)
        num_left -= origins[tier]
    return origins | {HOST: num_left}
