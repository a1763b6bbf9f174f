"""The objects of the obj tier, seen, checked and emptied without an engine, on a real server and in a directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.tiering.forged_blocks import AnyOpener, forge_header
from tests.tiering.obj.conftest import Bucket, StartTier, s3_options, tiers_of
from tests.tiering.obj.server import S3Server

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.testing.damage import flip_bit, flip_bit_in_files
from kvtier.testing.place_suite import PlaceSuite
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.kit import block_pieces
from kvtier.tiering.kit.blobs import place as blob_place
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.place import Amount, BlockState, Place, PlaceBlock
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.obj.blobs import ObjBlobs


class OfObjects(PlaceSuite):
    """Over what a URL names."""

    tier_class = ObjTier
    counts_exactly = False

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ObjTier(config, rows, **self.own_settings(directory))  # type: ignore[arg-type]  # a test's own


class TestS3(OfObjects):
    """On a real server."""

    @pytest.fixture(autouse=True)
    def _use_server(self, server: S3Server, prefix: str, bucket: Bucket) -> None:
        self.options = s3_options(server, prefix)
        self.bucket = bucket

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        return self.options

    def damage(self, directory: Path, key: OffloadKey) -> None:
        for name in self.bucket.names():
            damaged = flip_bit(self.bucket.read(name), key)
            if damaged is not None:
                self.bucket.write(name, damaged)
                return
        pytest.fail("no object has the block")


class TestDirectory(OfObjects):
    """In a directory."""

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        (directory / "store").mkdir(exist_ok=True)
        return {"url": f"file://{directory}/store"}

    def damage(self, directory: Path, key: OffloadKey) -> None:
        assert flip_bit_in_files(directory, key)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Place, PlaceBlock]:
    """A block in a directory."""
    (tmp_path / "store").mkdir()
    options: dict[str, object] = {"url": f"file://{tmp_path}/store"}
    with tiers_of(options) as start:
        start().store([1])
    place = ObjTier.open_place(options)
    place.unlock(AnyOpener())
    (block,) = place.blocks()
    return place, block


def test_a_long_object_is_read_by_pieces(
    stored: tuple[Place, PlaceBlock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, block = stored
    monkeypatch.setattr(blob_place, "MAX_WHOLE_BYTES", 500)
    monkeypatch.setattr(block_pieces, "PIECE_BYTES", 300)
    assert place.check(block) is BlockState.WHOLE
    path = tmp_path / "store" / block.address
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert place.check(block) is BlockState.DAMAGED
    path.write_bytes(whole[:-1])
    assert place.check(block) is BlockState.DAMAGED


@pytest.mark.parametrize(
    ("num_bytes", "is_encrypted"),
    [(2**40 - 1, False), (2**40 - 1, True), (2**27, True)],
    ids=["plain", "encrypted", "encrypted and short"],
)
def test_a_file_of_holes_whose_header_says_its_length_is_damaged_and_not_read(
    stored: tuple[Place, PlaceBlock],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    *,
    is_encrypted: bool,
) -> None:
    place, block = stored
    path = tmp_path / "store" / block.address
    forge_header(str(path), ENVELOPE_BYTES, num_bytes, is_encrypted=is_encrypted)
    real_read, num_read = ObjBlobs.read_each, 0

    def read_each(
        blobs: ObjBlobs, names: Sequence[str], length: int, start: int = 0
    ) -> dict[str, memoryview]:
        nonlocal num_read
        num_read += length
        assert num_read <= 2 * ENVELOPE_BYTES, "the file is read"
        return real_read(blobs, names, length, start)

    monkeypatch.setattr(ObjBlobs, "read_each", read_each)
    assert place.check(block) is BlockState.DAMAGED


def test_other_objects_below_the_prefix_are_counted_and_stay(
    server: S3Server, prefix: str, bucket: Bucket, start_tier: StartTier
) -> None:
    start_tier().store([1])
    bucket.write(f"{prefix}/notes.txt", b"12345")
    place = ObjTier.open_place(s3_options(server, prefix))
    blocks = list(place.blocks())
    assert place.summary().foreign == Amount(1, 5)
    place.remove(blocks, unless_changed=False)
    place.end_removal([blocks[0].namespace])
    assert bucket.names() == [f"{prefix}/notes.txt"]


def test_a_directory_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        ObjTier.open_place({"url": f"file://{tmp_path}/missing"})
    (finding,) = ObjTier.probe({"url": f"file://{tmp_path}/missing"})
    assert finding.is_good
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("below", ["", "/folder"])
def test_a_file_in_place_of_the_directory_is_said(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (finding,) = ObjTier.probe({"url": f"file://{tmp_path}/file{below}"})
    assert not finding.is_good
    assert f"{tmp_path}/file is no directory" in finding.text


@pytest.mark.parametrize("url", ["memory://", "https://example.org"])
def test_what_cannot_be_seen_from_outside_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="PLACE"):
        ObjTier.open_place({"url": url})


def test_a_bucket_that_is_not_there_is_said(server: S3Server, prefix: str) -> None:
    options = s3_options(server, prefix) | {"url": "s3://no-such-bucket-here"}
    with pytest.raises(TierError):
        ObjTier.open_place(options)
    (finding,) = ObjTier.probe(options)
    assert not finding.is_good
