"""The obj tier keeps the contract of a tier that encrypts, in a directory, also with several blocks in an object."""

from pathlib import Path

import pytest
from tests.tiering.encrypted_suite import EncryptedSuite

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_suite import TierDriver, key_of
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.obj.layout import POINTER_BYTES


class TestDirectory(EncryptedSuite):
    """A directory instead of a bucket."""

    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        return ObjTier(config, rows, url=f"file://{directory}/store", num_threads=2)

    @pytest.fixture(autouse=True)
    def _note_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def path_of(self, tier: SecondaryTierManager, key: OffloadKey) -> Path:
        """Return the file of a block's object."""
        assert isinstance(tier, ObjTier)
        (found,) = self.directory.rglob(f"{tier._namespace.format.name(key).hex()}.kv")
        return found

    def read_value(self, tier: SecondaryTierManager, key: OffloadKey) -> bytes:
        return self.path_of(tier, key).read_bytes()

    def write_value(self, tier: SecondaryTierManager, key: OffloadKey, value: bytes) -> None:
        self.path_of(tier, key).write_bytes(value)


@pytest.mark.parametrize("at", [0, 30, 90, 100, POINTER_BYTES - 1])
def test_a_pointer_that_was_changed_or_moved_is_a_miss(tmp_path: Path, at: int) -> None:
    class Grouped(TestDirectory):
        def make_encrypting(
            self, config: OffloadingConfig, rows: memoryview, directory: Path
        ) -> SecondaryTierManager:
            return ObjTier(config, rows, url=f"file://{directory}/store", blocks_per_object=4, num_threads=1)

    from kvtier.tiering.kit.key_ring import add_entry, make_ring, write_ring

    suite = Grouped()
    suite.ring, suite.directory = tmp_path / "ring.json", tmp_path
    write_ring(suite.ring, add_entry(make_ring(), None, 1.0))
    with suite.drive(tmp_path) as driver:
        assert driver.store([1, 2, 3, 4]).success
        assert driver.load_right([1, 2, 3, 4]) == {1, 2, 3, 4}
    with suite.drive(tmp_path) as driver:
        pointer = bytearray(suite.read_value(driver.tier, key_of(2)))
        assert len(pointer) == POINTER_BYTES
        assert key_of(2)[:32] not in pointer
        pointer[at] ^= 1
        suite.write_value(driver.tier, key_of(2), bytes(pointer))
        suite.write_value(driver.tier, key_of(3), suite.read_value(driver.tier, key_of(4)))
        assert driver.load_right([1, 2, 3, 4]) == {1, 4}
        _check_no_key_shows(tmp_path, driver)


def _check_no_key_shows(directory: Path, driver: TierDriver) -> None:
    for path in directory.rglob("*"):
        assert not any(key_of(number).hex() in path.name for number in range(1, 5))
        if path.is_file():
            assert not any(key_of(number)[:32] in path.read_bytes() for number in range(1, 5))
    assert driver.tier.stats()["hits"]
