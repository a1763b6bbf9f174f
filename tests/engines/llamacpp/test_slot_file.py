"""Slot files are read to their last byte, written as they were, and refused by name where anything is off."""

import random
import struct
from collections import Counter

import numpy as np
import pytest
from tests.engines.llamacpp.slots import LAYOUTS, make_slot, make_tokens

from kvtier.engines.llamacpp.slot_file import (
    SlotFile,
    SlotLayout,
    read_slot_file,
    unpack_rows,
    write_slot_file,
)
from kvtier.errors import SlotFormatError

NAMES = sorted(LAYOUTS)


def make_file(name: str, num_tokens: int = 45) -> bytes:
    layout = LAYOUTS[name]
    has_states = layout.window is not None or layout.recurrent
    checkpoints = [one for one in (9, 30, 41) if has_states and one < num_tokens]
    return bytes(write_slot_file(make_slot(layout, make_tokens(num_tokens), checkpoints)))


def assert_equal(one: SlotFile, other: SlotFile) -> None:
    assert (one.layout, one.tokens) == (other.layout, other.tokens)
    assert bytes(write_slot_file(one)) == bytes(write_slot_file(other))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read_again(name: str) -> None:
    data = make_file(name)
    slot = read_slot_file(data)
    assert slot.layout == LAYOUTS[name]
    assert bytes(write_slot_file(slot)) == data
    assert len(slot.checkpoints) == (
        0 if name in ("llama", "q8_0", "streams", "transposed", "mrope", "mla") else 3
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_anywhere_is_refused(name: str) -> None:
    data = make_file(name, 23)
    for size in [*range(300), *range(300, len(data), 7), *range(len(data) - 60, len(data))]:
        try:
            found = read_slot_file(data[:size])
        except SlotFormatError:
            continue
        # What is left is a whole file where exactly the appendix is missing.
        assert found.checkpoints == ()
        assert bytes(write_slot_file(found)) == data[:size]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_behind_the_end_are_refused(name: str) -> None:
    data = make_file(name)
    for more in (b"\0", b"\0\0\0\0", b"CSPK", bytes(64)):
        with pytest.raises(SlotFormatError):
            read_slot_file(data + more)


def test_a_file_of_another_layout_than_the_self_tests_is_refused_by_name() -> None:
    with pytest.raises(SlotFormatError, match="not that of the self-test"):
        read_slot_file(make_file("q8_0"), LAYOUTS["llama"])


def test_pictures_are_refused() -> None:
    data = bytearray(make_file("llama"))
    struct.pack_into("<i", data, 12 + 4 * (3 + 45), 1)
    with pytest.raises(SlotFormatError, match="pictures"):
        read_slot_file(data)


def test_cells_in_another_order_come_out_by_position() -> None:
    slot = make_slot(LAYOUTS["llama"], make_tokens(10))
    assert slot.attention is not None
    order = np.array([3, 1, 0, 2, 9, 8, 4, 5, 7, 6])
    mixed = type(slot.attention)(slot.attention.layout, tuple(part[order] for part in slot.attention.parts))
    data = write_slot_file(SlotFile(slot.layout, slot.tokens, mixed, slot.state))
    assert_equal(read_slot_file(data), slot)


def test_checkpoints_of_a_draft_model_are_refused() -> None:
    data = bytearray(make_file("hybrid"))
    data[-16:-8] = struct.pack("<Q", 1)
    with pytest.raises(SlotFormatError):
        read_slot_file(bytes(data[:-8]) + b"x" + bytes(8))


def test_rows_of_other_tokens_are_refused() -> None:
    layout = LAYOUTS["llama"].attention
    assert layout is not None
    payload = make_slot(LAYOUTS["llama"], make_tokens(10)).attention
    assert payload is not None
    assert len(unpack_rows(layout, payload.cut(4, 8).pack(), 4)) == 4
    with pytest.raises(SlotFormatError, match="other tokens"):
        unpack_rows(layout, payload.cut(4, 8).pack(), 5)
    with pytest.raises(SlotFormatError, match="whole number"):
        unpack_rows(layout, payload.cut(4, 8).pack()[:-1], 4)


def damage(data: bytearray, rng: random.Random) -> None:
    """Do one of the things that disks, crashes and other programs do."""
    kind = rng.randrange(6)
    if kind == 0:
        data[rng.randrange(min(len(data), 300))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[rng.randrange(len(data)) :]
    elif kind == 3:
        data += rng.randbytes(rng.randrange(1, 64))
    elif kind == 4:
        at = rng.randrange(0, len(data) - 4, 4)
        data[at : at + 4] = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, rng.randrange(2**32)]).to_bytes(
            4, "little"
        )
    else:
        a, b, size = rng.randrange(len(data) - 16), rng.randrange(len(data) - 16), rng.randrange(1, 16)
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def fuzz(num_rounds: int, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    files = [(make_file(name), LAYOUTS[name]) for name in NAMES]
    for _ in range(num_rounds):
        whole, layout = rng.choice(files)
        data = bytearray(whole)
        damage(data, rng)
        seen[read_or_refuse(bytes(data), layout, rng)] += 1
    return seen


def read_or_refuse(data: bytes, layout: SlotLayout, rng: random.Random) -> str:
    try:
        slot = read_slot_file(data, layout if rng.random() < 0.5 else None)
    except SlotFormatError:
        return "refused"
    assert len(slot.tokens) > 0
    assert bytes(write_slot_file(slot))[:8] == data[:8]
    return "read"


def test_damaged_files_are_read_or_refused_and_nothing_else() -> None:
    seen = fuzz(1000, seed=3)
    assert seen["refused"] > 300


@pytest.mark.slow
def test_ten_thousand_damaged_files_are_read_or_refused_and_nothing_else() -> None:
    seen = fuzz(10_000, seed=4)
    assert seen["refused"] > 3000
