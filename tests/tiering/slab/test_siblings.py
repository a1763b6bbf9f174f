"""What other namespaces left in a slab is named for the blocks that this engine misses."""

import logging
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import StartTier, end

from kvtier.misses import Miss, MissCause, MissExplainer
from kvtier.testing.tier_suite import TierDriver, key_of
from kvtier.tiering.slab.documents import document_path


def explain(driver: TierDriver, number: int) -> Miss | None:
    assert isinstance(driver.tier, MissExplainer)
    return driver.tier.explain(key_of(number), driver.request)


def test_a_block_that_another_engine_left_is_named_with_the_field_that_differs(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    first = start_tier("model-b")
    first.store([1, 2])
    end(first)
    with caplog.at_level(logging.INFO):
        second = start_tier("model-a")

    miss = explain(second, 2)
    assert miss is not None
    assert (miss.cause, miss.tier) == (MissCause.OTHER_NAMESPACE, "slab")
    assert miss.detail["model.name"] == "model-b (here model-a)"
    assert explain(second, 3) is None
    assert [record.getMessage() for record in caplog.records if "holds nothing here" in record.getMessage()]
    second.tier.reset(bytes(16))
    assert explain(second, 2) is None


def test_a_slab_of_this_engine_alone_has_no_siblings(start_tier: StartTier) -> None:
    first = start_tier()
    first.store([1])
    end(first)

    assert explain(start_tier(), 2) is None


def test_what_has_no_description_is_not_named(start_tier: StartTier, path: Path) -> None:
    first = start_tier("model-b")
    first.store([1])
    end(first)
    document_path(path).unlink()

    assert explain(start_tier("model-a"), 1) is None
