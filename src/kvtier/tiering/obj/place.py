"""The objects of the tier without an engine: what is under the prefix, whether it is whole, and its removal.

An object is created once and never written over, so what is read twice and is damaged both times stays so. Objects have
the time of their writing, none of their use.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import ConfigError, TierError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.block_pieces import check_in_pieces
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.place import (
    FAULTS_OF_PLACE,
    Amount,
    BlockState,
    Place,
    PlaceBlock,
    PlaceNamespace,
    PlaceSummary,
    TierFinding,
    check_value,
)
from kvtier.tiering.obj.client import Client
from kvtier.tiering.obj.layout import (
    GROUP_SUFFIX,
    NAMESPACE_DOCUMENT_NAME,
    PAGE_NAME,
    is_own,
    namespace_path,
)
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.target import Service

TIER_TYPE = "obj"

PROBE_NAME = "reachable"
"""An object that need not exist: asking for it shows that the bucket is there and may be read."""

MAX_DOCUMENT_BYTES = 2**20
MAX_WHOLE_BYTES = 64 * 2**20
"""Objects up to this length are read with one request. Longer ones are read by pieces, and no further than their
headers say."""

NAMESPACE_CHARS = 32

UNSEEN = {
    Service.HTTP: "a web server lists nothing: what is there cannot be seen without an engine's keys",
    Service.MEMORY: "memory:// is in one engine's memory: no other process can reach it",
}
"""Services whose objects cannot be seen, and why."""


class ObjPlace(Place):
    """The objects below a prefix of a bucket.

    Args:
        where: the place, for messages.
        client: the store.
        root: what the names of our objects begin with.
        capacity_bytes: the tier's setting.
    """

    tier: ClassVar[str] = TIER_TYPE

    def __init__(self, where: str, client: Client, root: str, capacity_bytes: int | None) -> None:
        super().__init__(where)
        self._client = client
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._foreign = Amount()
        self._documents: set[str] = set()
        self._names: set[str] = set()

    def namespaces(self) -> list[PlaceNamespace]:
        for _ in self.blocks():
            pass  # the store lists names, not folders
        return [
            PlaceNamespace(name, self._read_document(name)) for name in sorted(self._names | self._documents)
        ]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        start = f"{self._root}/" if self._root else ""
        self._foreign, self._documents, self._names = Amount(), set(), set()
        for listed in self._client.list_all(self._root):
            name = listed.path[len(start) : len(start) + NAMESPACE_CHARS]
            if not is_own(self._root, listed.path):
                if listed.path == self._document_path(name):
                    self._documents.add(name)
                elif listed.path != self._page_path(name):
                    self._foreign = self._foreign.plus(1, listed.num_bytes)
                continue
            self._names.add(name)
            if namespaces is None or name in namespaces:
                is_group = listed.path.endswith(GROUP_SUFFIX)
                written_s = listed.modified.timestamp()
                key = None if is_group else OffloadKey(bytes.fromhex(Path(listed.path).stem))
                yield PlaceBlock(
                    name,
                    listed.path,
                    listed.num_bytes,
                    written_s,
                    num_blocks=0 if is_group else 1,
                    tenant=None if key is None else get_offload_tenant(key),
                    key=key,
                    name=key,
                )

    def summary(self) -> PlaceSummary:
        return PlaceSummary(capacity_bytes=self._capacity_bytes, foreign=self._foreign)

    def check(self, block: PlaceBlock) -> BlockState:
        if block.address.endswith(GROUP_SUFFIX):
            return BlockState.OTHER_FORMAT  # of an earlier version: this one reads none
        state = self._check_once(block)
        return self._check_once(block) if state in FAULTS_OF_PLACE else state

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        # No store says which of the objects were there: what two remove at once is counted by both.
        self._client.remove([block.address for block in blocks])
        return Amount(sum(block.num_blocks for block in blocks), sum(block.num_bytes for block in blocks))

    def end_removal(self, namespaces: Collection[str]) -> None:
        left = {block.namespace for block in self.blocks(namespaces)} if namespaces else set()
        documents = [self._document_path(name) for name in namespaces if name not in left]
        self._client.remove([*documents, *(self._page_path(name) for name in namespaces if name not in left)])

    def _document_path(self, name: str) -> str:
        return f"{namespace_path(self._root, name)}/{NAMESPACE_DOCUMENT_NAME}"

    def _page_path(self, name: str) -> str:
        return f"{namespace_path(self._root, name)}/{PAGE_NAME}"

    def _read_document(self, name: str) -> str:
        fetched = self._client.get(self._document_path(name), MAX_DOCUMENT_BYTES)
        if fetched is None or fetched.num_bytes != len(fetched.body):
            return ""
        return bytes(fetched.body).decode("utf-8", "replace")

    def _check_once(self, block: PlaceBlock) -> BlockState:
        fetched = self._client.get(block.address, MAX_WHOLE_BYTES)
        if fetched is None:
            return BlockState.GONE
        name = bytes.fromhex(Path(block.address).stem)
        if fetched.num_bytes > MAX_WHOLE_BYTES:
            return self._check_long(block, name, fetched.num_bytes)
        return check_value(fetched.body, block.namespace, name, self.opener)

    def _check_long(self, block: PlaceBlock, name: bytes, num_bytes: int) -> BlockState:
        def read(offset: int, length: int) -> memoryview:
            return self._client.get_range(block.address, ENVELOPE_BYTES + offset, length) or memoryview(b"")

        header = self._client.get_range(block.address, 0, ENVELOPE_BYTES)
        if header is None:
            return BlockState.GONE
        num_disk_blocks = self._client.count_disk_blocks(block.address)
        return check_in_pieces(
            header,
            num_bytes - ENVELOPE_BYTES,
            read,
            block.namespace,
            name,
            self.opener,
            num_disk_blocks=num_disk_blocks,
        )


def open_obj_place(own: Mapping[str, object]) -> ObjPlace:
    """Return the place of a tier's own settings.

    Raises:
        ConfigError: there is no such directory, or nothing can be listed there.
        TierError: there is no such bucket, or it cannot be reached.
    """
    settings = parse_settings(ObjSettings, own, f"tier {TIER_TYPE!r}")
    target = settings.target
    if target.service in UNSEEN:
        raise ConfigError("PLACE", settings.url, UNSEEN[target.service])
    if target.service is Service.FILE and not Path(target.bucket).is_dir():
        raise ConfigError("PLACE", settings.url, "there is no such directory: give the url of an obj tier")
    client = Client(settings)
    client.require_bucket(_probe_path(settings))
    where = f"{settings.url} (prefix {target.root!r})"
    return ObjPlace(where, client, target.root, settings.capacity_bytes)


def probe_obj_place(own: Mapping[str, object]) -> list[TierFinding]:
    """Return whether a tier could reach its store; the directory of a ``file://`` url is not made.

    Raises:
        ConfigError: a setting that cannot work.
    """
    settings = parse_settings(ObjSettings, own, f"tier {TIER_TYPE!r}")
    target = settings.target
    if target.service is Service.FILE and not Path(target.bucket).is_dir():
        return [_probe_missing_folder(settings.url, Path(target.bucket))]
    try:
        Client(settings).require_bucket(_probe_path(settings))
    except TierError as error:
        return [TierFinding(is_good=False, text=str(error))]
    return [TierFinding(is_good=True, text=f"{settings.url} answers and may be read")]


def _probe_missing_folder(url: str, folder: Path) -> TierFinding:
    """Return whether ``folder``, which is no directory, could be made."""
    existing = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not existing.is_dir():
        return TierFinding(is_good=False, text=f"{url}: {existing} is no directory: give another place")
    return TierFinding(is_good=True, text=f"{url} will be made", is_note=True)


def _probe_path(settings: ObjSettings) -> str:
    return namespace_path(settings.target.root, PROBE_NAME)
