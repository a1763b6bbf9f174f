"""The device cache of a simulated engine: numbered blocks, shared by prefix, the least recently used given away first.

It is the engine's own cache and no rule of kvtier's: it follows what vLLM does. A block that nobody uses keeps its
content until its number is needed; a request's blocks are given back tail first, so that of one prefix the tail
leaves first. A block whose content nobody can ask for, such as a partial one, is used again before any other.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.errors import ConfigError, InvariantError


class DevicePool:
    """Device blocks.

    Args:
        num_blocks: how many.

    Raises:
        ConfigError: fewer than one.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError("num_blocks", num_blocks, "the device holds at least one block")
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # Those that nobody uses, the one to be given away next first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_empty = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, whatever they still hold."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that somebody uses or whose content can be found."""
        return self.num_blocks - self._num_empty

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the leading run of ``hashes`` that are held. Pure."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def has_room(self, prefix: Sequence[int], num_new: int) -> bool:
        """Return whether ``num_new`` blocks can be taken beside those of ``prefix``. Pure."""
        num_free = len(self._free)
        if num_new <= num_free - len(prefix):
            return True
        if num_new > num_free:
            return False
        num_users = self._num_users
        return num_new <= num_free - sum(num_users[block_id] == 0 for block_id in prefix)

    def take(self, prefix: Sequence[int], num_new: int) -> list[int]:
        """Use the blocks of ``prefix`` and as many new ones, whose content is lost; the caller has asked for room.

        Raises:
            InvariantError: there is no room.
        """
        if not self.has_room(prefix, num_new):
            raise InvariantError(f"{num_new} device blocks are asked for and {len(self._free)} are free")
        num_users, free, hashes_of = self._num_users, self._free, self._hashes
        for block_id in prefix:
            if num_users[block_id] == 0:
                del free[block_id]
            num_users[block_id] += 1
        new = list(islice(free, num_new))
        for block_id in new:
            del free[block_id]
            num_users[block_id] = 1
            block_hash = hashes_of[block_id]
            if block_hash is None:
                self._num_empty -= 1
            else:
                del self._cached[block_hash]
                hashes_of[block_id] = None
        return [*prefix, *new]

    def name(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Let blocks in use be found under their hashes; a hash that another block has stays with that one."""
        cached, hashes_of = self._cached, self._hashes
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash not in cached:
                if hashes_of[block_id] is not None:
                    self._forget(block_id)
                cached[block_hash] = block_id
                hashes_of[block_id] = block_hash

    def give_back(self, block_ids: Sequence[int]) -> None:
        """End one use of each block; those without a name are given away first, then the last of the others."""
        num_users, free, hashes_of = self._num_users, self._free, self._hashes
        for block_id in reversed(block_ids):
            num_left = num_users[block_id] = num_users[block_id] - 1
            if num_left == 0:
                free[block_id] = None
                if hashes_of[block_id] is None:
                    self._num_empty += 1
                    free.move_to_end(block_id, last=False)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block_id] = None
