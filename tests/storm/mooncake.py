"""The mooncake tier with a store in the same process, in place of the client of Mooncake's library.

None of the library is called. Where it cannot be loaded the tier's own modules are imported over a stub, and are there
only while a storm runs: elsewhere in the process the library is still missing. Memory is read and written by address,
as the library does, and answers are its numbers. What is being read has a lease, and cannot be removed.
"""

import ctypes
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar

from tests.storm.place import Weather
from tests.storm.servers import SLOW_S, ServerPlace

from kvtier.config import OffloadingConfig
from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.base import SecondaryTierManager, TierSettings

ADAPTER = "kvtier.tiering.mooncake"
LIBRARY = ("mooncake", "mooncake.store")


class _NoLibrary:
    """What the adapter imports from a library that is missing; a storm puts another class in its place."""


def _import_over_stub() -> dict[str, ModuleType]:
    """Import the tier's modules where the library cannot be loaded, and return them; empty where it can."""
    try:
        importlib.import_module(ADAPTER)
    except MissingExtraError:
        before = {name: sys.modules.pop(name) for name in LIBRARY if name in sys.modules}
        sys.modules |= {name: ModuleType(name) for name in LIBRARY}
        vars(sys.modules[LIBRARY[1]]).update(MooncakeDistributedStore=_NoLibrary, ReplicateConfig=_NoLibrary)
        try:
            importlib.import_module(ADAPTER)
        finally:
            for name in LIBRARY:
                del sys.modules[name]
            sys.modules |= before
        return {name: module for name, module in sys.modules.items() if name.startswith(ADAPTER)}
    return {}


_over_stub = _import_over_stub()

from kvtier.tiering.mooncake import MooncakeTier, native  # noqa: E402  # it can be imported now
from kvtier.tiering.mooncake import client as mooncake_client  # noqa: E402
from kvtier.tiering.mooncake.errors import Code  # noqa: E402
from kvtier.tiering.mooncake.settings import MooncakeSettings  # noqa: E402

for _name in _over_stub:
    del sys.modules[_name]


@contextmanager
def adapter_loaded() -> Iterator[None]:
    """Have the tier's modules among those that are loaded, for as long as their threads are simulated."""
    sys.modules |= _over_stub
    try:
        yield
    finally:
        for name in _over_stub:
            del sys.modules[name]


LEASE_S = 5.0
RPC_TIMEOUT_S = 2.0
TRANSFER_TIMEOUT_S = 60.0
"""How long calls hang: one to the master, and a transfer."""


class MooncakePlace(ServerPlace):
    """The mooncake tier and its store.

    Attributes:
        present: the store that the next client joins.
        leased_until_s: until when each value cannot be removed.
    """

    present: ClassVar["MooncakePlace"]
    fault_names = (*ServerPlace.fault_names, "transfer_hung")

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self.leased_until_s: dict[str, float] = {}

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        MooncakePlace.present = self
        return MooncakeTier(
            config,
            view,
            settings,
            clock=self.weather.clock,
            master="storm:50051",
            allow_any_interface=True,
            num_threads=self.weather.rng.choice([1, 2]),
        )

    def begin(self) -> int:
        """Let a call begin; return what it answers for every name when it does not get through."""
        threads = self.weather.threads
        threads.pause()
        if self.happens("hung"):
            threads.sleep(RPC_TIMEOUT_S)
            return Code.RPC_TIMEOUT
        if self.happens("slow"):
            threads.sleep(SLOW_S)
        return Code.RPC_FAIL if self.happens("refused") else Code.OK

    def transfer(self) -> int:
        """Let bytes travel, or not."""
        self.weather.threads.pause()
        if self.happens("transfer_hung"):
            self.weather.threads.sleep(TRANSFER_TIMEOUT_S)
            return Code.TRANSFER_FAIL
        return Code.TRANSFER_FAIL if self.happens("broken") else Code.OK

    def put(self, name: str, pieces: list[tuple[int, int]]) -> int:
        """Write one value from memory."""
        if name in self.values:
            return Code.OBJECT_ALREADY_EXISTS
        if self.happens("full"):
            return Code.NO_AVAILABLE_HANDLE
        if (code := self.transfer()) != Code.OK:
            return code
        self.keep(name, b"".join(ctypes.string_at(address, length) for address, length in pieces))
        return Code.OK

    def get(self, name: str, pieces: list[tuple[int, int]]) -> int:
        """Read one value into memory."""
        value = self.find(name)
        if value is None:
            return Code.OBJECT_NOT_FOUND
        room = sum(length for _, length in pieces)
        if len(value) != room:
            return Code.INVALID_PARAMS if len(value) > room else Code.TRANSFER_FAIL
        self.leased_until_s[name] = self.weather.clock() + LEASE_S
        code, begin = self.transfer(), 0
        for address, length in pieces if code == Code.OK else ():
            ctypes.memmove(address, value[begin : begin + length], length)
            begin += length
        return code if code != Code.OK else len(value)

    def get_part(self, name: str, address: int, start: int, length: int) -> int:
        """Read a part of one value into memory."""
        value = self.find(name)
        if value is None:
            return Code.OBJECT_NOT_FOUND
        self.leased_until_s[name] = self.weather.clock() + LEASE_S
        code = self.transfer()
        if code == Code.OK:
            ctypes.memmove(address, value[start : start + length], length)
        return code if code != Code.OK else length

    def remove(self, name: str) -> int:
        """Remove one value."""
        if name not in self.values:
            return Code.OBJECT_NOT_FOUND
        if self.leased_until_s.get(name, 0.0) > self.weather.clock():
            return Code.OBJECT_HAS_LEASE
        del self.values[name]
        return Code.OK


class SimMooncake:
    """What the tier uses of the library's client."""

    def __init__(self) -> None:
        self._place = MooncakePlace.present

    def setup(self, *_: object) -> int:
        """Join."""
        return self._place.begin()

    def register_buffer(self, address: int, num_bytes: int, /) -> int:
        """Let transfers come from and go to memory."""
        del address, num_bytes
        return Code.OK

    def unregister_buffer(self, address: int, /) -> int:
        """Give memory back."""
        del address
        return Code.OK

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], lengths: list[list[int]], config: object, /
    ) -> list[int]:
        """Write values."""
        del config
        if (code := self._place.begin()) != Code.OK:
            return [code] * len(names)
        pieces = [list(zip(*pair, strict=True)) for pair in zip(addresses, lengths, strict=True)]
        return [self._place.put(name, of_name) for name, of_name in zip(names, pieces, strict=True)]

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], lengths: list[list[int]], /
    ) -> list[int]:
        """Read values."""
        if (code := self._place.begin()) != Code.OK:
            return [code] * len(names)
        pieces = [list(zip(*pair, strict=True)) for pair in zip(addresses, lengths, strict=True)]
        return [self._place.get(name, of_name) for name, of_name in zip(names, pieces, strict=True)]

    def get_into_ranges(
        self,
        addresses: list[int],
        names: list[list[str]],
        offsets: list[list[list[int]]],
        starts: list[list[list[int]]],
        lengths: list[list[list[int]]],
        /,
    ) -> list[list[list[int]]]:
        """Read a part of one value, to the beginning of a buffer."""
        del offsets
        if (code := self._place.begin()) != Code.OK:
            return [[[code]]]
        return [[[self._place.get_part(names[0][0], addresses[0], starts[0][0][0], lengths[0][0][0])]]]

    def batch_is_exist(self, names: list[str], /) -> list[int]:
        """Return which values are there."""
        if (code := self._place.begin()) != Code.OK:
            return [code] * len(names)
        return [int(self._place.find(name) is not None) for name in names]

    def batch_remove(self, names: list[str], /) -> list[int]:
        """Remove values."""
        if (code := self._place.begin()) != Code.OK:
            return [code] * len(names)
        return [self._place.remove(name) for name in names]

    def remove_by_regex(self, pattern: str, /) -> int:
        """Remove the values whose names fit."""
        if (code := self._place.begin()) != Code.OK:
            return code
        names = [name for name in self._place.values if re.search(pattern, name)]
        return sum(self._place.remove(name) == Code.OK for name in names)

    def get_size(self, name: str, /) -> int:
        """Return the length of a value."""
        if (code := self._place.begin()) != Code.OK:
            return code
        value = self._place.find(name)
        return Code.OBJECT_NOT_FOUND if value is None else len(value)

    def close(self) -> int:
        """Leave."""
        return Code.OK


def knock(master: str, timeout_s: float) -> None:
    """Check that the store answers.

    Raises:
        TierError: it does not.
    """
    del timeout_s
    if MooncakePlace.present.begin() != Code.OK:
        raise TierError("mooncake", f"the master at {master} does not answer")


def keep_environment(settings: MooncakeSettings) -> None:
    """Leave the environment as it is: no library reads it."""
    del settings


def mooncake_calls() -> list[tuple[object, str, object]]:
    """Return what to replace while the storm runs, so that the client meets the store above."""
    return [
        (native, "MooncakeDistributedStore", SimMooncake),
        (native, "prepare_environment", keep_environment),
        (native, "knock", knock),
        (mooncake_client, "knock", knock),
    ]
