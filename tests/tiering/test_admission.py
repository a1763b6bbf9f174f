"""The setting that says what is worth writing, and the way through the primary of what only a tier wants."""

from collections.abc import Collection

import pytest

from kvtier.base import OffloadKey, make_offload_key
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.admission import TierAdmission, make_passing_admission, parse_admission
from kvtier.tiering.base import parse_tier_settings


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [key_of(number) for number in numbers]


def passing(keys: list[OffloadKey], own: list[OffloadKey], below: list[OffloadKey]) -> list[OffloadKey]:
    """Return what is admitted of ``keys`` when the policy wants ``own`` and a tier ``below``."""

    def admit(offered: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        return [key for key in offered if key in own]

    passing_admit = make_passing_admission(admit, lambda refused: [key for key in refused if key in below])
    return list(passing_admit(keys, "r"))


def test_the_setting_is_read_into_typed_values() -> None:
    value = {"min_reuse_probability": 0.3, "horizon_s": 1024}
    assert parse_tier_settings({"admission": value}).admission == TierAdmission(0.3, 1024.0)
    assert parse_tier_settings({}).admission is None


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (0.3, "admission"),
        ([0.3, 1024], "admission"),
        ({"min_reuse_probability": 0.3}, "horizon_s"),
        ({"horizon_s": 1024}, "min_reuse_probability"),
        ({"min_reuse_probability": -0.1, "horizon_s": 1024}, "min_reuse_probability"),
        ({"min_reuse_probability": 1.1, "horizon_s": 1024}, "min_reuse_probability"),
        ({"min_reuse_probability": float("nan"), "horizon_s": 1024}, "min_reuse_probability"),
        ({"min_reuse_probability": "0.3", "horizon_s": 1024}, "min_reuse_probability"),
        ({"min_reuse_probability": True, "horizon_s": 1024}, "min_reuse_probability"),
        ({"min_reuse_probability": 0.3, "horizon_s": 0}, "horizon_s"),
        ({"min_reuse_probability": 0.3, "horizon_s": float("inf")}, "horizon_s"),
        ({"min_reuse_probability": 0.3, "horizon_s": float("nan")}, "horizon_s"),
        ({"min_reuse_probability": 0.3, "horizon_s": None}, "horizon_s"),
    ],
)
def test_a_value_that_cannot_work_is_refused(value: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_admission(value)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'horizon_s'"):
        parse_admission({"min_reuse_probability": 0.3, "horizon": 1024})


@pytest.mark.parametrize(
    ("own", "below", "admitted"),
    [
        ([1, 2], [], [1, 2]),
        ([1, 2], [3, 4], [1, 2, 3, 4]),
        ([1, 2], [3], [1, 2, 3]),
        ([1, 2], [4], [1, 2]),
        ([], [1, 2], [1, 2]),
        ([1, 2, 3, 4], [], [1, 2, 3, 4]),
    ],
)
def test_what_the_policy_refuses_passes_as_far_as_a_tier_wants_all_before_it(
    own: list[int], below: list[int], admitted: list[int]
) -> None:
    assert passing(keys_of(1, 2, 3, 4), keys_of(*own), keys_of(*below)) == keys_of(*admitted)


def test_the_end_of_one_group_is_not_the_end_of_another() -> None:
    first, second = ([make_offload_key(bytes([n]) * 8, group) for n in (1, 2)] for group in (0, 1))
    keys = [first[0], second[0], first[1], second[1]]

    assert passing(keys, [], [first[1], *second]) == second
