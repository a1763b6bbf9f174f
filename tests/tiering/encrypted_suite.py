"""The contract of a tier that encrypts, as tests to inherit: that of any tier, and what who writes into it can do."""

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.base import JobId, OffloadKey, make_offload_key
from kvtier.config import OffloadingConfig
from kvtier.tenants import tenant_number
from kvtier.testing.tier_suite import (
    ROW_BYTES,
    SPOILT,
    TierDriver,
    TierSuite,
    content_of,
    key_of,
    make_config,
)
from kvtier.tiering.base import JobMetadata, SecondaryTierManager
from kvtier.tiering.kit.block_format import BlockFormat
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, make_header
from kvtier.tiering.kit.key_ring import KeyRing, add_entry, drop_tenant, make_ring, read_ring, write_ring

pytest.importorskip("cryptography")


def encrypted(config: OffloadingConfig, ring: Path) -> OffloadingConfig:
    """Return the configuration of an engine that encrypts."""
    return replace(config, extra_config={**config.extra_config, "encryption": {"key_file": str(ring)}})


def format_of_tier(tier: SecondaryTierManager) -> BlockFormat:
    """Return how a tier writes its blocks."""
    namespace = tier._namespace  # type: ignore[attr-defined]
    found: BlockFormat = namespace.format
    return found


def _move(driver: TierDriver, keys: list[OffloadKey], slots: range, *, is_promotion: bool) -> set[OffloadKey]:
    """Store blocks from slots, or load them into slots; return those that have arrived."""
    job_id = driver._next_job_id
    driver._next_job_id += 1
    job = JobMetadata(
        JobId(job_id), tuple(keys), np.array(slots, dtype=np.int64), is_promotion, driver.request
    )
    (driver.tier.submit_load if is_promotion else driver.tier.submit_store)(job)
    result = driver.wait(job_id)
    return set(keys) if result.success else set(result.successful_keys or ())


class EncryptedSuite(TierSuite):
    """What every tier must do, with encryption on; inherit it and implement the three hooks.

    Attributes:
        payload_offset: where the payload begins in a stored value.
    """

    payload_offset = ENVELOPE_BYTES

    @pytest.fixture(autouse=True)
    def _make_ring(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.ring = tmp_path_factory.mktemp("ring") / "ring.json"
        write_ring(self.ring, add_entry(make_ring(), None, 1.0))

    @abstractmethod
    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        """Build a tier of a configuration that encrypts."""

    @abstractmethod
    def read_value(self, tier: SecondaryTierManager, key: OffloadKey) -> bytes:
        """Return what the tier keeps for a block: header and payload."""

    @abstractmethod
    def write_value(self, tier: SecondaryTierManager, key: OffloadKey, value: bytes) -> None:
        """Replace that, past the tier."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return self.make_encrypting(encrypted(config, self.ring), rows, directory)

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        value = bytearray(self.read_value(tier, key))
        value[self.payload_offset + ROW_BYTES // 2] ^= 1
        self.write_value(tier, key, bytes(value))
        return True

    @pytest.fixture
    def tier(self, driver: TierDriver) -> SecondaryTierManager:
        """The driven tier."""
        return driver.tier

    def value_of(self, header: bytes, payload: bytes) -> bytes:
        """Return what a tier would keep for a block of that header and payload."""
        return header + bytes(self.payload_offset - len(header)) + payload

    def require_miss(self, driver: TierDriver, numbers: list[int]) -> None:
        """Fail unless none of some blocks is loaded, and each is counted."""
        before = driver.tier.stats()
        assert driver.load_right(numbers) == set()
        after = driver.tier.stats()
        counted = sum(after[name] - before[name] for name in ("damaged", "foreign"))
        assert counted == len(numbers)

    def test_a_restart_finds_and_opens_everything(self, tmp_path: Path) -> None:
        with self.drive(tmp_path) as driver:
            assert driver.store([1, 2, 3]).success
            assert driver.load_right([1, 2, 3]) == {1, 2, 3}
            assert self.keeps_blocks_after_its_end is False or driver.tier.shutdown(self.hang_guard_s)
        if self.keeps_blocks_after_its_end:
            with self.drive(tmp_path) as driver:
                assert all(driver.lookup(number) for number in (1, 2, 3))
                assert driver.load_right([1, 2, 3]) == {1, 2, 3}

    keeps_blocks_after_its_end = True

    @pytest.mark.parametrize("salt", ["", "a salt"])
    def test_a_tenant_without_a_key_costs_others_no_block_of_a_job(self, tmp_path: Path, salt: str) -> None:
        write_ring(self.ring, drop_tenant(add_entry(read_ring(self.ring), "acme", 2.0), "acme"))
        config = replace(make_config(), extra_config={"tenant_salt": salt})
        with self.drive(tmp_path, config) as driver:
            # On a server that others share a test's tier has a salt of its own.
            acme = tenant_number("acme", driver.tier.config.settings.tenant_salt)
            gone = [make_offload_key(bytes([number]) * 32, 0, acme) for number in (1, 2)]
            keys, others = [gone[0], key_of(5), gone[1], key_of(6)], {key_of(5), key_of(6)}
            driver.place([7, 5, 8, 6], range(4))
            assert _move(driver, keys, range(4), is_promotion=False) == others
            driver.rows[:] = SPOILT
            assert _move(driver, keys, range(4, 8), is_promotion=True) == others
            driver.require_right([(5, 5), (6, 7)])
            assert np.all(driver.rows[[4, 6]] == SPOILT)

    def test_what_is_kept_shows_neither_key_nor_bytes(self, driver: TierDriver) -> None:
        driver.store([1])
        value = self.read_value(driver.tier, key_of(1))
        assert key_of(1)[:32] not in value
        assert content_of(1).tobytes()[:64] not in value
        assert len(value) == self.payload_offset + ROW_BYTES

    def test_two_swapped_blocks_are_misses(self, driver: TierDriver, tier: SecondaryTierManager) -> None:
        assert driver.store([1, 2, 3]).success
        one, two = (self.read_value(tier, key_of(number)) for number in (1, 2))
        self.write_value(tier, key_of(1), two)
        self.write_value(tier, key_of(2), one)
        self.require_miss(driver, [1, 2])
        assert driver.load_right([3]) == {3}

    def test_a_payload_under_anothers_header_is_a_miss(
        self, driver: TierDriver, tier: SecondaryTierManager
    ) -> None:
        driver.store([1, 2])
        one, two = (self.read_value(tier, key_of(number)) for number in (1, 2))
        at = self.payload_offset
        self.write_value(tier, key_of(1), one[:at] + two[at:])
        self.require_miss(driver, [1])

    def test_an_old_version_is_what_was_stored_or_a_miss(
        self, driver: TierDriver, tier: SecondaryTierManager
    ) -> None:
        driver.store([1])
        old = self.read_value(tier, key_of(1))
        self.damage(tier, key_of(1))
        self.require_miss(driver, [1])
        driver.poll_until(lambda: driver.store([1]).success and driver.load_right([1]) == {1})
        new = self.read_value(tier, key_of(1))
        assert old[: self.payload_offset] != new[: self.payload_offset], "each write has a nonce of its own"
        assert old[self.payload_offset :] != new[self.payload_offset :]
        self.write_value(tier, key_of(1), old)
        assert driver.load_right([1]) == {1}, "its bytes are those of this key, sealed under it"
        self.write_value(tier, key_of(1), old[: self.payload_offset] + new[self.payload_offset :])
        self.require_miss(driver, [1])

    def test_a_block_cut_short_is_a_miss(self, driver: TierDriver, tier: SecondaryTierManager) -> None:
        driver.store([1, 2])
        value = self.read_value(tier, key_of(1))
        self.write_value(tier, key_of(1), self.cut(value))
        assert driver.load_right([1, 2]) == {2}

    def cut(self, value: bytes) -> bytes:
        """Return the value without its end; a slot keeps its length."""
        return value[:-100]

    def test_each_flipped_byte_of_a_header_is_a_miss(
        self, driver: TierDriver, tier: SecondaryTierManager
    ) -> None:
        for first in range(0, ENVELOPE_BYTES, 16):
            numbers = [1000 + first + at for at in range(16)]
            assert driver.store(numbers).success
            for at, number in enumerate(numbers, first):
                value = bytearray(self.read_value(tier, key_of(number)))
                value[at] ^= 0x10
                self.write_value(tier, key_of(number), bytes(value))
            self.require_miss(driver, numbers)

    def test_a_block_forged_with_another_key_is_a_miss(
        self, driver: TierDriver, tier: SecondaryTierManager
    ) -> None:
        driver.store([1, 2])
        # The forger knows every name and number, and not the secret.
        ring = read_ring(self.ring)
        forged = add_entry(make_ring(), None, 1.0)
        write_ring(self.ring, KeyRing(ring.names_secret, forged.entries, forged.next_number))
        rows = memoryview(bytearray(ROW_BYTES))
        other = self.make_format()
        header, payload = other.seal(key_of(1), rows, None)
        write_ring(self.ring, ring)
        self.write_value(tier, key_of(1), self.value_of(header, bytes(payload)))
        self.require_miss(driver, [1])
        assert driver.load_right([2]) == {2}

    def make_format(self) -> BlockFormat:
        """Return the format of an engine that starts now."""
        from kvtier.namespace import make_namespace
        from kvtier.tiering.kit.encryption import encrypt_namespace
        from kvtier.tiering.kit.living_ring import LivingRing

        return encrypt_namespace(
            make_namespace(self.own_config(), ROW_BYTES), LivingRing(self.ring), None
        ).format

    def own_config(self) -> OffloadingConfig:
        """Return the first engine's configuration, as far as its namespace depends on it."""
        return make_config()

    def test_a_plain_block_that_was_planted_is_a_miss(
        self, driver: TierDriver, tier: SecondaryTierManager
    ) -> None:
        driver.store([1, 2, 3])
        row = b"\0" * ROW_BYTES
        digest = format_of_tier(tier).digest  # type: ignore[attr-defined]
        for number, name in ((1, key_of(1)), (2, OffloadKey(format_of_tier(tier).name(key_of(2))))):
            self.write_value(tier, key_of(number), self.value_of(make_header(name, digest, row), row))
        self.require_miss(driver, [1, 2])
        assert driver.load_right([3]) == {3}

    def test_a_plain_engine_finds_nothing_and_neither_does_one_with_another_ring(
        self, driver: TierDriver, tmp_path: Path
    ) -> None:
        driver.store([1])
        own = self.ring
        self.ring = own.with_name("another.json")
        write_ring(self.ring, add_entry(make_ring(), None, 1.0))
        with self.drive(self.beside(tmp_path)) as other:
            assert not other.lookup(1)
            assert other.load_right([1]) == set()
        assert driver.load_right([1]) == {1}

    def beside(self, directory: Path) -> Path:
        """Return where a second tier of the same engine runs beside the first."""
        return directory
