"""The obj tier keeps the contract of every secondary tier, on a real server and on what else a URL can name."""

from pathlib import Path

import pytest
from tests.tiering.obj.conftest import TIMEOUT_S, Bucket, ServerOfSuite, s3_options
from tests.tiering.obj.server import S3Server
from tests.tiering.patience import choose_timeout_s

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.damage import flip_bit, flip_bit_in_files
from kvtier.testing.server_tier_suite import ServerTierSuite
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.obj import ObjTier


class TestS3(ServerTierSuite):
    """As configured by a user who names the bucket only, and shortens the time-out."""

    names_siblings = True

    @pytest.fixture(autouse=True)
    def _use_servers(
        self,
        suite_server: ServerOfSuite,
        server: S3Server,
        small_server: S3Server,
        prefix: str,
        request: pytest.FixtureRequest,
    ) -> None:
        self.server = suite_server
        self.options = s3_options(server, prefix) | {"timeout_s": choose_timeout_s(request, TIMEOUT_S)}
        self.small_options = s3_options(small_server, prefix)

    def get_server(self) -> ServerOfSuite:
        return self.server

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ObjTier(config, rows, **self.options)  # type: ignore[arg-type]  # a test's own

    def make_tier_on_small_server(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        return ObjTier(config, rows, **self.small_options)  # type: ignore[arg-type]  # a test's own


class OnServer(TierSuite):
    """Over the real server, under names of the test's own."""

    changes: dict[str, object]

    @pytest.fixture(autouse=True)
    def use_server(self, server: S3Server, prefix: str, bucket: Bucket) -> None:
        self.options = s3_options(server, prefix)
        self.bucket = bucket

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ObjTier(config, rows, **(self.options | self.changes))  # type: ignore[arg-type]  # a test's own

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        for name in self.bucket.names():
            damaged = flip_bit(self.bucket.read(name), key)
            if damaged is not None:
                self.bucket.write(name, damaged)
                return True
        return False


class TestWithCapacity(OnServer):
    """With room for ten times what the tests write."""

    changes: dict[str, object] = {"capacity_bytes": "16MiB"}  # noqa: RUF012


class TestDirectory(TierSuite):
    """A directory instead of a bucket."""

    names_siblings = True

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ObjTier(config, rows, url=f"file://{directory}/store", num_threads=2)

    @pytest.fixture(autouse=True)
    def _note_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return flip_bit_in_files(self.directory, key)


class TestMemory(TierSuite):
    """Memory of the process instead of a bucket."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ObjTier(config, rows, url="memory://")

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return False  # memory of this process
