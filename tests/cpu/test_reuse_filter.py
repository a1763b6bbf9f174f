"""The reuse filter: one access a request, bounded tables, longest unused forgotten first."""

import pytest

from kvtier.base import ReqContext
from kvtier.cpu.reuse_filter import ReuseFilter
from kvtier.errors import ConfigError
from kvtier.testing.manager_suite import keys_of
from kvtier.testing.policy_suite import key_of


def observe(reuse_filter: ReuseFilter, request: ReqContext, *numbers: int) -> None:
    for key in keys_of(*numbers):
        reuse_filter.observe(key, request)


def test_keys_are_admitted_from_the_threshold_on() -> None:
    reuse_filter = ReuseFilter(3, 10)
    for access in range(4):
        observe(reuse_filter, ReqContext(str(access)), 1, *[2] * (access > 1))
    assert reuse_filter.admit(keys_of(2, 1, 3, 1)) == keys_of(1, 1)


def test_requests_are_told_apart_by_identity() -> None:
    reuse_filter = ReuseFilter(2, 10)
    for request in (ReqContext("same name"), ReqContext("same name")):
        observe(reuse_filter, request, 1, 1)
    assert reuse_filter.counts == {key_of(1): 2}


def test_ending_an_observation_lets_the_request_count_again() -> None:
    reuse_filter = ReuseFilter(2, 10)
    request = ReqContext("r")
    observe(reuse_filter, request, 1, 2)
    reuse_filter.end_observations(keys_of(1, 3), request)
    observe(reuse_filter, request, 1, 2)
    assert reuse_filter.counts == {key_of(1): 2, key_of(2): 1}


def test_ending_what_was_not_observed_does_nothing() -> None:
    reuse_filter = ReuseFilter(2, 10)
    reuse_filter.end_observations(keys_of(1), ReqContext("r"))
    reuse_filter.request_finished(ReqContext("r"))
    assert reuse_filter.num_observations == 0


def test_the_least_recently_used_count_is_forgotten_first() -> None:
    reuse_filter = ReuseFilter(2, 3)
    request = ReqContext("r")
    observe(reuse_filter, request, 1, 2, 3, 1, 4)
    assert list(reuse_filter.counts) == keys_of(3, 1, 4)


def test_a_forgotten_key_starts_again_at_one() -> None:
    reuse_filter = ReuseFilter(2, 2)
    request = ReqContext("r")
    observe(reuse_filter, request, 1, 2, 3, 1)
    assert reuse_filter.counts[key_of(1)] == 1


def test_observations_are_bounded_over_all_requests() -> None:
    reuse_filter = ReuseFilter(2, 5)
    for name in range(100):
        observe(reuse_filter, ReqContext(str(name)), 1, 2, 3)
        assert reuse_filter.num_observations <= 5


def test_one_request_with_more_keys_than_are_tracked_is_bounded_too() -> None:
    reuse_filter = ReuseFilter(2, 5)
    observe(reuse_filter, ReqContext("r"), *range(100))
    assert reuse_filter.num_observations <= 5
    assert len(reuse_filter.counts) == 5


def test_the_request_that_asked_longest_ago_is_forgotten_first() -> None:
    reuse_filter = ReuseFilter(2, 3)
    idle, waiting = ReqContext("idle"), ReqContext("waiting")
    observe(reuse_filter, waiting, 1)
    observe(reuse_filter, idle, 1)
    observe(reuse_filter, waiting, 1)
    observe(reuse_filter, ReqContext("new"), 1, 2)
    observe(reuse_filter, waiting, 1)
    assert reuse_filter.counts[key_of(1)] == 3
    observe(reuse_filter, idle, 1)
    assert reuse_filter.counts[key_of(1)] == 4


def test_a_finished_request_is_forgotten_and_its_accesses_stay() -> None:
    reuse_filter = ReuseFilter(2, 10)
    request = ReqContext("r")
    observe(reuse_filter, request, 1, 2)
    reuse_filter.request_finished(request)
    assert reuse_filter.num_observations == 0
    assert reuse_filter.counts == {key_of(1): 1, key_of(2): 1}


def test_clear_forgets_everything() -> None:
    reuse_filter = ReuseFilter(2, 10)
    observe(reuse_filter, ReqContext("r"), 1, 2)
    reuse_filter.clear()
    assert (reuse_filter.num_observations, reuse_filter.counts) == (0, {})


def test_a_tracker_that_tracks_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one key"):
        ReuseFilter(2, 0)
