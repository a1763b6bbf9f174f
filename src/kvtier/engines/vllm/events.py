"""kvtier's events in vLLM's own form, for its publisher.

vLLM names a medium "CPU" or "STORAGE" and says beside it which secondary tier it means ("ownership"), where that is
("locality") and of which KV group the blocks are. A release whose events cannot name the tier gets the tier's type as
medium: if all tiers were "STORAGE" there, a block that leaves one tier would seem to leave each.

Source: ``vllm.distributed.kv_events`` and ``OffloadingEventsTracker`` of vLLM 0.28 to 0.33.
"""

from collections.abc import Iterable
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.connector.common import BlockRemoved, BlockStored

STORAGE_MEDIUM: str = getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")


def translate_events(events: Iterable[BlockStored | BlockRemoved]) -> list[kv_events.KVCacheEvent]:
    """Return vLLM's form of each event, in the same order. Pure.

    Hashes are bytes or numbers, as vLLM's environment says. There are no tokens in them: the device's own events have
    told those of each block.
    """
    return [_translate(event) for event in events]


def place_of(event: BlockStored | BlockRemoved, fields: Iterable[str]) -> dict[str, Any]:
    """Return where the blocks of an event are, in those of vLLM's ``fields`` that there are. Pure.

    Args:
        event: the event.
        fields: names of the fields that vLLM's form of it has.
    """
    known = frozenset(fields)
    is_storage = event.tier is not None and "ownership" in known
    place = {
        "medium": STORAGE_MEDIUM if is_storage else event.medium,
        "group_idx": event.group_idx,
        "locality": None if event.locality is None else event.locality.value,
        "ownership": event.tier,
    }
    return {name: value for name, value in place.items() if name in known}


def _translate(event: BlockStored | BlockRemoved) -> kv_events.KVCacheEvent:
    hashes = [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in event.block_hashes]
    if isinstance(event, BlockRemoved):
        place = place_of(event, kv_events.BlockRemoved.__struct_fields__)
        return kv_events.BlockRemoved(block_hashes=hashes, **place)
    return kv_events.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=event.block_size,
        lora_id=None,
        lora_name=None,
        **place_of(event, kv_events.BlockStored.__struct_fields__),
    )
