"""How far two pages are apart: nothing for equal bytes, little for other batches, much for other bytes."""

import numpy as np
import pytest

from kvtier.cpu.compare import FORMATS, SEGMENT, Bytes, KVFormat, compare_pages, find_format

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
        ("bfloat16 k_scale=0.5", None),
        ("", None),
    ],
)
def test_a_format_is_found_only_where_every_word_is_understood(text: str, name: str | None) -> None:
    expected: KVFormat | None = None if name is None else FORMATS[name]

    assert find_format(text) is expected
