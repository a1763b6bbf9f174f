"""What other namespaces left in a slab is named for the blocks that this engine misses."""

import json
import logging
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import StartTier, end

from kvtier.cli.main import main
from kvtier.misses import Miss, MissCause
from kvtier.namespace import LAYOUT_VERSION
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, key_of
from kvtier.tiering.kit.siblings import amount_in_words
from kvtier.tiering.slab.documents import document_path
from kvtier.tiering.slab.superblock import SlabGeometry


def explain(driver: TierDriver, number: int) -> Miss | None:
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


def test_what_an_upgrade_left_in_a_slab_is_said_with_its_size_and_what_removes_it(
    start_tier: StartTier, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start_tier("model-b")
    first.store([1, 2])
    end(first)
    documents = json.loads(document_path(path).read_text())
    older = {name: one | {"layout_version": LAYOUT_VERSION - 1} for name, one in documents.items()}
    document_path(path).write_text(json.dumps(older))
    with caplog.at_level(logging.INFO):
        second = start_tier("model-a")

    miss = explain(second, 2)
    assert miss is not None
    assert set(miss.detail) == {"namespace", "layout_version"}
    assert not second.lookup(2)
    (line,) = (text for text in caplog.messages if "older layout" in text)
    size = amount_in_words(2 * SlabGeometry(ROW_BYTES, 0).slot_bytes)
    assert line.startswith(f"tier slab: {size} of an older layout (here {LAYOUT_VERSION}), 1 namespace: ")
    assert line.endswith(f"kvtier purge {path} --older-layouts")
    assert not [text for text in caplog.messages if "holds nothing here" in text]
    end(second)
    assert main(["purge", str(path), "--older-layouts"]) == 0
    assert not set(json.loads(document_path(path).read_text())) & set(documents)


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
