"""Beside a slab stands in words whose blocks the present engine finds in it."""

import hashlib
import json
from pathlib import Path

import pytest

from kvtier.namespace import Namespace, make_namespace, parse_document
from kvtier.testing.tier_suite import ROW_BYTES, make_config, make_rows
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.documents import MAX_DOCUMENTS, document_path, read_documents, write_document


def models_in(path: Path) -> list[str]:
    return [parse_document(text)["model"]["name"] for text in read_documents(document_path(path)).values()]


def test_the_documents_beside_a_slab_are_private_and_that_of_the_last_engine_stands_at_the_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "blocks.slab"
    for model in ("model-a", "model-b", "model-a"):
        tier = SlabTier(make_config(model), make_rows(), path=path, capacity_bytes="4MiB")
        assert models_in(path)[-1] == model
        assert document_path(path).stat().st_mode & 0o777 == 0o600
        assert tier.shutdown(60.0)
    assert models_in(path) == ["model-b", "model-a"]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["blocks.slab", "blocks.slab.namespace.json"]


def test_the_oldest_documents_go_when_there_are_many(tmp_path: Path) -> None:
    path = tmp_path / "blocks.slab"
    models = [f"model-{number}" for number in range(MAX_DOCUMENTS + 3)]
    for model in models:
        write_document(path, make_namespace(make_config(model), ROW_BYTES))
    assert models_in(path) == models[3:]


def test_the_document_that_an_older_version_left_is_kept_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "blocks.slab"
    text = json.dumps({"layout_version": 1, "model": {"name": "old"}}, indent=1)
    document_path(path).write_text(text + "\n")
    write_document(path, make_namespace(make_config(), ROW_BYTES))
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    assert json.loads(read_documents(document_path(path))[name])["model"]["name"] == "old"


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"a": 1}', "[" * 100_000, "\xff"])
def test_a_spoilt_file_of_documents_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "blocks.slab"
    document_path(path).write_bytes(text.encode("latin-1"))
    write_document(path, make_namespace(make_config(), ROW_BYTES))
    assert models_in(path) == ["model-a"]


def test_a_document_that_cannot_be_written_is_named_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_document(tmp_path / "missing" / "blocks.slab", Namespace("{}", bytes(32)))
    assert "blocks.slab.namespace.json was not written" in caplog.text
