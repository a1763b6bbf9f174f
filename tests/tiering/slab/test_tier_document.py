"""Beside a slab stands in words whose blocks the present engine finds in it."""

import json
from pathlib import Path

import pytest

from kvtier.namespace import Namespace
from kvtier.testing.tier_suite import make_config, make_rows
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.tier import document_path, write_document


def test_the_document_beside_a_slab_is_private_and_names_the_model_of_its_last_engine(tmp_path: Path) -> None:
    path = tmp_path / "blocks.slab"
    for model in ("model-a", "model-b"):
        tier = SlabTier(make_config(model), make_rows(), path=path, capacity_bytes="4MiB")
        assert json.loads(document_path(path).read_text())["model"]["name"] == model
        assert document_path(path).stat().st_mode & 0o777 == 0o600
        assert tier.shutdown(60.0)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["blocks.slab", "blocks.slab.namespace.json"]


def test_a_document_that_cannot_be_written_is_named_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_document(tmp_path / "missing" / "blocks.slab", Namespace("{}", bytes(32)))
    assert "blocks.slab.namespace.json was not written" in caplog.text
