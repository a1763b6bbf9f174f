"""Blocks on their way between rows of the primary tier and objects, several to an object if need be.

A header is put in front of each row that is stored, and checked before a row is written that is loaded.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvtier.base import OffloadKey
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.block_format import BlockFormat
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer, HeaderCheck
from kvtier.tiering.obj.client import Client
from kvtier.tiering.obj.layout import (
    POINTER_BYTES,
    Location,
    ObjNamespace,
    draw_group_id,
    pack_pointer,
    unpack_pointer,
)

Block = tuple[OffloadKey, int]
"""A key and the slot of its row."""


class RowsWithHeaders:
    """The primary's rows as the store sees them, an envelope in front of each.

    Args:
        rows: the primary's.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.row_bytes = rows.row_bytes
        self.block_bytes = ENVELOPE_BYTES + rows.row_bytes

    def with_headers(self, blocks: Sequence[Block], block_format: BlockFormat) -> list[Buffer]:
        """Return the bytes of an object that holds ``blocks``: envelope, row, envelope, row; plain rows as they are."""
        buffers: list[Buffer] = []
        for key, slot in blocks:
            buffers += block_format.seal(key, self._rows.row(slot), None)
        return buffers

    def copy_checked(self, body: memoryview, block: Block, block_format: BlockFormat) -> HeaderCheck:
        """Copy what was read into the block's row if it is what was stored under its key.

        Effects: the row has the block when the check is OK; otherwise nothing of it.
        """
        key, slot = block
        payload, row = body[ENVELOPE_BYTES:], self._rows.row(slot)
        header_check = block_format.open(body, payload, key, row)
        if header_check is not HeaderCheck.OK or block_format.is_encrypted:
            return header_check
        if len(payload) != len(row):
            return HeaderCheck.DAMAGED
        # numpy, because it lets other threads run while it copies.
        np.copyto(np.frombuffer(row, np.uint8), np.frombuffer(payload, np.uint8))
        return HeaderCheck.OK


class GroupMember(NamedTuple):
    """A block that is to be read from a group; sorts by place."""

    location: Location
    block: Block


class Groups:
    """Writes and reads several blocks with one request.

    Args:
        client: the store.
        rows: the primary's.
    """

    def __init__(self, client: Client, rows: RowsWithHeaders) -> None:
        self._client = client
        self._rows = rows

    def write(self, namespace: ObjNamespace, blocks: Sequence[Block]) -> set[OffloadKey]:
        """Write one object and, once it is there, the pointers into it; return the keys that can be found now."""
        group_id, block_format = draw_group_id(), namespace.format
        self._client.put_new(namespace.group_path(group_id), self._rows.with_headers(blocks, block_format))
        pointers = {
            namespace.block_path(key): pack_pointer(Location(group_id, position), key, block_format)
            for position, (key, _) in enumerate(blocks)
        }
        written = self._client.put_new_each(pointers)
        return {key for key, _ in blocks if namespace.block_path(key) in written}

    def read_pointers(self, namespace: ObjNamespace, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Read pointers and remember where they point; return the keys of the sound ones."""
        paths = {key: namespace.block_path(key) for key in keys}
        bodies = self._client.get_each(list(paths.values()), POINTER_BYTES) if paths else {}
        found = {}
        for key, path in paths.items():
            body = bodies.get(path)
            location = None if body is None else unpack_pointer(body, key, namespace.format)
            if isinstance(location, Location):
                found[key] = location
        namespace.on_locations(found.items())
        return found

    def load(
        self, namespace: ObjNamespace, members: Sequence[GroupMember]
    ) -> dict[OffloadKey, HeaderCheck | None]:
        """Read blocks, one request for each group; return what is wrong with those that have not succeeded.

        Returns:
            None for a block whose group is gone.
        """
        of_group: defaultdict[bytes, list[GroupMember]] = defaultdict(list)
        for member in sorted(members):
            of_group[member.location.group_id].append(member)
        failures: dict[OffloadKey, HeaderCheck | None] = {}
        for group_id, group in of_group.items():
            failures |= self._load_one(namespace, group_id, group)
        namespace.forget_locations(failures)
        return failures

    def _load_one(
        self, namespace: ObjNamespace, group_id: bytes, members: Sequence[GroupMember]
    ) -> dict[OffloadKey, HeaderCheck | None]:
        """Read from the first to the last wanted block; what lies between and is not wanted is read too."""
        block_bytes = self._rows.block_bytes
        first, last = members[0].location.position, members[-1].location.position
        path = namespace.group_path(group_id)
        body = self._client.get_range(path, first * block_bytes, (last - first + 1) * block_bytes)
        if body is None:
            return {member.block[0]: None for member in members}
        failures: dict[OffloadKey, HeaderCheck | None] = {}
        for location, block in members:
            begin = (location.position - first) * block_bytes
            header_check = self._rows.copy_checked(body[begin : begin + block_bytes], block, namespace.format)
            if header_check is not HeaderCheck.OK:
                failures[block[0]] = header_check
        return failures
