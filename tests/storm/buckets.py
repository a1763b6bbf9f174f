"""The obj tier with a bucket in the same process, in place of the library that talks to object stores.

What the tier makes of answers and errors is production code.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import ClassVar

from tests.storm.place import Weather
from tests.storm.servers import HANG_S, SLOW_S, ServerPlace

from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.obj import blobs as obj_blobs
from kvtier.tiering.obj import errors as obj_errors

ObjError: type[Exception] = vars(obj_blobs)["BaseError"]
ObjExistsError: type[Exception] = vars(obj_errors)["AlreadyExistsError"]
"""The client library's errors, as the tier's client knows them: that library is imported there alone."""


class ObjPlace(ServerPlace):
    """The obj tier and its bucket.

    Attributes:
        present: the bucket that the next client gets.
    """

    present: ClassVar["ObjPlace"]
    quota_tier: ClassVar[str] = "obj"

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self.written: dict[str, datetime] = {}

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        rng = self.weather.rng
        block_bytes = ENVELOPE_BYTES + (view.shape or (0, 0))[1]
        ObjPlace.present = self
        self.ttl_s = rng.choice([None, None, 20.0, 600.0])
        return ObjTier(
            config,
            view,
            settings,
            clock=self.weather.clock,
            wall_clock=self.weather.wall_clock,
            url="s3://storm/blocks",
            ttl_s=self.ttl_s,
            capacity_bytes=rng.choice([None, None, 64 * 3 * block_bytes]),
            num_threads=rng.choice([1, 3]),
        )

    def request(self) -> None:
        """Let a request arrive, or not."""
        threads = self.weather.threads
        threads.pause()
        if self.happens("hung"):
            threads.sleep(HANG_S)
            raise ObjError("error sending request: operation timed out")
        if self.happens("slow"):
            threads.sleep(SLOW_S)
        if self.happens("refused"):
            raise ObjError("error sending request: Connection refused")
        if self.happens("broken"):
            raise ObjError("Server returned non-2xx status code: 503 Service Unavailable")

    def put(self, path: str, body: bytes, *, is_new: bool) -> None:
        """Write an object."""
        self.request()
        if is_new and path in self.values:
            raise ObjExistsError(path)
        if self.happens("full"):
            raise ObjError("Server returned non-2xx status code: 507 Insufficient Storage")
        self.keep(path, body)
        self.written[path] = datetime.fromtimestamp(self.weather.wall_clock(), UTC)
        self.weather.threads.pause()

    def get(self, path: str) -> bytes:
        """Read an object."""
        self.request()
        value = self.find(path)
        if value is None:
            raise FileNotFoundError(path)
        return value

    def describe(self, path: str) -> dict[str, object]:
        """Return what an object is; one that has been misdirected is as old as the one that was there."""
        written = self.written.setdefault(path, datetime.fromtimestamp(self.weather.wall_clock(), UTC))
        return {"path": path, "size": len(self.values.get(path, b"")), "last_modified": written}


class SimObstore:
    """The functions of obstore that the tier's client calls, on a bucket."""

    @staticmethod
    def put(
        store: ObjPlace, path: str, body: Iterable[Buffer], *, mode: str = "overwrite", use_multipart: bool
    ) -> None:
        """Write an object."""
        del use_multipart
        store.put(path, b"".join(body), is_new=mode == "create")

    @staticmethod
    def get(store: ObjPlace, path: str) -> "_Result":
        """Read an object."""
        return _Result(store.get(path), store.describe(path))

    @staticmethod
    def get_range(store: ObjPlace, path: str, *, start: int, length: int) -> bytes:
        """Read part of an object."""
        value = store.get(path)
        if start and start >= len(value):
            raise ObjError("Wanted range starting at too far")
        return value[start : start + length]

    @staticmethod
    async def get_range_async(store: ObjPlace, path: str, *, start: int, length: int) -> bytes:
        """Read part of an object."""
        return SimObstore.get_range(store, path, start=start, length=length)

    @staticmethod
    def head(store: ObjPlace, path: str) -> dict[str, object]:
        """Return what an object is."""
        store.get(path)
        return store.describe(path)

    @staticmethod
    async def head_async(store: ObjPlace, path: str) -> dict[str, object]:
        """Return what an object is."""
        return SimObstore.head(store, path)

    @staticmethod
    def list(store: ObjPlace, root: str | None, *, chunk_size: int) -> Iterator[list[dict[str, object]]]:
        """List objects."""
        del chunk_size
        store.request()
        names = sorted(name for name in store.values if name.startswith(root or ""))
        yield [store.describe(name) for name in names]

    @staticmethod
    def delete(store: ObjPlace, paths: str | Sequence[str]) -> None:
        """Remove objects."""
        store.request()
        store.is_honest = False  # the tier that deletes the oldest learns of it when it looks for a block
        for path in [paths] if isinstance(paths, str) else paths:
            store.values.pop(path, None)


class _Result:
    """What obstore returns for an object."""

    def __init__(self, value: bytes, meta: dict[str, object]) -> None:
        self._value = value
        self.meta = {**meta, "size": len(value)}

    def bytes(self) -> bytes:
        """Return its bytes."""
        return self._value


def bucket_calls() -> list[tuple[object, str, object]]:
    """Return what to replace while the storm runs, so that the client meets the bucket above."""
    return [(obj_blobs, "obstore", SimObstore), (obj_blobs, "open_store", lambda _: ObjPlace.present)]
