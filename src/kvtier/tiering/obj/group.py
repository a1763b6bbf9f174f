"""Objects that hold several blocks, and the pointers into them.

A group is written before its pointers, so that a pointer never comes before what it points at; a writer that dies in
between leaves a group that nobody finds, and that is deleted when it is old.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.envelope import Verdict
from kvtier.tiering.obj.client import Client
from kvtier.tiering.obj.layout import draw_group_id
from kvtier.tiering.obj.pointer import POINTER_BYTES, Location, pack_pointer, unpack_pointer
from kvtier.tiering.obj.rows import Block, SealedRows
from kvtier.tiering.obj.space import Space


class Member(NamedTuple):
    """A block that is to be read from a group; sorts by place."""

    location: Location
    block: Block


class Groups:
    """Writes and reads several blocks with one request.

    Args:
        client: the store.
        rows: the primary's.
    """

    def __init__(self, client: Client, rows: SealedRows) -> None:
        self._client = client
        self._rows = rows

    def write(self, space: Space, blocks: Sequence[Block]) -> set[OffloadKey]:
        """Write one object and, once it is there, the pointers into it; return the keys that can be found now."""
        group_id, digest = draw_group_id(), space.namespace.digest
        self._client.put_new(space.group_path(group_id), self._rows.seal(blocks, digest))
        pointers = {
            space.block_path(key): pack_pointer(Location(group_id, position), key, digest)
            for position, (key, _) in enumerate(blocks)
        }
        written = self._client.put_new_each(pointers)
        return {key for key, _ in blocks if space.block_path(key) in written}

    def read_pointers(self, space: Space, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Read pointers and remember where they point; return the keys of the sound ones."""
        paths = {key: space.block_path(key) for key in keys}
        bodies = self._client.get_each(list(paths.values()), POINTER_BYTES) if paths else {}
        found = {}
        for key, path in paths.items():
            body = bodies.get(path)
            location = None if body is None else unpack_pointer(body, key, space.namespace.digest)
            if isinstance(location, Location):
                found[key] = location
        space.note_locations(found.items())
        return found

    def load(self, space: Space, members: Sequence[Member]) -> dict[OffloadKey, Verdict | None]:
        """Read blocks, one request for each group; return what is wrong with those that have not arrived.

        Returns:
            None for a block whose group is gone.
        """
        of_group: defaultdict[bytes, list[Member]] = defaultdict(list)
        for member in sorted(members):
            of_group[member.location.group_id].append(member)
        failures: dict[OffloadKey, Verdict | None] = {}
        for group_id, group in of_group.items():
            failures |= self._load_one(space, group_id, group)
        space.forget_locations(failures)
        return failures

    def _load_one(
        self, space: Space, group_id: bytes, members: Sequence[Member]
    ) -> dict[OffloadKey, Verdict | None]:
        """Read from the first to the last wanted block; what lies between and is not wanted is read too."""
        block_bytes = self._rows.block_bytes
        first, last = members[0].location.position, members[-1].location.position
        path = space.group_path(group_id)
        body = self._client.get_range(path, first * block_bytes, (last - first + 1) * block_bytes)
        if body is None:
            return {member.block[0]: None for member in members}
        failures: dict[OffloadKey, Verdict | None] = {}
        for location, block in members:
            begin = (location.position - first) * block_bytes
            verdict = self._rows.land(body[begin : begin + block_bytes], block, space.namespace.digest)
            if verdict is not Verdict.OK:
                failures[block[0]] = verdict
        return failures
