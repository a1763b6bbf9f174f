"""Turns kvtier's events into those that vLLM publishes.

It keeps none. Sizes, tokens and parents of a block are reported by the device cache's own events, under the same
hash; an event of a tier says only that a medium has it or has lost it, so its block size is zero.
"""

from collections.abc import Iterable

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.connector.common import BlockRemoved, BlockStored


def translate_events(events: Iterable[BlockStored | BlockRemoved]) -> list[kv_events.KVCacheEvent]:
    """Return vLLM's form of each event, in the same order. Pure."""
    return [_translate(event) for event in events]


def _translate(event: BlockStored | BlockRemoved) -> kv_events.KVCacheEvent:
    hashes = [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return kv_events.BlockRemoved(block_hashes=hashes, medium=event.medium)
    return kv_events.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=event.block_size,
        lora_id=None,
        medium=event.medium,
        lora_name=None,
    )
