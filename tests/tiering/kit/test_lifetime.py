"""A time to live counts from the store, and no clock that is set makes a block immortal."""

import pytest

from kvtier.errors import ConfigError
from kvtier.quantities import MAX_TTL_S, parse_ttl
from kvtier.tiering.kit.lifetime import MAX_SKEW_S, Lifetime, make_lifetime

NOW_S = 1e9


@pytest.mark.parametrize(
    ("age_s", "is_over"),
    [
        (0.0, False),
        (99.9, False),
        (100.0, True),
        (1e8, True),
        (-99.0, False),  # another machine's clock is ahead
        (-100.1, True),  # no more than its own time
        (-1e8, True),  # the clock was set back by years
    ],
)
def test_a_block_is_over_by_its_age_and_from_the_future(age_s: float, *, is_over: bool) -> None:
    assert Lifetime(100.0).is_over(NOW_S - age_s, NOW_S) is is_over


def test_the_skew_that_is_believed_is_bounded() -> None:
    assert Lifetime(1e6).is_over(NOW_S + MAX_SKEW_S + 1, NOW_S)
    assert not Lifetime(1e6).is_over(NOW_S + MAX_SKEW_S - 1, NOW_S)


def test_without_a_time_there_is_no_lifetime() -> None:
    assert make_lifetime(None) is None
    assert make_lifetime(5.0) == Lifetime(5.0)


@pytest.mark.parametrize(
    "value", [0, -1, 0.5, True, "60", float("nan"), float("inf"), MAX_TTL_S * 2, 10**400, [], {}]
)
def test_a_time_that_cannot_work_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^ttl_s=.{1,90}: must be a number of seconds"):
        parse_ttl("ttl_s", value)
