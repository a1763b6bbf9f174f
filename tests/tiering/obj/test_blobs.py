"""The objects of a store keep the contract of named bytes."""

from pathlib import Path

import pytest
from tests.tiering.obj.conftest import HANG_GUARD_S, s3_options
from tests.tiering.obj.server import S3Server

from kvtier.settings import parse_settings
from kvtier.testing.blobs_suite import BlobsSuite
from kvtier.tiering.obj.blobs import ObjBlobs
from kvtier.tiering.obj.settings import ObjSettings


def open_blobs(**options: object) -> ObjBlobs:
    return ObjBlobs(parse_settings(ObjSettings, options))


class TestDirectory(BlobsSuite):
    """In a directory."""

    def open(self, directory: Path) -> ObjBlobs:
        return open_blobs(url=f"file://{directory}/store")


class TestMemory(BlobsSuite):
    """In memory."""

    def open(self, directory: Path) -> ObjBlobs:
        return open_blobs(url="memory://")


class TestS3(BlobsSuite):
    """On a real server."""

    @pytest.fixture(autouse=True)
    def _use_server(self, server: S3Server, prefix: str) -> None:
        self.options = s3_options(server, prefix) | {"timeout_s": HANG_GUARD_S}

    def open(self, directory: Path) -> ObjBlobs:
        return open_blobs(**self.options)


class TestWithoutCondition(TestS3):
    """The same, asked first whether a block is there."""

    def open(self, directory: Path) -> ObjBlobs:
        return open_blobs(**self.options, conditional_put="never")


class TestWebServer(BlobsSuite):
    """A server that takes PUT, and lists nothing."""

    @pytest.fixture(autouse=True)
    def _use_server(self, server: S3Server, prefix: str) -> None:
        place = {"url": server.web_url, "prefix": prefix, "allow_http": True}
        self.options = place | {"timeout_s": HANG_GUARD_S}

    def open(self, directory: Path) -> ObjBlobs:
        return open_blobs(**self.options)
