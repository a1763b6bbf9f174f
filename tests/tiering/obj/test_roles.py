"""The roles of the obj tier, on a real server and in a directory."""

import os
from pathlib import Path
from typing import ClassVar

import pytest
from tests.tiering.obj.conftest import Bucket, s3_options
from tests.tiering.obj.server import S3Server
from tests.tiering.roles.bench import RawBackend
from tests.tiering.roles.every_role import EveryRole

from kvtier.tiering.obj import ObjTier

PREFIX = "kvtier"
LACKS = {
    "evictions": "objects are deleted by whichever engine lists them, and a store names none",
    "a line": "the blocks of a bucket are not counted at the start of an engine",
}


class Objects(RawBackend):
    """Names below a prefix.

    Args:
        prefix: of all names.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def name_of(self, namespace: str, name: bytes) -> str:
        return f"{self._prefix}/{namespace}/{name.hex()[:2]}/{name.hex()}.kv"

    def document_name(self, namespace: str) -> str:
        return f"{self._prefix}/{namespace}/namespace.json"

    def strange_names(self, namespace: str) -> list[str]:
        own = f"{self._prefix}/{namespace}"
        return [
            f"{self._prefix}/notes.txt",
            f"{own}/notes.txt",
            f"{own}/groups/notes.kvg",
            f"{own}/ab/cdef.kv",
            f"{self._prefix}/other/{namespace}/ab/abcdef.kv",
            f"{own[:-1]}/ab/abcdef.kv",
            f"{own}x/ab/abcdef.kv",
            f"{own.replace(namespace, namespace.upper() + 'X')}/ab/abcdef.kv",
            f"x{self._prefix}/{namespace}/ab/abcdef.kv",
        ]


class OnS3(Objects):
    """On a server.

    Args:
        bucket: its client.
        prefix: of all names.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        super().__init__(prefix)
        self._bucket = bucket

    def names(self) -> list[str]:
        return self._bucket.names()

    def read(self, name: str) -> bytes | None:
        try:
            return self._bucket.read(name)
        except FileNotFoundError:
            return None

    def write(self, name: str, value: bytes) -> None:
        self._bucket.write(name, value)

    def remove(self, name: str) -> None:
        self._bucket.remove(name)


class InFolder(Objects):
    """In a directory.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(PREFIX)
        self._root = root

    def names(self) -> list[str]:
        return [str(path.relative_to(self._root)) for path in self._root.rglob("*") if path.is_file()]

    def read(self, name: str) -> bytes | None:
        path = self._root / name
        return path.read_bytes() if path.exists() else None

    def write(self, name: str, value: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)

    def remove(self, name: str) -> None:
        (self._root / name).unlink()

    def add_age(self, name: str, seconds: float) -> None:
        then_s = (self._root / name).stat().st_mtime - seconds
        os.utime(self._root / name, (then_s, then_s))


class TestDirectory(EveryRole):
    """A directory instead of a bucket."""

    tier_class = ObjTier
    lacks: ClassVar = LACKS

    @pytest.fixture(autouse=True)
    def _use_folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "bucket"
        self.root.mkdir()

    def own_settings(self) -> dict[str, object]:
        return {"url": f"file://{self.root}", "num_threads": 4}

    def get_backend(self) -> InFolder:
        return InFolder(self.root)


class TestS3(EveryRole):
    """A real server."""

    tier_class = ObjTier
    lacks: ClassVar = LACKS | {"ages": "the server alone says when an object was written"}

    @pytest.fixture(autouse=True)
    def _use_server(self, server: S3Server, prefix: str, bucket: Bucket) -> None:
        self.options = s3_options(server, prefix)
        self.backend = OnS3(bucket, prefix)

    def own_settings(self) -> dict[str, object]:
        return self.options

    def get_backend(self) -> OnS3:
        return self.backend
