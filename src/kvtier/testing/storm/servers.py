"""The obj and the valkey tier with servers in the same process, which speak what the production clients expect.

The bucket takes the place of the library that talks to object stores, the Valkey server that of a connection: what a
tier makes of requests, replies and errors is production code. Both lose, tear, mix up, flip, refuse, hang, go away.
"""

import errno
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from kvtier.config import OffloadingConfig
from kvtier.testing.storm.place import StormPlace, Weather
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.obj import client as obj_client
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey import servers as valkey_servers

ObjError: type[Exception] = vars(obj_client)["BaseError"]
ObjExistsError: type[Exception] = vars(obj_client)["AlreadyExistsError"]
"""The client library's errors, as the tier's client knows them: that library is imported there alone."""

HANG_S, SLOW_S = 1.5, 0.3
"""How long a request hangs until its time-out, and how long a slow one takes."""


class ServerPlace(StormPlace):
    """A server that keeps values by name and outlives the process.

    Attributes:
        values: what it keeps.
    """

    fault_names = (
        "lost",
        "torn",
        "misdirected",
        "flipped_write",
        "flipped_read",
        "stale",
        "slow",
        "hung",
        "refused",
        "broken",
        "full",
        "evict",
    )

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self.values: dict[Any, bytes] = {}  # Any: the names that its protocol has

    def hurt(self) -> None:
        rng = self.weather.rng
        if not self.values:
            return
        self.is_honest = False
        names = list(self.values)
        name = names[int(rng.random() * len(names))]
        kind = rng.randrange(4)
        value = self.values[name]
        if kind == 0:
            del self.values[name]
        elif kind == 1:
            self.values[name] = value[: int(rng.random() * (len(value) + 1))]
        elif kind == 2:
            self.values[name] = self.values[names[int(rng.random() * len(names))]]
        else:
            self.values[name] = self.flip(value)

    def flip(self, value: bytes) -> bytes:
        """Return ``value`` with one bit changed."""
        if not value:
            return value
        changed, rng = bytearray(value), self.weather.rng
        changed[int(rng.random() * len(changed))] ^= 1 << int(rng.random() * 8)
        return bytes(changed)

    def keep(self, name: object, value: bytes) -> None:
        """Store a value, or say so."""
        if self.lies("lost"):
            return
        if self.lies("torn"):
            value = value[: len(value) // 2]
        if self.lies("flipped_write"):
            value = self.flip(value)
        if self.values and self.lies("misdirected"):
            names = list(self.values)
            name = names[int(self.weather.rng.random() * len(names))]
        self.values[name] = value

    def find(self, name: object) -> bytes | None:
        """Return a value, or another one."""
        if self.values and self.lies("evict"):
            names = list(self.values)
            del self.values[names[int(self.weather.rng.random() * len(names))]]
        value = self.values.get(name)
        if self.happens("stale"):
            return None
        if value is not None and self.happens("flipped_read"):
            return self.flip(value)
        return value


class ObjPlace(ServerPlace):
    """The obj tier and its bucket.

    Attributes:
        present: the bucket that the next client gets.
    """

    present: ClassVar["ObjPlace"]

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self.written: dict[str, datetime] = {}

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        rng = self.weather.rng
        block_bytes = ENVELOPE_BYTES + (view.shape or (0, 0))[1]
        ObjPlace.present = self
        return ObjTier(
            config,
            view,
            settings,
            clock=self.weather.clock,
            url="memory://",
            blocks_per_object=rng.choice([1, 1, 3]),
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
        self.written[path] = datetime(2100, 1, 1, tzinfo=UTC) + timedelta(seconds=self.weather.clock())
        self.weather.threads.pause()

    def get(self, path: str) -> bytes:
        """Read an object."""
        self.request()
        value = self.find(path)
        if value is None:
            raise FileNotFoundError(path)
        return value


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
    async def put_async(store: ObjPlace, path: str, body: bytes, *, mode: str = "overwrite") -> None:
        """Write an object."""
        store.put(path, bytes(body), is_new=mode == "create")

    @staticmethod
    def get(store: ObjPlace, path: str) -> "_Result":
        """Read an object."""
        return _Result(store.get(path))

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
    async def head_async(store: ObjPlace, path: str) -> dict[str, int]:
        """Return what an object is."""
        return {"size": len(store.get(path))}

    @staticmethod
    def list(store: ObjPlace, root: str | None, *, chunk_size: int) -> Iterator[list[dict[str, object]]]:
        """List objects."""
        del chunk_size
        store.request()
        names = sorted(name for name in store.values if name.startswith(root or ""))
        yield [
            {"path": name, "size": len(store.values[name]), "last_modified": store.written[name]}
            for name in names
            if name in store.written
        ]

    @staticmethod
    def delete(store: ObjPlace, paths: str | Sequence[str]) -> None:
        """Remove objects."""
        store.request()
        store.is_honest = False  # the tier that deletes the oldest learns of it when it looks for a block
        for path in [paths] if isinstance(paths, str) else paths:
            store.values.pop(path, None)


class _Result:
    """What obstore returns for an object."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.meta = {"size": len(value)}

    def bytes(self) -> bytes:
        """Return its bytes."""
        return self._value


class ValkeyPlace(ServerPlace):
    """The valkey tier and its server.

    Attributes:
        present: the server that the next client gets.
    """

    present: ClassVar["ValkeyPlace"]

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self._ends_s: dict[bytes, float] = {}

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        rng = self.weather.rng
        ValkeyPlace.present = self
        return ValkeyTier(
            config,
            view,
            settings,
            clock=self.weather.clock,
            url="redis://storm:6379",
            ttl_s=rng.choice([0, 86_400, 30]),
            num_threads=rng.choice([1, 3]),
        )

    def answer(self, words: Sequence[bytes]) -> bytes:
        """Carry out a command and return its reply."""
        verb, name = words[0], words[1] if len(words) > 1 else b""
        now_s = self.weather.clock()
        if self._ends_s.get(name, now_s + 1) <= now_s:
            self.values.pop(name, None)
            del self._ends_s[name]
            self.is_honest = False  # the tier learns of it when it looks for the block
        if self.happens("broken"):
            return b"-LOADING the data\r\n"
        if verb == b"SET":
            return self._set(name, words)
        if verb == b"PEXPIRE":
            if name in self.values:
                self._ends_s[name] = now_s + int(words[2]) / 1000
            return b":%d\r\n" % (name in self.values)
        if verb == b"UNLINK":
            return b":%d\r\n" % (self.values.pop(name, None) is not None)
        value = self.find(name)
        if verb == b"STRLEN":
            return b":%d\r\n" % len(value or b"")
        return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)

    def _set(self, name: bytes, words: Sequence[bytes]) -> bytes:
        if self.happens("full"):
            return b"-OOM command not allowed\r\n"
        self.keep(name, words[2])
        self._ends_s.pop(name, None)
        if len(words) > 3:
            self._ends_s[name] = self.weather.clock() + int(words[4]) / 1000
        return b"+OK\r\n"


class SimConnections:
    """Connections to a server in the same process.

    Args:
        place: the server.
    """

    def __init__(self, place: ValkeyPlace) -> None:
        self._place = place
        self._free: list[SimConnection] = []

    def take(self) -> "SimConnection":
        """Return a connection that has nothing to read."""
        threads = self._place.weather.threads
        threads.pause()
        if self._place.happens("refused"):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        return self._free.pop() if self._free else SimConnection(self._place)

    def give_back(self, connection: "SimConnection", *, is_clean: bool) -> None:
        """Keep a connection unless replies may still come on it."""
        if is_clean:
            self._free.append(connection)

    def close(self) -> None:
        """Close every connection."""
        self._free.clear()


class SimConnection:
    """A connection and the socket that it lends.

    Args:
        place: the server.
    """

    def __init__(self, place: ValkeyPlace) -> None:
        self._place = place
        self._received = b""
        self._replies = bytearray()

    def lend_socket(self) -> "SimConnection":
        """Return what has the calls of a socket."""
        return self

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Take requests, and answer those that are whole."""
        threads, place = self._place.weather.threads, self._place
        threads.pause()
        if place.happens("slow"):
            threads.sleep(SLOW_S)
        sent = b"".join(views)
        if place.happens("broken"):
            sent = sent[: len(sent) // 2] or sent
        self._received += sent
        while (command := self._take_command()) is not None:
            self._replies += place.answer(command)
        return len(sent)

    def recv_into(self, target: memoryview, num_bytes: int = 0, flags: int = 0) -> int:
        """Give replies, all that was asked for if need be."""
        del num_bytes
        place = self._place
        place.weather.threads.may_pause()
        if place.happens("hung") or not self._replies:
            place.weather.threads.sleep(HANG_S)
            raise BlockingIOError(errno.EAGAIN, "nothing came")
        if place.happens("broken"):
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        num = min(len(target), len(self._replies))
        if not flags & socket.MSG_WAITALL and place.weather.rng.random() < 0.2:
            num = max(1, num // 2)
        target[:num] = self._replies[:num]
        del self._replies[:num]
        return num

    def _take_command(self) -> list[bytes] | None:
        words: list[bytes] = []
        at = self._received.find(b"\r\n")
        if at < 0:
            return None
        num_words, begin = int(self._received[1:at]), at + 2
        for _ in range(num_words):
            at = self._received.find(b"\r\n", begin)
            if at < 0:
                return None
            length, begin = int(self._received[begin + 1 : at]), at + 2
            if len(self._received) < begin + length + 2:
                return None
            words.append(self._received[begin : begin + length])
            begin += length + 2
        self._received = self._received[begin:]
        return words


def server_calls() -> list[tuple[object, str, object]]:
    """Return what to replace while the storm runs, so that the clients meet the servers above."""
    return [
        (obj_client, "obstore", SimObstore),
        (obj_client, "open_store", lambda _: ObjPlace.present),
        (valkey_servers, "ServerConnections", lambda *_: SimConnections(ValkeyPlace.present)),
    ]
