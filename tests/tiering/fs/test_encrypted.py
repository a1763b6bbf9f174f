"""The disk tier keeps the contract of a tier that encrypts, and its names are keyed."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.encrypted_suite import EncryptedSuite, encrypted
from tests.tiering.fs.engine import AwakeTier, bytes_of_packs
from tests.tiering.fs.slots import StoredBlock, stored_blocks

from kvtier.base import JobId, OffloadKey, make_offload_key
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError
from kvtier.tenants import tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import TierDriver, content_of, key_of, make_config, make_rows
from kvtier.tiering.base import JobMetadata, SecondaryTierManager, TierSettings
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.kit.key_ring import add_entry, drop_tenant, make_ring, read_ring, write_ring
from kvtier.tiering.kit.living_ring import CHECK_S


def block_of(tier: SecondaryTierManager, key: OffloadKey) -> StoredBlock:
    """Return where a block of a tier lies."""
    assert isinstance(tier, AwakeTier)
    name = tier._namespace.format.name(key)
    folder = tier._catalog.directory.folder_of(tier._namespace.name)
    (found,) = [block for block in stored_blocks(folder) if block.name == name]
    return found


class InPacks(EncryptedSuite):
    """Over slots of packs."""

    payload_offset = 4096

    def read_value(self, tier: SecondaryTierManager, key: OffloadKey) -> bytes:
        return block_of(tier, key).read()

    def write_value(self, tier: SecondaryTierManager, key: OffloadKey, value: bytes) -> None:
        block_of(tier, key).write(value)

    def cut(self, value: bytes) -> bytes:
        return value[:-100] + bytes(100)


class TestDefaults(InPacks):
    """As configured by a user who names the directory only."""

    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        return AwakeTier(config, rows, root_dir=directory / "fs", capacity_bytes="4MiB")


class TestBuffered(InPacks):
    """Through the page cache, one thread."""

    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        return AwakeTier(
            config, rows, root_dir=directory / "fs", capacity_bytes="4MiB", direct_io=False, num_threads=1
        )


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """Return the file of a ring with a default entry and one of a tenant."""
    path = tmp_path / "ring.json"
    write_ring(path, add_entry(add_entry(make_ring(), None, 1.0), "acme", 1.0))
    return path


def open_tier(
    ring: Path, directory: Path, clock: ManualClock | None = None, **own: object
) -> tuple[AwakeTier, TierDriver]:
    """Return a tier that encrypts, and what drives it."""
    rows = make_rows()
    options: dict[str, object] = {"root_dir": directory, "capacity_bytes": "4MiB", **own}
    tier = AwakeTier(encrypted(make_config(), ring), rows, clock=clock or ManualClock(), **options)  # type: ignore[arg-type]  # a test's own
    return tier, TierDriver(tier, rows)


def names_in(directory: Path) -> set[str]:
    """Return the names of blocks in a directory."""
    return {block.name.hex() for block in stored_blocks(directory)}


def test_a_place_shows_no_key_no_guessable_namespace_and_no_tag_of_a_salt(ring: Path, tmp_path: Path) -> None:
    directory = tmp_path / "fs"
    rows = make_rows()
    config = replace(make_config(), extra_config={"tenant_salt": "a secret salt"})
    plain = AwakeTier(config, rows, root_dir=tmp_path / "plain", capacity_bytes="4MiB")
    tier = AwakeTier(encrypted(config, ring), rows, root_dir=directory, capacity_bytes="4MiB")
    driver = TierDriver(tier, rows)
    assert driver.store([1, 2]).success
    assert not names_in(directory) & {key_of(1).hex(), key_of(2).hex()}
    assert len(names_in(directory)) == 2
    assert not (directory / plain._namespace.name).exists()
    everything = b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    assert all(bytes(key_of(number)) not in everything for number in (1, 2))
    assert all(bytes(content_of(number))[:64] not in everything for number in (1, 2))
    document = (directory / tier._namespace.name / "namespace.json").read_text()
    assert "tenant" not in document
    assert '"encryption": "AES-256-GCM"' in document
    assert tier.shutdown(10)
    assert plain.shutdown(10)


def test_an_index_that_was_read_from_the_disk_knows_keys(ring: Path, tmp_path: Path) -> None:
    tier, driver = open_tier(ring, tmp_path / "fs")
    driver.store([1, 2])
    assert tier.shutdown(10)
    tier, driver = open_tier(ring, tmp_path / "fs")
    assert tier.wait_indexed(30)
    assert tier.lookup(key_of(1), driver.request) is True
    assert tier.lookup(key_of(3), driver.request) is False
    assert tier.shutdown(10)


def test_a_neighbour_with_the_ring_finds_and_opens_what_is_stored(ring: Path, tmp_path: Path) -> None:
    tier, driver = open_tier(ring, tmp_path / "fs")
    other, reader = open_tier(ring, tmp_path / "fs")
    assert driver.store([1, 2]).success
    assert [reader.lookup(number) for number in (1, 2, 3)] == [True, True, False]
    assert reader.load_right([1, 2]) == {1, 2}
    assert tier.shutdown(10)
    assert other.shutdown(10)


def test_what_is_evicted_is_reported_by_its_key(ring: Path, tmp_path: Path) -> None:
    rows = make_rows()
    one_pack = bytes_of_packs(1)
    tier = AwakeTier(
        encrypted(make_config(), ring),
        rows,
        TierSettings(emit_events=True),
        root_dir=tmp_path / "fs",
        capacity_bytes=one_pack,
        pack_bytes=one_pack,
    )
    driver = TierDriver(tier, rows)
    for number in range(6):
        assert driver.store([number]).success
    assert set(tier.drain_evicted() or ()) == {key_of(0), key_of(1)}
    assert tier.shutdown(10)


def tenant_key(number: int, tenant: str) -> OffloadKey:
    """Return the key of a tenant's block."""
    return make_offload_key(number.to_bytes(32, "big"), 0, tenant_number(tenant))


def move(driver: TierDriver, keys: list[OffloadKey], *, is_promotion: bool) -> set[OffloadKey]:
    """Store or load blocks in the first slots; return those that have arrived."""
    job_id = driver._next_job_id
    driver._next_job_id += 1
    job = JobMetadata(JobId(job_id), tuple(keys), np.arange(len(keys)), is_promotion, driver.request)
    (driver.tier.submit_load if is_promotion else driver.tier.submit_store)(job)
    result = driver.wait(job_id)
    return set(keys) if result.success else set(result.successful_keys or ())


def test_after_a_drop_a_living_engine_neither_finds_nor_reads_nor_stores(
    ring: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    tier, driver = open_tier(ring, tmp_path / "fs", clock)
    of_acme = [tenant_key(number, "acme") for number in (1, 2)]
    driver.rows[0] = content_of(7)
    assert move(driver, [*of_acme, key_of(7)], is_promotion=False) == {*of_acme, key_of(7)}
    write_ring(ring, drop_tenant(read_ring(ring), "acme"))
    clock.advance(CHECK_S)
    with caplog.at_level(logging.WARNING):
        assert move(driver, [*of_acme, key_of(7)], is_promotion=True) == {key_of(7)}
        assert move(driver, [tenant_key(3, "acme")], is_promotion=False) == set()
    assert tier.lookup(of_acme[0], driver.request) is False
    assert tier.stats()["keyless_blocks"] == 3
    assert len([line for line in caplog.messages if "without a key" in line]) == 1
    assert tier.shutdown(10)
    assert not any(
        result.is_fault for result in driver.results.values() if result.successful_keys is not None
    )


def test_a_tier_may_stay_plain(ring: Path, tmp_path: Path) -> None:
    rows = make_rows()
    entry = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "4MiB", "encryption": False}
    tier = create_secondary_tier(entry, rows, encrypted(make_config(), ring))
    driver = TierDriver(tier, rows)
    driver.store([1])
    assert names_in(tmp_path / "fs") == {key_of(1).hex()}
    assert tier.shutdown(10)


def test_a_tier_that_cannot_encrypt_is_refused_unless_it_is_to_stay_plain(ring: Path) -> None:
    config = encrypted(make_config(), ring)
    with pytest.raises(ConfigError, match="'example' cannot encrypt"):
        create_secondary_tier({"type": "example"}, make_rows(), config)
    assert create_secondary_tier({"type": "example", "encryption": False}, make_rows(), config).shutdown(0)


def test_a_reset_while_the_ring_is_gone_ends_no_engine(ring: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    tier, driver = open_tier(ring, tmp_path / "fs", clock)
    before = ring.read_bytes()
    ring.unlink()
    clock.advance(CHECK_S)
    assert not driver.store([1]).success
    tier.reset(bytes(range(16)))
    assert tier.lookup(key_of(1), driver.request) is False
    ring.write_bytes(before)
    ring.chmod(0o600)
    clock.advance(CHECK_S)
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}
    assert tier.shutdown(10)


def test_a_bad_ring_ends_the_start_with_one_line(ring: Path, tmp_path: Path) -> None:
    ring.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_tier(ring, tmp_path / "fs")
    ring.unlink()
    with pytest.raises(ConfigError, match="kvtier keys create"):
        open_tier(ring, tmp_path / "fs")


OPEN_WITHOUT_LIBRARY = """
import sys
sys.modules["cryptography"] = None
from dataclasses import replace
from kvtier.testing.tier_suite import make_config, make_rows
from kvtier.tiering.fs import FSTier
extra = {"encryption": {"key_file": sys.argv[2]}} if len(sys.argv) > 2 else {}
config = replace(make_config(), extra_config=extra)
assert FSTier(config, make_rows(), root_dir=sys.argv[1], capacity_bytes="4MiB").shutdown(9)
"""


def open_without_library(*arguments: Path) -> "subprocess.CompletedProcess[str]":
    """Open and close a tier in a process that lacks the library; without a ring it is plain."""
    command = [sys.executable, "-c", OPEN_WITHOUT_LIBRARY, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_plain_tiers_need_no_library(tmp_path: Path) -> None:
    done = open_without_library(tmp_path / "fs")
    assert done.returncode == 0, done.stderr


def test_a_missing_library_is_named_with_its_extra(ring: Path, tmp_path: Path) -> None:
    assert ".[encryption]" in open_without_library(tmp_path / "fs", ring).stderr
