"""How far two pages are apart: nothing for equal bytes, little for other batches, much for other bytes."""

import numpy as np
import pytest

from kvtier.config import GroupKind, KVGroup, StatePart
from kvtier.cpu.compare import (
    FORMATS,
    HYBRID_TOLERANCES,
    SEGMENT,
    STATE_FLOOR_RATIO,
    Bytes,
    KVFormat,
    compare_pages,
    find_format,
    find_page_formats,
)

RNG = np.random.default_rng(0)

ROUNDING = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative errors like those of another batch: several last bits."""


def encode(numbers: np.ndarray, name: str) -> Bytes:
    """Return numbers of shape (num_pages, num_numbers) as bytes of a dtype."""
    if name == "bfloat16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        return ((bits + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(numbers, np.dtype(name)).view(np.uint8)


def draw(num_pages: int = 3, num_numbers: int = SEGMENT) -> np.ndarray:
    return RNG.standard_normal((num_pages, num_numbers)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_equal_bytes_deviate_by_nothing(name: str) -> None:
    page = encode(draw(), name)

    assert compare_pages(page, page.copy(), FORMATS[name]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_within_the_tolerance(name: str) -> None:
    numbers = draw()
    other = numbers * (1 + ROUNDING[name] * RNG.standard_normal(numbers.shape))

    deviations = compare_pages(encode(numbers, name), encode(other, name), FORMATS[name])

    assert (deviations > 0).all()
    assert (deviations < 0.5).all()


@pytest.mark.parametrize("name", FORMATS)
def test_other_numbers_are_far_off_in_their_page_alone(name: str) -> None:
    numbers = draw()
    other = numbers.copy()
    other[1] = draw(1)[0]

    deviations = compare_pages(encode(numbers, name), encode(other, name), FORMATS[name])

    assert deviations[1] > 5
    assert deviations[0] == deviations[2] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_one_number_of_another_size_is_off(name: str) -> None:
    numbers = draw()
    other = numbers.copy()
    other[0, 7] *= 16
    other[0, 7] += 1

    assert compare_pages(encode(numbers, name), encode(other, name), FORMATS[name])[0] > 1


def test_small_values_do_not_hide_behind_large_keys() -> None:
    keys, values = 300 * draw(1, SEGMENT // 2), draw(1, SEGMENT // 2)
    found = np.concatenate([keys, values], axis=1)
    held = np.concatenate([keys, 40 * draw(1, SEGMENT // 2)], axis=1)

    assert compare_pages(encode(found, "bfloat16"), encode(held, "bfloat16"), FORMATS["bfloat16"])[0] > 1


def test_one_wrong_layer_of_many_is_found() -> None:
    found = draw(1, 32 * SEGMENT)
    held = found.copy()
    held[0, :SEGMENT] = draw(1)[0]

    assert compare_pages(encode(found, "float16"), encode(held, "float16"), FORMATS["float16"])[0] > 5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("held", [0.0, float("nan"), float("inf")])
def test_pages_without_numbers_are_off(name: str, held: float) -> None:
    found = draw(1)

    assert compare_pages(encode(found, name), encode(np.full_like(found, held), name), FORMATS[name])[0] > 1


def test_a_page_of_zeros_equals_only_itself() -> None:
    zeros = np.zeros((1, SEGMENT), np.float32)
    kv_format = FORMATS["float32"]

    assert compare_pages(encode(zeros, "float32"), encode(-zeros, "float32"), kv_format)[0] == 0
    assert compare_pages(encode(zeros, "float32"), encode(zeros + 1e-3, "float32"), kv_format)[0] > 1


@pytest.mark.parametrize("num_numbers", [6, 48, 96, 384, 5000])
def test_pages_of_any_length_are_compared(num_numbers: int) -> None:
    found = draw(2, num_numbers)

    assert (compare_pages(encode(found, "float32"), encode(-found, "float32"), FORMATS["float32"]) > 1).all()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("auto: bfloat16 NONE", "bfloat16"),
        ("auto: float32 NONE, float32 NONE", "float32"),
        ("bfloat16: bfloat16 NONE", "bfloat16"),
        ("fp8: uint8 FP8_PER_TENSOR", None),
        ("auto: bfloat16 NONE, float32 NONE", None),
        ("auto: bfloat16 NONE without 0,3", None),
        ("auto: GDN_ATTN state 3x512 bfloat16 4x64x64 float32, bfloat16 NONE", "bfloat16"),
        ("auto: MAMBA2 state 3x80 float32 8x8x16 float32, float32 NONE", "float32"),
        ("auto: GDN_ATTN state 3x512 bfloat16 4x64x64 float32", None),
        ("fp8: GDN_ATTN state 3x512 bfloat16 4x64x64 float32, uint8 FP8_PER_TENSOR", None),
        ("bfloat16 k_scale=0.5", None),
        ("", None),
    ],
)
def test_a_format_is_found_only_where_every_word_is_understood(text: str, name: str | None) -> None:
    expected: KVFormat | None = None if name is None else FORMATS[name]

    assert find_format(text) is expected


ATTENTION = KVGroup(16, ("a",), 600)
STATES = KVGroup(
    16,
    ("b",),
    600,
    GroupKind.STATE,
    state_parts=(StatePart("bfloat16", 200), StatePart("float32", 400)),
)


def tolerances_of(
    groups: list[KVGroup], kv_dtype: str, model_dtype: str
) -> list[list[tuple[str, float, float]]]:
    """Return of each part of each group's page the dtype, the tolerance of one number, and its floor."""
    pages = find_page_formats(groups, kv_dtype, model_dtype)
    formats = [[part.kv_format for part in page] for page in pages]
    return [[(one.name, one.tolerance.of_one, one.tolerance.floor_ratio) for one in page] for page in formats]


def test_a_state_is_compared_part_by_part_with_the_tolerance_of_the_coarser_dtype() -> None:
    of_one, floor = HYBRID_TOLERANCES["bfloat16"].of_one, STATE_FLOOR_RATIO

    assert tolerances_of([ATTENTION, STATES], "auto: bfloat16 NONE", "torch.bfloat16") == [
        [("bfloat16", of_one, 1 / 16)],
        [("bfloat16", of_one, floor), ("float32", of_one, floor)],
    ]
    assert [part.size_bytes for part in find_page_formats([STATES], "bfloat16", "bfloat16")[0]] == [200, 400]


def test_a_model_without_states_keeps_the_tolerance_of_keys_and_values() -> None:
    expected = [[("bfloat16", FORMATS["bfloat16"].tolerance.of_one, 1 / 16)]]

    assert tolerances_of([ATTENTION], "torch.bfloat16", "something else") == expected


def test_states_in_float32_of_a_model_in_float32_have_the_finest_tolerance() -> None:
    states = KVGroup(16, ("b",), 400, GroupKind.STATE, state_parts=(StatePart("float32", 400),))

    assert tolerances_of([states], "torch.float32", "torch.float32") == [
        [("float32", HYBRID_TOLERANCES["float32"].of_one, STATE_FLOOR_RATIO)]
    ]


def test_without_keys_and_values_that_are_known_nothing_is_compared() -> None:
    assert find_page_formats([ATTENTION, STATES], "fp8: uint8 FP8_PER_TENSOR", "bfloat16") == ((), ())
    assert find_page_formats([ATTENTION, STATES], "bfloat16", "some other") == ((), ())


@pytest.mark.parametrize("parts", [(), (StatePart("bfloat16", 200), StatePart("float8_e4m3fn", 400))])
def test_a_state_with_a_part_that_is_unknown_is_left_out(parts: tuple[StatePart, ...]) -> None:
    states = KVGroup(16, ("b",), 600, GroupKind.STATE, state_parts=parts)

    attention, of_states = find_page_formats([ATTENTION, states], "bfloat16", "bfloat16")

    assert len(attention) == 1
    assert of_states == ()


def test_a_row_of_a_state_that_is_almost_zero_is_no_fault_and_another_state_is() -> None:
    """A key passes through zero: the row that it makes is rounding alone, beside rows a thousand times as large."""
    groups = [
        KVGroup(16, ("b",), 4 * SEGMENT, GroupKind.STATE, state_parts=(StatePart("float32", 4 * SEGMENT),))
    ]
    ((part,),) = find_page_formats(groups, "float32", "float32")
    keys, value = RNG.standard_normal(64), RNG.standard_normal(64)
    keys[5] = 1e-3
    rounded = keys.copy()
    rounded[5] *= 1.5
    state, again = (np.outer(one, value).reshape(1, -1).astype(np.float32) for one in (keys, rounded))
    other = np.outer(keys[::-1], value).reshape(1, -1).astype(np.float32)

    assert compare_pages(encode(state, "float32"), encode(again, "float32"), part.kv_format)[0] < 1
    assert compare_pages(encode(state, "float32"), encode(other, "float32"), part.kv_format)[0] > 100
