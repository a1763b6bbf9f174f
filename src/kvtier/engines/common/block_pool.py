"""The pool of an engine's device blocks: numbered, shared by prefix, allocated in LRU order.

A block that no request uses keeps its content and its hash until its number is allocated again, so the prefix cache is
exactly the unused blocks. A request frees its blocks tail first, so the tail of a prefix is reused before its head,
which more requests share. A block without a hash, such as a partial one, is reused before any other.

Source: the rules are those of vLLM's block pool.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.errors import ConfigError, DevicePoolError


class DeviceBlockPool:
    """Use counts and the prefix cache of ``num_blocks`` device blocks. Used from one thread.

    Args:
        num_blocks: blocks in the pool.

    Raises:
        ConfigError: fewer than one.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError("num_blocks", num_blocks, "the device holds at least one block")
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Blocks that no request uses, the next to be allocated first.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_empty = num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses, cached ones included."""
        return len(self._unused)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by hash."""
        return len(self._by_hash)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that a request uses or that can be found by hash."""
        return self.num_blocks - self._num_empty

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``hashes``. Pure."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def has_room(self, prefix: Sequence[int], num_new: int) -> bool:
        """Return whether ``num_new`` blocks can be allocated beside those of ``prefix``. Pure."""
        num_free = len(self._unused)
        if num_new <= num_free - len(prefix):
            return True
        if num_new > num_free:
            return False
        num_users = self._num_users
        return num_new <= num_free - sum(num_users[block_id] == 0 for block_id in prefix)

    def allocate(self, prefix: Sequence[int], num_new: int) -> list[int]:
        """Use the blocks of ``prefix`` and ``num_new`` others with undefined content; return all of them in order.

        Raises:
            DevicePoolError: there is no room; nothing has changed.
        """
        if not self.has_room(prefix, num_new):
            raise DevicePoolError(self.num_blocks, num_new, len(self._unused))
        num_users, unused, hashes = self._num_users, self._unused, self._hashes
        for block_id in prefix:
            if num_users[block_id] == 0:
                del unused[block_id]
            num_users[block_id] += 1
        new = list(islice(unused, num_new))
        for block_id in new:
            del unused[block_id]
            num_users[block_id] = 1
            block_hash = hashes[block_id]
            if block_hash is None:
                self._num_empty -= 1
            else:
                del self._by_hash[block_hash]
                hashes[block_id] = None
        return [*prefix, *new]

    def publish(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Make used blocks, which are full now, findable by their hashes.

        A hash that another block has stays with that block, and a block keeps the hash that it has.
        """
        by_hash, hashes_of = self._by_hash, self._hashes
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash not in by_hash and hashes_of[block_id] is None:
                by_hash[block_hash] = block_id
                hashes_of[block_id] = block_hash

    def free(self, block_ids: Sequence[int]) -> None:
        """End one use of each block, given in the request's order; published blocks stay cached."""
        num_users, unused, hashes = self._num_users, self._unused, self._hashes
        for block_id in reversed(block_ids):
            num_left = num_users[block_id] = num_users[block_id] - 1
            if num_left == 0:
                unused[block_id] = None
                if hashes[block_id] is None:
                    self._num_empty += 1
                    unused.move_to_end(block_id, last=False)

    def drop_cached(self) -> None:
        """Forget every hash, so that no prefix is found on the device."""
        for block_id in self._by_hash.values():
            self._hashes[block_id] = None
            self._num_empty += block_id in self._unused
        self._by_hash.clear()

    def check(self) -> None:
        """Assert that no block is lost or counted twice."""
        in_use = {block_id for block_id, count in enumerate(self._num_users) if count > 0}
        assert not in_use & self._unused.keys(), "a used block is also free"
        assert len(in_use) + len(self._unused) == self.num_blocks, "a block is lost"
        assert all(self._hashes[block_id] == key for key, block_id in self._by_hash.items())
        assert self.num_held_blocks == len(in_use | set(self._by_hash.values())), "held blocks are miscounted"

    def __repr__(self) -> str:
        return (
            f"DeviceBlockPool({self.num_blocks} blocks: {self.num_blocks - self.num_free_blocks} used, "
            f"{self.num_cached_blocks} cached)"
        )
