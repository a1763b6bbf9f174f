"""What a user writes after ``--sweep`` becomes sizes in ascending order, or is refused with what was expected."""

import pytest

from kvtier.cli.simulate.options import MAX_SIZES, format_size, parse_sweep
from kvtier.errors import ConfigError
from kvtier.sim.sweep import Size, Sweep


@pytest.mark.parametrize(
    ("text", "sweep"),
    [
        ("host=1KiB,2KiB", Sweep("host", (Size(10, "1KiB"), Size(20, "2KiB")))),
        ("host = 2KiB, 1KiB", Sweep("host", (Size(10, "1KiB"), Size(20, "2KiB")))),
        ("fs=1000", Sweep("fs", (Size(10, "1000"),))),
        ("device=1KiB..4KiB:3", Sweep("device", (Size(10, "1KiB"), Size(20, "2KiB"), Size(40, "4KiB")))),
        ("fs=1KiB..16KiB:2", Sweep("fs", (Size(10, "1KiB"), Size(163, "16KiB")))),
    ],
)
def test_a_sweep_is_a_place_and_its_sizes(text: str, sweep: Sweep) -> None:
    assert parse_sweep(text, block_bytes=100) == sweep


def test_the_sizes_of_a_range_have_equal_ratios() -> None:
    sizes = parse_sweep("host=64GiB..1TiB:5", block_bytes=2**20).sizes

    assert [size.label for size in sizes] == ["64GiB", "128GiB", "256GiB", "512GiB", "1TiB"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host", "must be PLACE=SIZE"),
        ("=1GiB", "must be PLACE=SIZE"),
        ("host=", "must be PLACE=SIZE"),
        ("host=1GiB..2GiB", "must be PLACE=SIZE"),
        ("host=2GiB..1GiB:3", f"a range must ascend and have from 2 to {MAX_SIZES} sizes"),
        ("host=1GiB..2GiB:1", "a range must ascend"),
        ("host=1GiB..2GiB:999", "a range must ascend"),
        ("host=1GiB..much:3", "whole number of bytes from 1"),
        ("host=99", "is smaller than a block of the trace .100 bytes"),
        ("host=1000,1050", "1000 and 1050 both hold 10 blocks"),
        ("host=" + ",".join(f"{size}KiB" for size in range(1, MAX_SIZES + 2)), "give at most"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sweep(text, block_bytes=100)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (512.0, "512"),
        (1024, "1KiB"),
        (1.5 * 2**30, "1.5GiB"),
        (2**50, "1024TiB"),
        (100 * 2**30 / 3, "33.33GiB"),
    ],
)
def test_a_size_is_written_with_a_binary_unit(num_bytes: float, text: str) -> None:
    assert format_size(num_bytes) == text
