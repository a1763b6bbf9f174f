"""Engines that computed a page share a namespace of a store only where their models are the same."""

import dataclasses
import logging
from collections.abc import Callable, Iterator

import pytest
from tests.tiering.mooncake.conftest import TIMEOUT_S, salted
from tests.tiering.mooncake.live import HANG_GUARD_S, LiveStore, Vandal

from kvtier.namespace import NamespacePage, ProbedModel, make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, make_config, make_rows
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.mooncake.blobs import MooncakeNames

pytestmark = pytest.mark.servers

PAGE_BYTES = 3 * 2**20 + 5
"""More than the primary has, as that of a large model may be."""

StartProbed = Callable[[int], TierDriver]


def page_of(model: int) -> NamespacePage:
    data = bytes([model]) * PAGE_BYTES
    return NamespacePage(data, lambda other: "" if other == data else "its keys differ")


@pytest.fixture
def start_probed(shared_store: LiveStore, salt: str) -> Iterator[StartProbed]:
    """Build tiers of models that have one name."""
    drivers: list[TierDriver] = []

    def start(model: int) -> TierDriver:
        config = salted(make_config("model-a"), salt)
        fields = {one.name: getattr(config.model, one.name) for one in dataclasses.fields(config.model)}
        probed = dataclasses.replace(config, model=ProbedModel(**fields, page=page_of(model)))
        rows = make_rows()
        own = {"master": shared_store.address, "timeout_s": TIMEOUT_S, "allow_any_interface": True}
        drivers.append(TierDriver(MooncakeTier(probed, rows, **own), rows))  # type: ignore[arg-type]  # the tier's own
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


def test_engines_of_one_model_share_blocks(start_probed: StartProbed) -> None:
    assert start_probed(1).store([1, 2]).success
    assert start_probed(1).load_right([1, 2]) == {1, 2}


def test_an_engine_of_another_model_neither_finds_nor_stores_blocks(
    start_probed: StartProbed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    assert start_probed(1).store([1]).success
    other = start_probed(2)
    assert not other.lookup(1)
    assert not other.store([2]).success
    assert other.load_right([1]) == set()
    assert "its keys differ" in caplog.text
    reader = start_probed(1)
    assert reader.lookup(1)
    assert not reader.lookup(2)


def test_a_damaged_page_is_made_anew_when_its_lease_has_ended(
    start_probed: StartProbed, vandal: Vandal, salt: str
) -> None:
    namespace = make_namespace(salted(make_config("model-a"), salt), ROW_BYTES).name
    vandal.put(MooncakeNames().page(namespace), b"no page")
    driver = start_probed(1)
    driver.poll_until(lambda: driver.store([1]).success)
    assert start_probed(1).load_right([1]) == {1}
