"""The valkey tier with a server in the same process, which speaks what the production client expects.

It takes the place of a connection: what the tier makes of requests, replies and errors is production code. As every
server of the storm it loses, tears, mixes up, flips, refuses, hangs and goes away.
"""

import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tests.storm.place import StormPlace, Weather
from tests.storm.secrecy import forge

from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.valkey import ValkeyTier

HANG_S, SLOW_S = 1.5, 0.3
"""How long a request hangs until its time-out, and how long a slow one takes."""

PLACE_VERBS = frozenset({b"PING", b"CLIENT", b"SCAN", b"OBJECT"})
"""Commands of a look at the whole server."""


class ServerPlace(StormPlace):
    """A server that keeps values by name and outlives the process.

    Attributes:
        values: what it keeps.
    """

    fault_names: tuple[str, ...] = (
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

    can_encrypt: ClassVar[bool] = True
    header_bytes: ClassVar[int] = ENVELOPE_BYTES

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
        kind = rng.randrange(5)
        value = self.values[name]
        other = self.values[names[int(rng.random() * len(names))]]
        if kind == 0:
            del self.values[name]
        elif kind == 1:
            self.values[name] = value[: int(rng.random() * (len(value) + 1))]
        elif kind == 2:
            self.values[name] = other
        elif kind == 3:
            self.values[name] = forge(value, other)
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
        self.watch(value)
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


class ValkeyPlace(ServerPlace):
    """The valkey tier and its server.

    Attributes:
        present: the server that the next client gets.
    """

    present: ClassVar["ValkeyPlace"]
    quota_tier: ClassVar[str] = "valkey"

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self._ends_s: dict[bytes, float] = {}
        # The same in all lives: the server keeps a value for as long as its writer has said.
        self._sent_ttl_s = weather.rng.choice([0, 86_400, 30])
        self.ttl_s = weather.rng.choice([None, self._sent_ttl_s or None])

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
            ttl_s=self._sent_ttl_s,
            renew_ttl=self.ttl_s is None,
            num_threads=rng.choice([1, 3]),
        )

    def answer(self, words: Sequence[bytes], *, is_asking: bool = False) -> bytes:
        """Carry out a command and return its reply.

        Args:
            words: of the command.
            is_asking: whether ASKING stood before it, which only a cluster's nodes heed.
        """
        del is_asking
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
            is_removed = self.values.pop(name, None) is not None
            self.is_honest &= (
                not is_removed
            )  # what a quota takes the tier learns of when it looks for the block
            return b":%d\r\n" % is_removed
        if verb in PLACE_VERBS:
            return self._describe(verb)
        value = self.find(name)
        if verb == b"STRLEN":
            return b":%d\r\n" % len(value or b"")
        return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)

    def _describe(self, verb: bytes) -> bytes:
        """Answer what only a look at the whole server sends."""
        if verb == b"SCAN":
            names = [b"$%d\r\n%b\r\n" % (len(name), name) for name in self.values]
            return b"*2\r\n$1\r\n0\r\n*%d\r\n%b" % (len(names), b"".join(names))
        return b":0\r\n" if verb == b"OBJECT" else b"+OK\r\n"

    def _set(self, name: bytes, words: Sequence[bytes]) -> bytes:
        if self.happens("full"):
            return b"-OOM command not allowed\r\n"
        if b"NX" in words[3:] and name in self.values:
            return b"$-1\r\n"
        self.keep(name, words[2])
        self._ends_s.pop(name, None)
        if b"PX" in words[3:]:
            self._ends_s[name] = self.weather.clock() + int(words[words.index(b"PX", 3) + 1]) / 1000
        return b"+OK\r\n"


class SimConnections:
    """Connections to a server in the same process.

    Args:
        find: returns the server, or raises ConnectionRefusedError where there is none now.
    """

    def __init__(self, find: Callable[[], ValkeyPlace]) -> None:
        self._find = find
        self._free: list[SimConnection] = []

    def take(self) -> "SimConnection":
        """Return a connection that has nothing to read."""
        place = self._find()
        place.weather.threads.pause()
        if place.happens("refused"):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        return self._free.pop() if self._free else SimConnection(place)

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
        self._is_asking = False

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
            if command == [b"ASKING"]:
                self._is_asking = True
                self._replies += b"+OK\r\n"
            else:
                self._replies += place.answer(command, is_asking=self._is_asking)
                self._is_asking = False
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
