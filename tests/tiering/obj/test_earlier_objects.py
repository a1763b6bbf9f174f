"""Objects of several blocks, and the pointers into them, that earlier versions wrote: counted, removed, never read."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.tiering.forged_blocks import with_codec
from tests.tiering.obj.conftest import HANG_GUARD_S, StartTier, tiers_of

from kvtier.cli.main import main
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, content_of, key_of, make_config
from kvtier.tiering.kit.blobs import FolderNames, Got, Target
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, make_header
from kvtier.tiering.kit.place import BlockState
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.obj.blobs import ObjBlobs

POINTER_CODEC = 0xFFFF
POINTER = bytes(range(16)) + bytes(4)
"""Number of a group, and the place of the block in it."""

POINTER_BYTES = ENVELOPE_BYTES + len(POINTER)
BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES
CAPACITY_BYTES = 64 * BLOCK_BYTES
AGE_S = 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the directory that stands for a bucket."""
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def start(folder: Path) -> Iterator[StartTier]:
    """Build tiers on the directory."""
    with tiers_of({"url": f"file://{folder}"}) as start:
        yield start


def plant(folder: Path, *numbers: int) -> Path:
    """Write an old object of these blocks, each with its pointer; return the object."""
    identity = make_namespace(make_config(), ROW_BYTES)
    names = FolderNames("kvtier")
    group = folder / names.folder(identity.name) / "groups" / f"{POINTER[:16].hex()}.kvg"
    rows = {key_of(number): bytes(content_of(number)) for number in numbers}
    objects = {group: b"".join(make_header(key, identity.digest, row) + row for key, row in rows.items())}
    for key in rows:
        pointer = make_header(key, identity.digest, POINTER) + POINTER
        objects[folder / names.block(identity.name, key)] = with_codec(pointer, POINTER_CODEC)
    for path, body in objects.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        written_s = time.time() - (AGE_S if path == group else 2 * AGE_S)
        os.utime(path, (written_s, written_s))
    return group


@pytest.fixture
def read_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the objects that the client reads."""
    paths: list[str] = []
    real_get, real_each = ObjBlobs.get_into, ObjBlobs.read_each

    def get_into(blobs: ObjBlobs, targets: Sequence[Target], end_s: float | None) -> list[Got]:
        paths.extend(target.name for target in targets)
        return real_get(blobs, targets, end_s)

    def read_each(
        blobs: ObjBlobs, names: Sequence[str], max_bytes: int, start: int = 0
    ) -> dict[str, memoryview]:
        paths.extend(names)
        return real_each(blobs, names, max_bytes, start)

    for name, call in (("get_into", get_into), ("read_each", read_each)):
        monkeypatch.setattr(ObjBlobs, name, call)
    return paths


def test_no_block_is_read_from_them_and_a_pointer_makes_room_for_its_block(
    start: StartTier, folder: Path, read_paths: list[str]
) -> None:
    group = plant(folder, 1, 2)
    driver = start()

    assert not driver.lookup(1)
    assert not driver.load([2]).success
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}

    assert group.stat().st_size == 2 * BLOCK_BYTES
    assert str(group.relative_to(folder)) not in read_paths
    assert driver.tier.stats()["hits"] == 1


def test_they_count_against_the_capacity_and_go_first(
    start: StartTier, folder: Path, read_paths: list[str]
) -> None:
    group = plant(folder, *range(1000, 1032))
    driver = start(capacity_bytes=CAPACITY_BYTES)
    for number in range(40):
        driver.poll_until(lambda number=number: driver.store([number]).success)  # type: ignore[misc]  # a default
    driver.poll_until(lambda: not group.exists())
    assert driver.tier.shutdown(HANG_GUARD_S)

    left = [path for path in folder.rglob("*.kv*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) <= CAPACITY_BYTES
    assert {path.stat().st_size for path in left} == {BLOCK_BYTES}
    assert driver.tier.stats()["evicted"] >= 33
    assert str(group.relative_to(folder)) not in read_paths


def test_commands_show_them_and_purge_them_unread(
    start: StartTier, folder: Path, read_paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    group = plant(folder, 1, 2)
    start().store([3])
    url = f"file://{folder}"
    place = ObjTier.open_place({"url": url})

    states = {folder / block.address: place.check(block) for block in place.blocks()}
    assert main(["inspect", url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main(["purge", url, "--all", "--json"]) == 0
    purged = json.loads(capsys.readouterr().out)

    assert states.pop(group) is BlockState.OTHER_FORMAT
    assert sorted(state.value for state in states.values()) == ["other_format", "other_format", "whole"]
    num_bytes = 3 * BLOCK_BYTES + 2 * POINTER_BYTES
    assert (shown["blocks"], shown["bytes"]) == (purged["blocks"], purged["bytes"]) == (3, num_bytes)
    assert not [path for path in folder.rglob("*") if path.is_file()]
    assert str(group.relative_to(folder)) not in read_paths
