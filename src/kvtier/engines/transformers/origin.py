"""Tells where loaded tokens were: in host memory already, or in a tier that promoted them just now."""

from collections.abc import Mapping

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.transformers.result import HOST


def split_origins(num_loaded_tokens: int, sources: Mapping[str, int]) -> dict[str, int]:
    """Divide loaded tokens among the tiers that promoted them and host memory. Pure.

    Args:
        num_loaded_tokens: tokens that arrived on the device.
        sources: tokens by where they were to come from, host memory or the type of a tier; more than were loaded when
            a block did not arrive.
    """
    origins: dict[str, int] = {}
    num_left = num_loaded_tokens
    for source, num_tokens in sources.items():
        if source != CPULoadStoreSpec.medium():
            origins[source] = min(num_tokens, num_left)
            num_left -= origins[source]
    return origins | {HOST: num_left}
