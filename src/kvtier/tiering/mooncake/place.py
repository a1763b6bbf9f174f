"""The values of a Mooncake store without an engine: what is there, whether it is whole, and its removal.

Clients cannot list a store. Its master can: the page that serves its metrics has the names of all values, and their
lengths. Names say whose block it is, and values have no times. What a namespace is in words stands in values of its
own, which only a client can read: the store is joined where there are any. A value that a reader has leased, for some
seconds after each look, is not removed before its lease ends.
"""

import json
import mmap
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.place import (
    FAULTS_OF_PLACE,
    Amount,
    BlockState,
    Place,
    PlaceBlock,
    PlaceNamespace,
    PlaceSummary,
    check_value,
)
from kvtier.tiering.kit.purging import Removed
from kvtier.tiering.mooncake.client import MooncakeClient, ScatterLists
from kvtier.tiering.mooncake.descriptions import DESCRIPTION_NAMES, DescriptionBuffer
from kvtier.tiering.mooncake.errors import ABSENT, Code, name_of
from kvtier.tiering.mooncake.headers import address_of
from kvtier.tiering.mooncake.native import TIER_TYPE
from kvtier.tiering.mooncake.settings import MooncakeSettings

SCHEME = "mooncake://"

BATCH_NAMES = 200
"""Names whose lengths are asked for at once: they stand in the address of a page, some 100 bytes each."""

MAX_PAGE_BYTES = 2**30
"""A list of names that is longer is cut; ten million have less."""

PAGE_TIMEOUT_S = 30.0
"""Seconds for a page: a master with millions of names takes some for the list."""

LEASE_S = 6.0
"""Seconds after which a lease has ended that nothing renews: 5, unless the master says otherwise."""

RETRY_S = 1.0

_NAME = re.compile(r"([0-9a-f]{32})/((?:[0-9a-f]{2}){1,40})")
_CAPACITY = re.compile(r"^master_total_capacity_bytes (\d+)", re.MULTILINE)


class MooncakePlace(Place):
    """The values of a store.

    Args:
        settings: which store.
        make_client: joins it, with memory that values are read into; called when a value is first read or removed.
        pause: waits for that many seconds.
    """

    tier: ClassVar[str] = TIER_TYPE
    has_times: ClassVar[bool] = False

    def __init__(
        self,
        settings: MooncakeSettings,
        make_client: Callable[[MooncakeSettings, Sequence[memoryview], Callable[[], float]], MooncakeClient],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(f"{SCHEME}{settings.master}")
        host = settings.master.rpartition(":")[0]
        self._page = f"http://{host}:{settings.admin_port}"
        self._settings = settings
        self._make_client = make_client
        self._pause = pause
        self._client: MooncakeClient | None = None
        self._memory = memoryview(b"")
        self._foreign = Amount()
        self._num_leased = 0

    def namespaces(self) -> list[PlaceNamespace]:
        names = self._list_names()
        found = {match[1] for name in names if (match := _NAME.fullmatch(name))}
        documents = dict(self._descriptions(names).values())
        return [PlaceNamespace(name, documents.get(name, "")) for name in sorted(found)]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        self._foreign = Amount()
        wanted: list[str] = []
        for name in self._list_names():
            match = _NAME.fullmatch(name)
            if match is None:
                self._foreign = self._foreign.plus(name not in DESCRIPTION_NAMES, 0)
            elif namespaces is None or match[1] in namespaces:
                wanted.append(name)
        for begin in range(0, len(wanted), BATCH_NAMES):
            yield from self._describe(wanted[begin : begin + BATCH_NAMES])

    def summary(self) -> PlaceSummary:
        found = _CAPACITY.search(self._read("/metrics").decode("utf-8", "replace"))
        return PlaceSummary(capacity_bytes=int(found[1]) if found else None, foreign=self._foreign)

    def check(self, block: PlaceBlock) -> BlockState:
        state = self._check_once(block)
        return self._check_once(block) if state in FAULTS_OF_PLACE else state

    def begin_removal(self) -> None:
        self._num_leased = 0
        self._join(0)

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        removed = Amount()
        sizes = {block.address: block.num_bytes for block in blocks}
        for name, is_removed in self._remove_names(list(sizes)).items():
            removed = removed.plus(is_removed, sizes[name] if is_removed else 0)
        return removed

    def end_removal(self, namespaces: Collection[str]) -> None:
        if namespaces:
            names = self._list_names()
            gone = set(namespaces) - {match[1] for name in names if (match := _NAME.fullmatch(name))}
            described = self._descriptions(names).items()
            self._remove_names([name for name, (namespace, _) in described if namespace in gone])
        if self._num_leased:
            text = f"{self._num_leased} blocks are in use by readers and stay, the others are removed: try again later"
            raise TierError(TIER_TYPE, text)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def require_page(self) -> None:
        """Check that the master's page answers.

        Raises:
            TierError: it does not.
        """
        self._list_names()

    def _remove_names(self, names: Sequence[str]) -> dict[str, bool]:
        """Return which names were removed; those that are leased are tried until a lease has ended."""
        is_removed = dict.fromkeys(names, False)
        left = list(names)
        for attempt in range(int(LEASE_S / RETRY_S) + 1):
            if not left:
                break
            if attempt:
                self._pause(RETRY_S)
            answers = dict(zip(left, self._join(0).remove(left), strict=True))
            is_removed |= {name: answer == Code.OK for name, answer in answers.items()}
            left = [name for name, answer in answers.items() if answer == Code.OBJECT_HAS_LEASE]
        self._num_leased += len(left)
        return is_removed

    def _descriptions(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return namespaces and their documents by the names of the values; none where the store lets no client in."""
        if set(names).isdisjoint(DESCRIPTION_NAMES):
            return {}
        buffer = DescriptionBuffer()
        client = self._make_client(self._settings, (buffer.memory,), time.monotonic)
        try:
            return buffer.read_each(client)
        except TierError:
            return {}
        finally:
            client.close()

    def _list_names(self) -> list[str]:
        return self._read("/get_all_keys").decode("utf-8", "replace").splitlines()

    def _describe(self, names: Sequence[str]) -> Iterator[PlaceBlock]:
        """Yield blocks with the bytes that all their copies take; those that are gone by now are left out."""
        query = urllib.parse.urlencode({"keys": ",".join(names)})
        try:
            found: Mapping[str, Any] = json.loads(self._read(f"/batch_query_keys?{query}"))["data"]
            sizes = {
                name: sum(int(copy["size_"]) for copy in found[name]["values"] or ())
                for name in names
                if name in found and found[name]["ok"]
            }
        except (ValueError, TypeError, KeyError) as error:
            raise TierError(
                TIER_TYPE, f"{self._page} gives an answer of another release: {error!r}"
            ) from error
        for name, num_bytes in sizes.items():
            namespace, _, key = name.partition("/")
            yield PlaceBlock(namespace, name, num_bytes, None, key=OffloadKey(bytes.fromhex(key)))

    def _check_once(self, block: PlaceBlock) -> BlockState:
        num_bytes = self._join(0).size(block.address)
        if num_bytes < 0:
            return BlockState.GONE if num_bytes in ABSENT else BlockState.UNREADABLE
        client = self._join(num_bytes)
        lists = ScatterLists([[address_of(self._memory)]], [[num_bytes]])
        (answer,) = client.get([block.address], lists)
        if answer in ABSENT:
            return BlockState.GONE
        if answer != num_bytes:
            return BlockState.UNREADABLE
        namespace, _, key = block.address.partition("/")
        return check_value(self._memory[:num_bytes], namespace, OffloadKey(bytes.fromhex(key)))

    def _join(self, num_bytes: int) -> MooncakeClient:
        """Return a client whose memory has room for a value of this length."""
        if self._client is None or len(self._memory) < num_bytes:
            self.close()
            self._memory = memoryview(mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE)))
            self._client = self._make_client(self._settings, (self._memory,), time.monotonic)
        return self._client

    def _read(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(self._page + path, timeout=PAGE_TIMEOUT_S) as answer:  # noqa: S310 - http
                found: bytes = answer.read(MAX_PAGE_BYTES)
                return found
        except (OSError, ValueError) as error:
            remedy = (
                "is it running, and is admin_port its --metrics_port? As "
                '{"type": "mooncake", "master": "host:port", "admin_port": 9003}'
            )
            text = f"the master's page {self._page}, which lists what is stored, does not answer ({error}): {remedy}"
            raise TierError(TIER_TYPE, text) from error


def open_mooncake_place(own: Mapping[str, object]) -> MooncakePlace:
    """Return the place of a tier's own settings; ``master`` may begin with ``mooncake://``.

    A URL alone is refused: a client listens on every interface, which ``allow_any_interface`` has to allow.

    Raises:
        ConfigError: a setting that cannot work.
        TierError: the master's page does not answer.
    """
    master = own.get("master")
    if isinstance(master, str):
        own = {**own, "master": master.removeprefix(SCHEME).rstrip("/")}
    settings = parse_settings(MooncakeSettings, own, f"tier {TIER_TYPE!r}")
    place = MooncakePlace(settings, MooncakeClient)
    place.require_page()
    return place


def remove_namespace(
    client: MooncakeClient, namespace: str, pause: Callable[[float], None] = time.sleep
) -> Generator[Removed, None, None]:
    """Remove every value of a namespace as far as no reader has leased it, until none has come free for a lease.

    The master does it by a pattern, so its page is not needed; it does not say which values there were.

    Raises:
        TierError: the master does not answer, or refuses.
    """
    num_idle = 0
    while num_idle * RETRY_S < LEASE_S:
        num_removed = client.remove_by_pattern(f"^{namespace}/")
        if num_removed < 0:
            raise TierError(TIER_TYPE, f"removing by a pattern failed: {name_of(num_removed)}")
        num_idle = 0 if num_removed else num_idle + 1
        yield Removed(num_removed, [])
        pause(RETRY_S)
