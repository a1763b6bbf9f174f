"""Each of 46 ways in which wrong bytes can stand under a right key is found in a sample of one hit in fifty."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.connector.audited import (
    PAGE_BYTES,
    AuditedEngine,
    Bytes,
    Model,
    make_prompts,
    to_bytes,
    to_numbers,
)
from tests.connector.fakes import HASH_TOKENS

MAX_HITS = 1000
AUDIT_RATIO = 1 / 50

RIGHT = Model()
RNG = np.random.default_rng(11)

Fault = Callable[[list[int], int, Bytes], Bytes]
"""Returns what stands in place of a block: its prompt, its number, its right bytes."""


def computed_by(model: Model, shift_blocks: int = 0) -> Fault:
    """Return the fault that another model, or this one for another block, has computed the block."""

    def make(tokens: list[int], block: int, page: Bytes) -> Bytes:
        del page
        num_blocks = len(tokens) // HASH_TOKENS
        return to_bytes(model.compute(tokens, (block + shift_blocks) % num_blocks))

    return make


def of_other_tokens(change: Callable[[list[int]], list[int]]) -> Fault:
    """Return the fault that the block was computed for another prompt."""
    return lambda tokens, block, page: to_bytes(RIGHT.compute(change(tokens), block))


def numbers(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Return a fault of the numbers, shape (layers, keys and values, heads, tokens, numbers of a head)."""
    return lambda tokens, block, page: to_bytes(np.ascontiguousarray(change(to_numbers(page).copy())))


def raw(change: Callable[[Bytes], Bytes]) -> Fault:
    """Return a fault of the bytes."""
    return lambda tokens, block, page: change(page.copy())


def flip(page: Bytes, lowest_bit: int, highest_bit: int) -> Bytes:
    """Flip one bit of one number, between these of its 16."""
    bit = int(RNG.integers(lowest_bit, highest_bit + 1))
    page[2 * int(RNG.integers(PAGE_BYTES // 2)) + bit // 8] ^= 1 << bit % 8
    return page


def keep(page: Bytes, part: slice, rest: int | None = 0) -> Bytes:
    """Keep a part of a page; the rest is zero, or random bytes for None."""
    other = RNG.integers(0, 256, len(page), np.uint8) if rest is None else np.full(len(page), rest, np.uint8)
    other[part] = page[part]
    return other


def as_int4(x: np.ndarray) -> np.ndarray:
    """Return numbers quantised to four bits and back."""
    step = np.abs(x).max() / 7
    rounded: np.ndarray = np.round(x / step) * step
    return rounded


HALF = PAGE_BYTES // 2

FAULTS: dict[str, Fault] = {
    "other weights": computed_by(Model(weights=2)),
    "stale generation of the weights": computed_by(Model(weights=0)),
    "a revision that was trained on": computed_by(replace(RIGHT, drift=0.2)),
    "other adapter": computed_by(Model(adapter=1)),
    "next block": computed_by(RIGHT, 1),
    "previous block": computed_by(RIGHT, -1),
    "block two further": computed_by(RIGHT, 2),
    "positions shifted by one": computed_by(Model(shift=1)),
    "positions shifted by a block": computed_by(Model(shift=HASH_TOKENS)),
    "positions from zero in each block": lambda t, b, p: to_bytes(
        replace(RIGHT, shift=-b * HASH_TOKENS).compute(t, b)
    ),
    "other rope base": computed_by(Model(theta=500_000.0)),
    "rope scaled linearly": computed_by(Model(scale=0.25)),
    "rope of a longer regime": computed_by(Model(theta=40_000.0, magnitude=1.2)),
    "no rope": computed_by(Model(scale=0.0)),
    "other tenant": of_other_tokens(lambda tokens: [token + 1 for token in tokens]),
    "prompt that differs in its first token": of_other_tokens(lambda tokens: [tokens[0] + 1, *tokens[1:]]),
    "prompt in reverse": of_other_tokens(lambda tokens: tokens[::-1]),
    "swapped layers": numbers(lambda x: x[::-1]),
    "swapped keys and values": numbers(lambda x: x[:, ::-1]),
    "swapped heads": numbers(lambda x: x[:, :, ::-1]),
    "tokens in reverse": numbers(lambda x: x[:, :, :, ::-1]),
    "tokens rolled by one": numbers(lambda x: np.roll(x, 1, axis=3)),
    "numbers of heads in reverse": numbers(lambda x: x[..., ::-1]),
    "heads before tokens": numbers(lambda x: x.swapaxes(2, 3)),
    "layers before keys and values": numbers(lambda x: x.swapaxes(0, 1)),
    "keys alone": numbers(lambda x: np.stack([x[:, 0], x[:, 0]], axis=1)),
    "first layer twice": numbers(lambda x: np.stack([x[0], x[0]])),
    "first head everywhere": numbers(lambda x: np.repeat(x[:, :, :1], 2, axis=2)),
    "last token missing": numbers(lambda x: x * np.array([1, 1, 1, 0])[:, None]),
    "values negated": numbers(lambda x: x * np.array([1, -1])[:, None, None, None]),
    "scale of two lost": numbers(lambda x: 2 * x),
    "quantised to four bits": numbers(as_int4),
    "read as float16": numbers(lambda x: to_numbers(x.astype(np.float16).reshape(-1).view(np.uint8))),
    "zeros": raw(np.zeros_like),
    "ones": raw(lambda page: np.full_like(page, 255)),
    "random bytes": raw(lambda page: keep(page, slice(0, 0), rest=None)),
    "second half zero": raw(lambda page: keep(page, slice(0, HALF))),
    "first half zero": raw(lambda page: keep(page, slice(HALF, None))),
    "second half garbage": raw(lambda page: keep(page, slice(0, HALF), rest=None)),
    "halves of two workers swapped": raw(lambda page: np.roll(page, HALF)),
    "shifted by a byte": raw(lambda page: np.roll(page, 1)),
    "shifted by 64 bytes": raw(lambda page: np.roll(page, 64)),
    "other byte order": raw(lambda page: page.reshape(-1, 2)[:, ::-1].reshape(-1)),
    "one bit flipped": raw(lambda page: flip(page, 0, 15)),
    "one bit of an exponent flipped": raw(lambda page: flip(page, 9, 14)),
    "one sign flipped": raw(lambda page: flip(page, 15, 15)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_within_a_thousand_hits(name: str) -> None:
    engine = AuditedEngine(audit_ratio=AUDIT_RATIO, audit_seed=3)
    prompts = make_prompts()
    for tokens in prompts:
        engine.serve(tokens)
    for key, (tokens, block) in engine.held.items():
        row = engine.row_of(key)
        if row is not None:
            row[:] = FAULTS[name](tokens, block, row)
    engine.num_hits = 0

    while engine.num_hits < MAX_HITS and not engine.stat("wrong_blocks"):
        engine.serve(prompts[engine.num_hits % len(prompts)])
    engine.close()

    assert engine.stat("wrong_blocks") > 0


def test_there_are_more_than_forty_faults() -> None:
    assert len(FAULTS) >= 40


def test_right_blocks_are_never_called_wrong() -> None:
    engine = AuditedEngine(audit_ratio=1.0)
    prompts = make_prompts()
    for number in range(40):
        engine.serve(prompts[number % len(prompts)])
    engine.close()

    assert engine.stat("close_blocks") == 36 * 8
    assert engine.stat("wrong_blocks") == 0
    assert engine.stat("largest_deviation") < 0.5
