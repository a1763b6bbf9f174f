"""No transfer before every worker has the scheduler's own region."""

import logging

import pytest
from tests.connector.fakes import FakeRegionSpec, FakeSpec, make_config

from kvtier.connector.handshake import RegionHandshake


def test_a_spec_without_region_may_start_at_once() -> None:
    assert RegionHandshake(FakeSpec(make_config(num_workers=2))).is_open


def test_a_spec_that_owns_none_in_this_configuration_may_start_at_once() -> None:
    spec = FakeRegionSpec(make_config())
    spec.identity = None

    assert RegionHandshake(spec).is_open


def test_it_opens_and_seals_once_with_the_last_worker() -> None:
    spec = FakeRegionSpec(make_config(num_workers=2))
    handshake = RegionHandshake(spec)

    handshake.record([(1, 2)])
    assert (handshake.is_open, spec.num_seals) == (False, 0)
    handshake.record([(1, 2)])
    handshake.record([])
    assert (handshake.is_open, spec.num_seals) == (True, 1)


@pytest.mark.parametrize("reports", [[(1, 2), (1, 3)], [(9, 2), (1, 2)]])
def test_one_worker_with_another_region_keeps_it_shut(
    reports: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    spec = FakeRegionSpec(make_config(num_workers=2))
    handshake = RegionHandshake(spec)

    with caplog.at_level(logging.ERROR):
        handshake.record(reports)
        handshake.record([(1, 2)])

    assert (handshake.is_open, spec.num_seals) == (False, 0)
    assert "instance_id" in caplog.text
