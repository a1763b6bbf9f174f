"""Which slot a request gets, what is known of slots, and the ids of prompts whose beginning is known."""

import asyncio

import pytest

from kvtier.engines.llamacpp.passing import add_slot, is_single, read_fields
from kvtier.engines.llamacpp.request_log import RequestLog, make_record
from kvtier.engines.llamacpp.server import PromptTexts, ServerSlot
from kvtier.engines.llamacpp.slots import FrontSlot, SlotTable, choose_slot, common_prefix
from kvtier.misses import Miss, MissCause

TOKENS = list(range(100))


def slot(number: int, tokens: list[int], *, last_used_s: float = 0.0, **fields: bool) -> FrontSlot:
    return FrontSlot(number, tokens, last_used_s=last_used_s, **fields)


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        ([slot(0, []), slot(1, TOKENS[:50])], 1),
        ([slot(0, TOKENS[:60]), slot(1, TOKENS[:50])], 0),
        # A few common tokens decide nothing: the one that was used least recently.
        ([slot(0, TOKENS[:5], last_used_s=9.0), slot(1, [7], last_used_s=1.0)], 1),
        # A stored conversation is overwritten before one that must be saved first.
        ([slot(0, [7], last_used_s=1.0, is_unsaved=True), slot(1, [8], last_used_s=9.0)], 1),
        ([slot(0, TOKENS, is_busy=True), slot(1, [8])], 1),
        ([slot(0, TOKENS, is_busy=True)], None),
    ],
)
def test_a_request_gets_the_slot_that_costs_least(slots: list[FrontSlot], chosen: int | None) -> None:
    found = choose_slot(slots, TOKENS)
    assert (None if found is None else found.number) == chosen


def test_common_prefixes_are_counted() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix(TOKENS, TOKENS[:30]) == 30


def server_slot(number: int, num_tokens: int, task: int) -> ServerSlot:
    return ServerSlot(number, num_tokens, task, is_busy=False)


def make_table() -> SlotTable:
    table = SlotTable((0, 1), clock=lambda: 100.0)
    table.slots[0].tokens, table.slots[0].task, table.slots[0].is_unsaved = TOKENS[:40], 7, True
    table.slots[1].tokens, table.slots[1].task = TOKENS[:20], 9
    return table


@pytest.mark.parametrize(
    ("found", "known", "is_restarted"),
    [
        ((server_slot(0, 44, 7), server_slot(1, 20, 9)), [40, 20], False),
        ((server_slot(0, 0, 7), server_slot(1, 20, 9)), [0, 20], False),  # the server has emptied it
        ((server_slot(0, 44, 12), server_slot(1, 20, 9)), [0, 20], False),  # a client went past the front
        ((server_slot(0, 44, 3), server_slot(1, 20, 1)), [0, 0], True),
        ((), [0, 0], True),
    ],
)
def test_slots_that_others_changed_are_forgotten(
    found: tuple[ServerSlot, ...], known: list[int], is_restarted: bool
) -> None:
    table = make_table()
    assert table.compare({one.number: one for one in found}) is is_restarted
    assert [len(one.tokens) for one in table.slots] == known


def test_idle_slots_are_those_with_something_to_save() -> None:
    table = make_table()
    assert [one.number for one in table.idle(5.0)] == [0]
    table.slots[0].last_used_s = 99.0
    assert table.idle(5.0) == []


def test_requests_queue_for_slots() -> None:
    served: list[int] = []

    async def request(table: SlotTable, number: int) -> None:
        async with table.use(TOKENS):
            served.append(number)
            await asyncio.sleep(0)

    async def run() -> None:
        table = SlotTable((0,))
        await asyncio.gather(*(request(table, number) for number in range(5)))
        assert not table.slots[0].is_busy

    asyncio.run(run())
    assert served == [0, 1, 2, 3, 4]


def test_the_number_of_the_slot_is_added_and_nothing_else_changes() -> None:
    body = b' {"prompt": "\\u00e4", "x": 1e400, "seed": 12345678901234567890}'
    fields = read_fields(body)
    assert fields is not None
    assert (
        add_slot(body, fields, 3)
        == b' {"id_slot":3,"prompt": "\\u00e4", "x": 1e400, "seed": 12345678901234567890}'
    )
    assert add_slot(b"{}", {}, 3) == b'{"id_slot":3}'
    assert read_fields(add_slot(b'{"id_slot": -1}', {"id_slot": -1}, 3)) == {"id_slot": 3}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, True), ({"n": 1}, True), ({"n": 4}, False), ({"id_slot": 0}, False), ({"id_slot": -1}, True)],
)
def test_only_single_completions_get_a_slot(fields: dict[str, int], expected: bool) -> None:
    assert is_single(fields) is expected


def test_what_is_no_json_object_has_no_fields() -> None:
    assert read_fields(b"[1]") is None
    assert read_fields(b"{") is None
    assert read_fields(b"[" * 100_000) is None


def chat(*messages: str) -> tuple[str, list[tuple[int, str]]]:
    """Return a text of messages, and its tokens: one for each mark and one for each letter."""
    pieces = [(1, "")]
    for message in messages:
        pieces += [(2, "<|user|>"), *((ord(letter), letter) for letter in message), (3, "<|end|>")]
    return "".join(piece for _, piece in pieces), pieces


def test_of_a_next_turn_only_what_is_new_is_tokenized() -> None:
    texts = PromptTexts()
    text, pieces = chat("One?", "Two.")
    assert texts.find(text) == ([], 0)
    texts.add(text, [], 0, pieces)
    longer, all_pieces = chat("One?", "Two.", "Three?")
    ids, num_chars = texts.find(longer)
    assert longer[num_chars:].startswith("<|end|>")
    assert [*ids, *(token for token, _ in all_pieces[len(ids) :])] == [token for token, _ in all_pieces]
    texts.add(longer, ids, num_chars, all_pieces[len(ids) :])
    assert texts.find(chat("One?", "Two.", "Three?", "Four.")[0])[1] > num_chars
    assert texts.find(chat("Other")[0]) == ([], 0)


def test_a_text_is_cut_only_before_a_special_token() -> None:
    texts = PromptTexts()
    text, pieces = chat("One?")
    texts.add(text, [], 0, pieces)
    assert texts.find(text.replace("One?", "One!")) == ([], 0)


def test_a_record_counts_each_token_once() -> None:
    for num_prompt in (1, 2, 64, 65, 200):
        for held in (0, 1, 64, 199):
            for restored in ({}, {"fs": 64, "host": 3}):
                record = make_record("r", num_prompt, min(held, num_prompt), restored, 64, None, 0.0)
                record.check()
    log = RequestLog()
    log.add(make_record("r", 200, 0, {"fs": 64}, 64, Miss(MissCause.EVICTED, "fs"), 0.0))
    assert log.stats() == {
        "connector.recorded_requests": 1.0,
        "connector.prompt_tokens.fs": 64.0,
        "connector.missed_tokens.evicted.fs": 128.0,
        "connector.missed_tokens.partial_block": 8.0,
    }
