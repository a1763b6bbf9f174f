"""Each growth suite says by how many times its cost grows, and a cost that follows the square root is too much."""

from collections.abc import Callable
from math import log2, sqrt
from types import ModuleType

import pytest

from benchmarks.growth import blocks, requests, tiers
from benchmarks.growth.factor import GROWTH_BAR, growth_of
from benchmarks.harness.measurement import OURS
from benchmarks.harness.suite import Options


@pytest.mark.parametrize(
    ("cost", "is_met"),
    [
        pytest.param(lambda _: 1.0, True, id="constant"),
        pytest.param(log2, True, id="logarithm"),
        pytest.param(sqrt, False, id="square root"),
        pytest.param(float, False, id="linear"),
    ],
)
@pytest.mark.parametrize(("first", "last"), [(2**14, 2**20), (2**14, 2**18), (125, 4000)])
def test_the_bar_is_between_the_logarithm_and_the_square_root(
    cost: Callable[[int], float], is_met: bool, first: int, last: int
) -> None:
    costs = {size: (cost(size), 2 * cost(size)) for size in (last, first, 2 * first)}
    measurement = growth_of("a search", "blocks", costs)

    assert measurement.labels == {"growth of": "a search", "with": "blocks", "from": first, "to": last}
    assert measurement.values[OURS] == (cost(last) / cost(first),) * 2
    assert measurement.is_met is is_met


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "sizes", "label", "num_growths"),
    [
        (blocks, "QUICK_CAPACITIES", "blocks", 6),
        (tiers, "QUICK_TIER_COUNTS", "tiers", 2),
        (requests, "QUICK_REQUEST_COUNTS", "requests", 3),
    ],
)
def test_lines_to_draw_come_first_and_then_a_growth_each(
    suite: ModuleType, sizes: str, label: str, num_growths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, sizes, (64, 128) if suite is blocks else (1, 2))
    monkeypatch.setattr(blocks, "BASE_CAPACITY", 64)

    lines = list(suite.measure(Options(True, None, pytest.fail)))

    drawn, grown = lines[:-num_growths], lines[-num_growths:]
    assert {line.unit for line in drawn} == {drawn[0].unit}
    assert all(isinstance(line.labels[label], int) for line in drawn)
    assert [(line.unit, line.labels["with"]) for line in grown] == [("times", label)] * num_growths
    assert all(line.bar is not None and line.bar.value == GROWTH_BAR for line in grown)
    assert all(line.values[OURS][0] > 0 for line in grown)


def test_arc_is_left_out_where_it_would_take_most_of_the_run() -> None:
    assert max(blocks.CAPACITIES) == blocks.LARGEST_OF_POLICY["lru"]
    assert min(blocks.LARGEST_OF_POLICY.values()) >= 16 * blocks.BASE_CAPACITY
