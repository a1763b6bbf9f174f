"""The slab tier keeps the contract of a tier that encrypts."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiering.encrypted_suite import EncryptedSuite
from tests.tiering.slab.conftest import offset_of
from tests.tiering.slab.disk import change

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, key_of
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.kit.envelope import Envelope, unpack
from kvtier.tiering.slab import SlabTier

SLOT_BYTES = 4096 + ROW_BYTES


def slab_of(config: OffloadingConfig, directory: Path) -> Path:
    """Return a file for each engine: a slab has one owner."""
    return directory / f"{config.model.name}-{config.groups[0].page_size_bytes}.slab"


class InFile(EncryptedSuite):
    """Over slots of a file."""

    payload_offset = 4096

    def read_value(self, tier: SecondaryTierManager, key: OffloadKey) -> bytes:
        path, slot = self.find(tier, key)
        return path.read_bytes()[offset_of(slot) :][:SLOT_BYTES]

    def write_value(self, tier: SecondaryTierManager, key: OffloadKey, value: bytes) -> None:
        path, slot = self.find(tier, key)
        change(path, offset_of(slot), value)

    def find(self, tier: SecondaryTierManager, key: OffloadKey) -> tuple[Path, int]:
        """Return the file and the slot of a block, as the tier has it in its table."""
        assert isinstance(tier, SlabTier)
        (pin,) = tier._slab.opened.slots.prepare_load(tier._namespace, [key])
        assert pin is not None
        tier._slab.opened.slots.complete_load([pin], [])
        return tier._slab.opened.file.path, pin.slot

    def cut(self, value: bytes) -> bytes:
        return value[:-100] + bytes(100)

    def beside(self, directory: Path) -> Path:
        (directory / "beside").mkdir()
        return directory / "beside"


class TestDefaults(InFile):
    """As configured by a user who names the file only."""

    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        return SlabTier(config, rows, path=slab_of(config, directory), capacity_bytes="1MiB")

    def test_the_slots_of_an_encrypting_engine_are_anothers_to_a_plain_one(
        self, driver: TierDriver, tmp_path: Path
    ) -> None:
        driver.store([1, 2])
        assert driver.tier.shutdown(self.hang_guard_s)
        config = driver.tier.config
        rows = driver.tier.primary_kv_view
        tier = SlabTier(
            replace(config, extra_config={}), rows, path=slab_of(config, tmp_path), capacity_bytes="1MiB"
        )
        assert tier.wait_indexed(self.hang_guard_s)
        assert tier.lookup(key_of(1), driver.request) is False
        assert tier.stats()["foreign_slots"] == 2
        assert tier.shutdown(self.hang_guard_s)

    def test_a_block_that_a_crash_left_half_written_is_not_found(
        self, driver: TierDriver, tmp_path: Path
    ) -> None:
        driver.store([1, 2])
        path, slot = self.find(driver.tier, key_of(2))
        change(path, offset_of(slot) + 4096 + ROW_BYTES // 2, bytes(ROW_BYTES // 2))
        assert driver.tier.shutdown(self.hang_guard_s)
        with self.drive(tmp_path) as again:
            assert again.lookup(1)
            assert not again.lookup(2)
            assert again.load_right([1, 2]) == {1}


class TestBuffered(InFile):
    """Through the page cache, one thread."""

    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        path = slab_of(config, directory)
        return SlabTier(config, rows, path=path, capacity_bytes="1MiB", direct_io=False, num_threads=1)


@pytest.mark.parametrize("field", ["key", "hash"])
def test_a_header_on_the_disk_has_no_key(tmp_path: Path, field: str) -> None:
    suite = TestDefaults()
    from kvtier.tiering.kit.key_ring import add_entry, make_ring, write_ring

    suite.ring = tmp_path / "ring.json"
    write_ring(suite.ring, add_entry(make_ring(), None, 1.0))
    with suite.drive(tmp_path) as driver:
        driver.store([1])
        found = unpack(suite.read_value(driver.tier, key_of(1)))
        assert isinstance(found, Envelope)
        assert found.key != key_of(1)
        data = suite.find(driver.tier, key_of(1))[0].read_bytes()
    assert (key_of(1) if field == "key" else key_of(1)[:32]) not in data
