"""Conversations come back from host memory and tiers as they were: every layout and length, damage, small memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.llamacpp.slots import LAYOUTS, WINDOW_TOKENS, make_slot, make_tokens

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.engines.llamacpp.blocks import BlockFormat, Record, RecordKind, TokenNames, cut_slot
from kvtier.engines.llamacpp.conversations import ConversationStore, Restored
from kvtier.engines.llamacpp.record_store import RecordStore, plan_row_bytes
from kvtier.engines.llamacpp.slot_file import read_slot_file, write_slot_file
from kvtier.errors import ConfigError, SlotFormatError
from kvtier.misses import MissCause

BLOCK = 8

SERVED = sorted(set(LAYOUTS) - {"hybrid with windows"})

Opener = Callable[..., ConversationStore]


def make_form(name: str) -> BlockFormat:
    layout = LAYOUTS[name]
    return BlockFormat(layout, BLOCK, WINDOW_TOKENS if layout.window is not None else None)


def make_config(form: BlockFormat, settings: Mapping[str, Any]) -> OffloadingConfig:
    return OffloadingConfig(
        "test",
        ModelIdentity("tiny"),
        (KVGroup(BLOCK, ("rows",), plan_row_bytes(form)),),
        hash_block_size=BLOCK,
        kv_layout=repr(form.layout),
        engine_kind="llamacpp",
        extra_config={"cpu_bytes_to_use": "4MiB", **settings},
    )


@pytest.fixture
def open_store() -> Iterator[Opener]:
    opened = []

    def open_one(name: str, **settings: object) -> ConversationStore:
        form = make_form(name)
        store = RecordStore(make_config(form, settings), form)
        opened.append(store)
        return ConversationStore(form, store)

    yield open_one
    for store in opened:
        store.close()


def fs_tier(folder: Path, **settings: object) -> dict[str, Any]:
    return {
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder), "capacity_bytes": "64MiB", **settings}]
    }


def check(restored: Restored, name: str, tokens: Sequence[int], num_tokens: int) -> None:
    assert restored.num_tokens == num_tokens
    assert sum(restored.tokens_by_tier.values()) == num_tokens
    if not num_tokens:
        return
    found = read_slot_file(restored.data, LAYOUTS[name])
    expected = make_slot(LAYOUTS[name], tokens[:num_tokens], [num_tokens] if LAYOUTS[name].window else [])
    assert bytes(restored.data) == bytes(write_slot_file(expected))
    assert found.tokens == tuple(tokens[:num_tokens])


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 20, 40, 45])
def test_the_next_turn_finds_the_whole_conversation(open_store: Opener, name: str, num_tokens: int) -> None:
    conversations = open_store(name)
    tokens = make_tokens(num_tokens)
    conversations.keep(make_slot(LAYOUTS[name], tokens))
    check(conversations.restore([*tokens, 5, 6, 7]), name, tokens, num_tokens)


@pytest.mark.parametrize("name", SERVED)
def test_another_chat_finds_what_both_begin_with(open_store: Opener, name: str) -> None:
    conversations = open_store(name)
    tokens = make_tokens(61)
    # The server notes a state where the last message begins.
    conversations.keep(make_slot(LAYOUTS[name], tokens, [45, 57] if name != "llama" else ()))
    other = [*tokens[:45], *make_tokens(30, seed=9)]
    has_states = LAYOUTS[name].window is not None or LAYOUTS[name].recurrent
    # Rows are shared by whole blocks, and up to a token where the server has noted a state.
    check(conversations.restore(other), name, other, 45 if has_states or name != "llama" else 40)


@pytest.mark.parametrize("name", ["llama", "windows", "hybrid", "mamba"])
def test_one_token_is_left_for_the_server(open_store: Opener, name: str) -> None:
    conversations = open_store(name)
    tokens = make_tokens(33)
    conversations.keep(make_slot(LAYOUTS[name], tokens, [25] if name != "llama" else ()))
    assert conversations.restore(tokens).num_tokens == (32 if name in ("llama", "windows") else 25)


def test_a_window_is_put_together_from_two_states(open_store: Opener) -> None:
    conversations = open_store("windows")
    tokens = make_tokens(60)
    conversations.keep(make_slot(LAYOUTS["windows"], tokens, [36, 44, 56]))
    # Tokens 16 to 60 have window rows, so a prefix may end at every block from 40 on although no state is noted there.
    other = [*tokens[:50], *make_tokens(20, seed=5)]
    check(conversations.restore(other), "windows", other, 48)


def test_window_rows_are_stored_once_for_chats_that_share_them(open_store: Opener) -> None:
    form = make_form("windows")
    conversations = open_store("windows")
    first = [*make_tokens(56), *make_tokens(8, seed=1)]
    second = [*make_tokens(56), *make_tokens(8, seed=2)]
    conversations.keep(make_slot(LAYOUTS["windows"], first, [56, 60]))
    before = conversations.store.manager.stats()["primary.held_blocks"]
    conversations.keep(make_slot(LAYOUTS["windows"], second, [56, 60]))
    added = conversations.store.manager.stats()["primary.held_blocks"] - before
    own = [Record(RecordKind.ROWS, 64), Record(RecordKind.WINDOW, 64), Record(RecordKind.END, 60)]
    assert added == sum(-(-form.record_bytes(one) // plan_row_bytes(form)) for one in own)


@pytest.mark.parametrize("name", SERVED)
def test_a_restart_finds_everything_on_disk(open_store: Opener, tmp_path: Path, name: str) -> None:
    tokens = make_tokens(45)
    conversations = open_store(name, **fs_tier(tmp_path))
    conversations.keep(make_slot(LAYOUTS[name], tokens))
    conversations.store.close()
    again = open_store(name, **fs_tier(tmp_path))
    restored = again.restore([*tokens, 5])
    check(restored, name, tokens, 45)
    assert set(restored.tokens_by_tier) == {"fs"}
    assert set(again.restore([*tokens, 5]).tokens_by_tier) == {"host"}


def test_two_stores_on_one_directory_find_each_others_blocks(open_store: Opener, tmp_path: Path) -> None:
    tokens = make_tokens(45)
    one, other = (open_store("llama", **fs_tier(tmp_path)) for _ in range(2))
    one.keep(make_slot(LAYOUTS["llama"], tokens))
    one.store.manager.drain(10.0)
    # The other reads what its neighbour has written a moment after it was first asked.
    while other.restore([*tokens, 5]).num_tokens < 45:
        other.store.step()
    check(other.restore([*tokens, 5]), "llama", tokens, 45)


def test_a_conversation_larger_than_host_memory_comes_back_from_disk(
    open_store: Opener, tmp_path: Path
) -> None:
    settings = {"cpu_bytes_to_use": "256KiB", **fs_tier(tmp_path)}
    tokens = make_tokens(1003)
    conversations = open_store("llama", **settings)
    conversations.keep(make_slot(LAYOUTS["llama"], tokens))
    check(conversations.restore([*tokens, 5]), "llama", tokens, 1003)


def test_damaged_blocks_are_misses_and_are_stored_again(open_store: Opener, tmp_path: Path) -> None:
    tokens = make_tokens(45)
    conversations = open_store("llama", **fs_tier(tmp_path))
    conversations.keep(make_slot(LAYOUTS["llama"], tokens))
    conversations.store.close()
    damage_packs(tmp_path)
    again = open_store("llama", **fs_tier(tmp_path))
    assert again.restore([*tokens, 5]).num_tokens < 45
    again.keep(make_slot(LAYOUTS["llama"], tokens))
    check(again.restore([*tokens, 5]), "llama", tokens, 45)


def damage_packs(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            data = bytearray(path.read_bytes())
            for at in range(100, len(data), 4096):
                data[at] ^= 0xFF
            path.write_bytes(data)


def test_rows_of_other_tokens_under_a_name_are_dropped_and_no_file_is_made(open_store: Opener) -> None:
    conversations = open_store("llama")
    tokens = make_tokens(24)
    slot = make_slot(LAYOUTS["llama"], tokens)
    assert slot.attention is not None
    records = [
        (record, slot.attention.cut(0, BLOCK).pack if record.num_tokens == 16 else pack)
        for record, pack in cut_slot(conversations.form, slot)
    ]
    conversations.store.store(TokenNames(tokens, BLOCK), records)
    assert conversations.restore([*tokens, 5]).num_tokens == 0
    conversations.keep(slot)
    check(conversations.restore([*tokens, 5]), "llama", tokens, 24)


def test_a_full_host_memory_evicts_the_oldest_conversations_first(open_store: Opener) -> None:
    conversations = open_store("llama", cpu_bytes_to_use="256KiB")
    chats = [make_tokens(100, seed=seed) for seed in range(12)]
    for tokens in chats:
        conversations.keep(make_slot(LAYOUTS["llama"], tokens))
    check(conversations.restore([*chats[-1], 5]), "llama", chats[-1], 100)
    assert conversations.restore([*chats[0], 5]).num_tokens == 0
    miss = conversations.explain([*chats[0], 5], 0)
    assert miss is not None
    assert miss.cause is MissCause.EVICTED


def test_a_slot_of_another_layout_or_window_is_refused(open_store: Opener) -> None:
    conversations = open_store("windows")
    with pytest.raises(SlotFormatError, match="self-test"):
        conversations.keep(make_slot(LAYOUTS["llama"], make_tokens(9)))
    longer = ConversationStore(replace(conversations.form, window_tokens=30), conversations.store)
    with pytest.raises(SlotFormatError, match="window"):
        longer.keep(make_slot(LAYOUTS["windows"], make_tokens(45)))


def test_too_little_host_memory_is_refused_with_what_is_needed() -> None:
    form = make_form("llama")
    with pytest.raises(ConfigError, match="at least"):
        RecordStore(make_config(form, {"cpu_bytes_to_use": "8KiB"}), form)
