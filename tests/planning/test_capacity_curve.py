"""The curve's points are replays of the production host tier at geometric capacities."""

import pytest

from kvtier.errors import ConfigError
from kvtier.planning.capacity_curve import CurvePoint, default_capacities, draw_curve, list_capacities
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.trace import TraceRequest, make_trace

TRACE = make_trace([TraceRequest(float(n), 16, 1, (n % 6,)) for n in range(24)], 16)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((1, 8), (1, 2, 4, 8)),
        ((3, 20), (3, 6, 12, 20)),
        ((5, 5), (5,)),
    ],
)
def test_capacities_double_up_to_the_largest(row: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert list_capacities(*row) == expected


@pytest.mark.parametrize("row", [(0, 8), (9, 8)])
def test_a_row_that_cannot_be_is_refused(row: tuple[int, int]) -> None:
    with pytest.raises(ConfigError):
        list_capacities(*row)


def test_each_point_is_a_replay_of_the_host_tier() -> None:
    counted: list[None] = []

    points = draw_curve(TRACE, "lru", (3, 6), lambda: counted.append(None))

    replays = [replay_host(TRACE, HostCache(num_blocks)) for num_blocks in (3, 6)]
    assert points == (
        CurvePoint(3, replays[0].hit_ratio, replays[0].writes_per_unique_block),
        CurvePoint(6, 18 / 24, 1.0),
    )
    assert len(counted) == 2 * 24


def test_the_row_of_a_trace_ends_with_all_of_its_blocks() -> None:
    assert default_capacities(TRACE) == (1, 2, 4, 6)
    assert [point.num_blocks for point in draw_curve(TRACE, "lru")] == [1, 2, 4, 6]
