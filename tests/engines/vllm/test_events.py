"""Events of kvtier's tiers in vLLM's own form."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import msgspec
from vllm.distributed import kv_events

from kvtier.base import Locality
from kvtier.connector.common import BlockRemoved, BlockStored
from kvtier.engines.vllm.events import place_of, translate_events

HASHES = (bytes(range(32)), bytes(32))


def test_events_keep_their_order_and_hashes_and_speak_vllms_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")

    stored, removed = translate_events(
        [BlockStored(HASHES, "CPU"), BlockRemoved(HASHES[:1], "valkey", 1, "valkey.2", Locality.REMOTE)]
    )

    assert isinstance(stored, kv_events.BlockStored)
    assert isinstance(removed, kv_events.BlockRemoved)
    assert (stored.block_hashes, stored.medium) == (list(HASHES), "CPU")
    assert removed.block_hashes == list(HASHES[:1])
    if "ownership" not in kv_events.BlockRemoved.__struct_fields__:
        pytest.skip("needs vLLM 0.32 or newer: older events cannot name a tier")
    assert (stored.locality, stored.ownership, stored.group_idx) == ("LOCAL", None, 0)
    assert (removed.medium, removed.locality) == ("STORAGE", "REMOTE")
    assert (removed.ownership, removed.group_idx) == ("valkey.2", 1)


def test_a_release_that_cannot_name_a_tier_gets_its_type_as_medium() -> None:
    event = BlockRemoved(HASHES, "fs", 1, "fs", None)

    assert place_of(event, ["block_hashes", "medium"]) == {"medium": "fs"}
    assert place_of(event, ["medium", "group_idx"]) == {"medium": "fs", "group_idx": 1}


def test_a_stored_block_reports_no_size_and_no_tokens() -> None:
    (stored,) = translate_events([BlockStored(HASHES, "CPU")])

    assert (stored.block_size, stored.token_ids, stored.parent_block_hash) == (0, [], None)


def test_hashes_are_numbers_where_vllm_publishes_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    as_number = translate_events([BlockRemoved((bytes([0] * 31 + [7]),), "CPU")])[0].block_hashes
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    as_bytes = translate_events([BlockRemoved((bytes([0] * 31 + [7]),), "CPU")])[0].block_hashes

    assert as_number == [7]
    assert as_bytes == [bytes([0] * 31 + [7])]


def test_vllms_publisher_can_send_them() -> None:
    events = translate_events([BlockStored(HASHES, "CPU"), BlockRemoved(HASHES, "CPU")])
    batch = kv_events.KVEventBatch(ts=0.0, events=events)

    received = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=kv_events.KVEventBatch)

    assert received.events == events
