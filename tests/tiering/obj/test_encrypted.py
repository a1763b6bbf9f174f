"""The obj tier keeps the contract of a tier that encrypts, in a directory."""

from pathlib import Path

import pytest
from tests.tiering.encrypted_suite import EncryptedSuite

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.obj import ObjTier


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
