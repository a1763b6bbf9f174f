"""``--sweep``: several capacities of one place, listed or as a range. It simulates nothing."""

import re
from collections.abc import Mapping
from itertools import pairwise

from kvtier.cli.simulate.options import blocks_of
from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.sim.sweep import Size, Sweep

SWEEP_FORM = "PLACE=SIZE,SIZE,... or PLACE=FROM..TO:HOW_MANY such as host=64GiB,128GiB or fs=1TiB..16TiB:5"

MAX_SIZES = 16
"""Sizes of one sweep. A page has four plots for each; with three policies and a tier it stays below
two megabytes at so many, and is drawn in a quarter of a minute."""

UNITS: Mapping[str, int] = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def parse_sweep(text: str, block_bytes: int) -> Sweep:
    """Return the sweep that ``text`` describes, see SWEEP_FORM; its sizes in ascending order.

    Raises:
        ConfigError: it does not have that form, a size holds no block, or two hold equally many.
    """
    place, equals, sizes = (part.strip() for part in text.partition("="))
    if not place or not equals or not sizes:
        raise ConfigError("--sweep", text, f"must be {SWEEP_FORM}")
    labels = _spread_range(text, sizes) if ".." in sizes else [part.strip() for part in sizes.split(",")]
    if len(labels) > MAX_SIZES:
        raise ConfigError("--sweep", text, f"has {len(labels)} sizes: give at most {MAX_SIZES}")
    found = sorted(
        (Size(blocks_of("--sweep", label, block_bytes), label) for label in labels),
        key=lambda size: size.num_blocks,
    )
    for smaller, size in pairwise(found):
        if size.num_blocks == smaller.num_blocks:
            remedy = (
                f"{smaller.label} and {size.label} both hold {size.num_blocks} blocks: give sizes that differ"
            )
            raise ConfigError("--sweep", text, remedy)
    return Sweep(place, tuple(found))


def format_size(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit, to four digits, such as "1.5GiB". Pure."""
    for unit, unit_bytes in UNITS.items():
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.4g}{unit}"
    return f"{num_bytes:.4g}"


def _spread_range(text: str, sizes: str) -> list[str]:
    """Return sizes with equal ratios between them, both ends included."""
    found = re.fullmatch(r"(.+?)\.\.(.+?):([0-9]+)", sizes)
    if found is None:
        raise ConfigError("--sweep", text, f"must be {SWEEP_FORM}")
    first, last, num = parse_bytes("--sweep", found[1]), parse_bytes("--sweep", found[2]), int(found[3])
    if not 2 <= num <= MAX_SIZES or first >= last:
        raise ConfigError("--sweep", text, f"a range rises and has from 2 to {MAX_SIZES} sizes")
    return [format_size(first * (last / first) ** (part / (num - 1))) for part in range(num)]
