"""What another namespace of the directory holds is found for the blocks that this one misses, at a bounded cost."""

import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.misses import MissCause
from kvtier.namespace import LAYOUT_VERSION, Namespace, make_namespace
from kvtier.observe.remedies import OTHER_LAYOUT_REMEDY, remedy_of
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import key_of, make_config
from kvtier.tiering.fs.folders import (
    MAX_COUNTED_BLOCKS,
    NAMESPACE_DOCUMENT_NAME,
    FSNamespace,
    FSSiblings,
    block_path,
    estimate_bytes,
    namespace_path,
)
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.kit.siblings import LISTING_S, MAX_SIBLINGS, SiblingNamespaces

CONFIG = make_config()
KEYS = [key_of(number) for number in range(8)]


def identity_of(dtype: str) -> Namespace:
    return make_namespace(replace(CONFIG, model=replace(CONFIG.model, dtype=dtype)), 8192)


def open_namespace(root: Path, dtype: str) -> FSNamespace:
    identity = identity_of(dtype)
    path = namespace_path(root, identity.name)
    return FSNamespace(identity, identity.name, path, KeyIndex(10, is_complete=True))


def look_in(root: Path, clock: ManualClock | None = None) -> SiblingNamespaces:
    return SiblingNamespaces("fs", FSSiblings(root), clock or ManualClock())


def write(root: Path, dtype: str, num_blocks: int) -> None:
    """Put blocks of another engine into the directory."""
    namespace = open_namespace(root, dtype)
    for key in KEYS[:num_blocks]:
        path = Path(block_path(namespace.path, key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    Path(namespace.path, NAMESPACE_DOCUMENT_NAME).write_text(namespace.identity.document)


def test_a_block_of_a_sibling_is_explained_with_the_field_and_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "float16", 5)
    siblings = look_in(tmp_path)
    with caplog.at_level(logging.INFO):
        siblings.look_for(identity_of("bfloat16"), KEYS)

    found = siblings.explain(KEYS[4])
    assert found is not None
    assert (found.cause, found.tier) == (MissCause.OTHER_NAMESPACE, "fs")
    assert found.detail["model.dtype"] == "float16 (here bfloat16)"
    assert siblings.explain(KEYS[5]) is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert "has 5 blocks and differs in model.dtype float16 (here bfloat16)" in line


def make_older(root: Path) -> None:
    """Turn every namespace of a directory into one of the layout before."""
    for path in root.glob(f"*/{NAMESPACE_DOCUMENT_NAME}"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"layout_version": LAYOUT_VERSION - 1}))


def test_what_an_upgrade_left_behind_is_said_once_with_its_size_and_what_removes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for dtype in ("float16", "float32"):
        write(tmp_path, dtype, 5)
    for file in tmp_path.rglob("*.kv"):
        os.truncate(file, 20_000_000)
    make_older(tmp_path)
    write(tmp_path, "bfloat16", 1)  # this engine's own: the line comes all the same
    clock = ManualClock()
    siblings, own = look_in(tmp_path, clock), identity_of("bfloat16")
    for epoch in (own, own, identity_of("another")):
        siblings.look_for(epoch, KEYS)
        clock.advance(LISTING_S)

    (record,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    line = record.getMessage()
    assert "tier fs: 190.7 MiB of an older layout" in line
    assert f"2 namespaces: its blocks are not readable and {FSSiblings.fate}" in line
    found = siblings.explain(KEYS[4])
    assert found is not None
    assert remedy_of(found) == OTHER_LAYOUT_REMEDY


def test_a_newer_layout_is_left_to_its_own_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "float16", 5)
    (path,) = tmp_path.glob(f"*/{NAMESPACE_DOCUMENT_NAME}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout_version": LAYOUT_VERSION + 1}))
    siblings = look_in(tmp_path)
    with caplog.at_level(logging.INFO):
        siblings.look_for(identity_of("bfloat16"), KEYS)

    assert not caplog.records
    found = siblings.explain(KEYS[0])
    assert found is not None
    assert "newer" in str(found.detail["layout_version"])


def test_a_mistake_of_today_is_named_beside_the_older_layout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MAX_SIBLINGS + 4):
        write(tmp_path, f"type{number}", 1)
    make_older(tmp_path)
    write(tmp_path, "float16", 5)
    siblings = look_in(tmp_path)
    with caplog.at_level(logging.INFO):
        siblings.look_for(identity_of("bfloat16"), KEYS)

    assert len([text for text in caplog.messages if "differs in model.dtype float16" in text]) == 1
    found = siblings.explain(KEYS[4])
    assert found is not None
    assert found.detail["model.dtype"] == "float16 (here bfloat16)"


def test_the_size_of_many_blocks_is_estimated_from_a_part_of_the_folders(tmp_path: Path) -> None:
    path = namespace_path(tmp_path, identity_of("float16").name)
    num_blocks = 4 * MAX_COUNTED_BLOCKS
    for number in range(num_blocks):
        file = Path(block_path(path, OffloadKey(hashlib.sha256(b"%d" % number).digest())))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(10))
    num_bytes, is_exact = estimate_bytes(path)

    assert not is_exact
    assert num_bytes == pytest.approx(10 * num_blocks, rel=0.2)


def test_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "float16", 5)
    clock = ManualClock()
    siblings, own = look_in(tmp_path, clock), identity_of("bfloat16")
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            siblings.look_for(own, KEYS)
            clock.advance(LISTING_S)

    assert len(caplog.records) == 1


def test_a_namespace_that_holds_something_is_not_told_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "float16", 5)
    write(tmp_path, "bfloat16", 1)
    with caplog.at_level(logging.INFO):
        look_in(tmp_path).look_for(identity_of("bfloat16"), KEYS)

    assert not caplog.records


def test_a_sibling_that_comes_later_is_found_after_a_while(tmp_path: Path) -> None:
    clock = ManualClock()
    siblings, own = look_in(tmp_path, clock), identity_of("bfloat16")
    siblings.look_for(own, KEYS)
    write(tmp_path, "float16", 5)
    siblings.look_for(own, KEYS)
    before = siblings.explain(KEYS[0])
    clock.advance(LISTING_S)
    siblings.look_for(own, KEYS)

    assert before is None
    assert siblings.explain(KEYS[0]) is not None


def test_a_few_siblings_are_looked_into_and_one_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    for number in range(MAX_SIBLINGS + 4):
        write(tmp_path, f"type{number}", 1)
    for document in tmp_path.glob(f"*/{NAMESPACE_DOCUMENT_NAME}"):
        document.write_text("no JSON")
    siblings = look_in(tmp_path)
    siblings.look_for(identity_of("bfloat16"), KEYS)

    assert siblings.explain(KEYS[0]) is None


def test_what_this_namespace_has_stored_by_now_is_forgotten(tmp_path: Path) -> None:
    write(tmp_path, "float16", 5)
    siblings = look_in(tmp_path)
    siblings.look_for(identity_of("bfloat16"), KEYS)
    siblings.forget(KEYS[:1])

    assert siblings.explain(KEYS[0]) is None
    assert siblings.explain(KEYS[1]) is not None
