"""Whether a server's slots can be cut, stored and restored: tried at each start, before anything is kept.

A probe is computed, saved, cut into blocks, put together again, restored and continued. The log-probabilities must be
those of the server's own reuse of the same tokens. How far two of its own runs may differ is measured as well, and
a wrong block must differ by more: otherwise the probe would prove nothing.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.engines.llamacpp.blocks import BlockFormat, Record, RecordKind, assemble_slot, cut_slot
from kvtier.engines.llamacpp.conversations import check_slot
from kvtier.engines.llamacpp.server import Json, LlamaServer
from kvtier.engines.llamacpp.slot_file import SlotFile, SlotLayout, read_slot_file, write_slot_file
from kvtier.errors import LlamaServerError, SlotFormatError

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Blocks of the probe: three of them and a part. Longer ones delay the start on a slow machine."""

VOCABULARY = 200
NUM_NEW_TOKENS = 24
NUM_PREDICTED = 4
NUM_PROBABILITIES = 8

MIN_TOLERANCE = 0.05
"""Log-probabilities that may differ although nothing is wrong: restored rows lie in other cells, so attention adds up
in another order. 0.0004 was seen; wrong rows differ by whole units."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What the self-test has found.

    Attributes:
        layout: of the server's slot files.
        empties_idle_slots: whether a request in one slot empties the others.
        difference: largest difference of a log-probability after a restore.
    """

    layout: SlotLayout
    empties_idle_slots: bool
    difference: float


async def examine_server(
    server: LlamaServer, folder: Path, window_tokens: int | None, num_slots: int
) -> Examined:
    """Test a server whose slots no one else uses meanwhile; they are empty afterwards.

    Args:
        server: with a loaded model.
        folder: its directory for slot files.
        window_tokens: of the model.
        num_slots: of the server.

    Raises:
        LlamaServerError, SlotFormatError: its conversations cannot be kept; the message says why.
    """
    probe = [3 + (i * i * 7 + i) % VOCABULARY for i in range(3 * BLOCK_TOKENS + 9)]
    await server.slot_action(0, "erase")
    await _run(server, probe)
    slot = await save_slot(server, folder, 0)
    _refuse_layout(slot, window_tokens)
    form = BlockFormat(slot.layout, BLOCK_TOKENS, window_tokens if slot.layout.window else None)
    check_slot(form, slot)
    end = _choose_end(form, slot)
    prompt = [*slot.tokens[:end], *(3 + (i * 13 + 5) % VOCABULARY for i in range(NUM_NEW_TOKENS))]
    if len(slot.tokens) > end and prompt[end] == slot.tokens[end]:
        prompt[end] += 1
    expected = await _run(server, prompt)
    await server.slot_action(0, "erase")
    cold = await _run(server, prompt)
    tolerance = max(MIN_TOLERANCE, _difference(expected, cold))
    is_firm = expected["tokens"] == cold["tokens"]

    payloads = {record: pack() for record, pack in cut_slot(form, slot)}
    restored = await _restore_and_run(server, folder, form, prompt, end, payloads)
    reused = int(restored["timings"]["cache_n"])
    difference = _judge(expected, restored, are_tokens_firm=is_firm)
    if reused < end - 1:
        raise LlamaServerError(f"the server reused {reused} of {end} restored tokens")
    if difference > tolerance:
        raise LlamaServerError(
            f"log-probabilities differ by {difference:.2g} after a restore: {tolerance:.2g} may be"
        )
    wrong = await _restore_and_run(server, folder, form, prompt, end, _spoil(form, payloads, end))
    if _judge(expected, wrong, are_tokens_firm=is_firm) <= tolerance:
        raise LlamaServerError(f"a wrong block goes unnoticed: the tolerance is {tolerance:.2g}")
    empties = num_slots > 1 and await _empties_idle_slots(server, probe[:12])
    for number in range(min(2, num_slots)):
        await server.slot_action(number, "erase")
    return Examined(slot.layout, empties, difference)


async def save_slot(server: LlamaServer, folder: Path, number: int) -> SlotFile:
    """Have the server save a slot, and return its content.

    Raises:
        LlamaServerError: the server refuses, or has written elsewhere.
        SlotFormatError: the file has no known layout.
    """
    path = folder / f"save-{number}.slot"
    try:
        answer = await server.slot_action(number, "save", path.name)
        data = await asyncio.to_thread(path.read_bytes)
        if len(data) != answer.get("n_written", len(data)):
            raise SlotFormatError(
                f"{path} has {len(data)} bytes and not {answer['n_written']}: is its disk full?"
            )
        return await asyncio.to_thread(read_slot_file, data)
    except OSError as error:
        raise LlamaServerError(f"{path} is not where --slot-save-path DIR/ says: {error}") from error
    finally:
        path.unlink(missing_ok=True)


async def restore_slot(server: LlamaServer, folder: Path, number: int, data: bytes | bytearray) -> None:
    """Have the server restore a slot; a file that is not whole would end it, so it is written first.

    Raises:
        LlamaServerError: the server refuses, or the file cannot be written.
    """
    path = folder / f"restore-{number}.slot"
    try:
        if await asyncio.to_thread(path.write_bytes, data) != len(data):
            raise LlamaServerError(f"{path} cannot be written whole")
        await server.slot_action(number, "restore", path.name)
    except OSError as error:
        raise LlamaServerError(f"{path} cannot be written: {error}") from error
    finally:
        path.unlink(missing_ok=True)


def _refuse_layout(slot: SlotFile, window_tokens: int | None) -> None:
    layout = slot.layout
    if layout.window is not None and layout.recurrent:
        raise SlotFormatError(
            "a model with recurrent states and sliding windows: the server reuses nothing of it"
        )
    if layout.window is not None and not slot.checkpoints:
        raise SlotFormatError("sliding windows without checkpoints in the file: an old build, or --swa-full")
    if layout.window is not None and window_tokens is None:
        raise SlotFormatError("sliding windows whose length the model's file does not name")


def _choose_end(form: BlockFormat, slot: SlotFile) -> int:
    """Return after how many tokens the probe is cut: where a state is, or else between two blocks."""
    if form.is_cuttable:
        return 2 * form.block_tokens
    return max((state.num_tokens for state in slot.checkpoints), default=len(slot.tokens))


def _spoil(form: BlockFormat, payloads: Mapping[Record, bytes], end: int) -> dict[Record, bytes]:
    """Return records of which one block has the keys and values of the next, or whose state is another. Pure.

    Two blocks that have each other's would change nothing: attention adds up over both in any order.
    """
    wrong, size, layout = dict(payloads), form.block_tokens, form.layout.attention
    if layout is None:
        record = Record(RecordKind.END, end)
        half = len(wrong[record]) // 2
        wrong[record] = wrong[record][half:] + wrong[record][:half]
        return wrong
    first, second = (Record(RecordKind.ROWS, n * size) for n in (1, 2))
    num_cell_bytes = size * layout.cell_bytes
    wrong[first] = payloads[first][:num_cell_bytes] + payloads[second][num_cell_bytes:]
    return wrong


async def _restore_and_run(
    server: LlamaServer,
    folder: Path,
    form: BlockFormat,
    prompt: Sequence[int],
    end: int,
    payloads: Mapping[Record, bytes],
) -> Json:
    slot = assemble_slot(form, prompt[:end], payloads)
    await restore_slot(server, folder, 0, write_slot_file(replace(slot, tokens=tuple(prompt[:end]))))
    return await _run(server, prompt)


async def _run(server: LlamaServer, tokens: Sequence[int], slot: int = 0) -> Json:
    body = {"prompt": tokens, "n_predict": NUM_PREDICTED, "temperature": 0, "n_probs": NUM_PROBABILITIES}
    own = {"id_slot": slot, "cache_prompt": True, "return_tokens": True, "ignore_eos": True}
    return await server.call("POST", "/completion", {**body, **own})


async def _empties_idle_slots(server: LlamaServer, tokens: Sequence[int]) -> bool:
    await _run(server, tokens, slot=1)
    return (await server.slots())[0].num_tokens == 0


def _difference(one: Json, other: Json) -> float:
    """Return the largest difference of a log-probability, as far as both answers have the same tokens. Pure."""
    worst = 0.0
    for (token, by_token), (other_token, by_other) in zip(
        _probabilities(one), _probabilities(other), strict=False
    ):
        common = by_token.keys() & by_other.keys()
        worst = max([worst, *(abs(by_token[name] - by_other[name]) for name in common)])
        if token != other_token:
            break
    return worst


def _judge(expected: Json, found: Json, *, are_tokens_firm: bool) -> float:
    """Return how far an answer is from the expected one; other tokens are infinitely far. Pure.

    The server gives no probabilities of a text that ends within a character, so the tokens count by themselves.

    Args:
        expected: the server's own.
        found: after a restore.
        are_tokens_firm: whether a cold run gave the same tokens; otherwise it may be chance which come.
    """
    is_other = are_tokens_firm and expected["tokens"] != found["tokens"]
    return math.inf if is_other else _difference(expected, found)


def _probabilities(answer: Json) -> list[tuple[int, dict[int, float]]]:
    """Return each token of an answer with the most likely ones at its place."""
    return [
        (int(step["id"]), {int(top["id"]): float(top["logprob"]) for top in step["top_logprobs"]})
        for step in answer.get("completion_probabilities", [])
    ]
