"""Which device blocks are in use, and which still hold a prefix that can be used again.

It moves no bytes. A block that nobody uses keeps its content, and its digest, until the block is needed: the
prefix cache is exactly the unused blocks, given away least recently used first. A request returns its blocks
last one first, so that the tail of a prefix goes before its head, which more requests share.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvtier.errors import DevicePoolError


class DeviceBlockPool:
    """Reference counts and the prefix cache of ``num_blocks`` device blocks. Used from one thread.

    Args:
        num_blocks: blocks in the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses; some of them hold a cached prefix."""
        return len(self._unused)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their digest."""
        return len(self._by_digest)

    def take_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Use the leading blocks of ``digests`` that the pool holds, and return them in order."""
        found: list[int] = []
        for digest in digests:
            block_id = self._by_digest.get(digest)
            if block_id is None:
                break
            found.append(block_id)
        for block_id in found:
            self._ref_counts[block_id] += 1
            self._unused.pop(block_id, None)
        return found

    def allocate(self, num_blocks: int) -> list[int]:
        """Use ``num_blocks`` blocks of undefined content, least recently used first.

        Raises:
            DevicePoolError: fewer are unused; nothing has changed.
        """
        if num_blocks > len(self._unused):
            raise DevicePoolError(self.num_blocks, num_blocks, len(self._unused))
        taken = [self._unused.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
            self._forget(block_id)
        return taken

    def publish(self, block_id: int, digest: bytes) -> None:
        """Let a used block, now full, be found by its digest.

        Effects: a digest that another block already stands for stays with that block.
        """
        if digest in self._by_digest or self._digests[block_id] is not None:
            return
        self._by_digest[digest] = block_id
        self._digests[block_id] = digest

    def free(self, block_ids: Sequence[int]) -> None:
        """End the use of ``block_ids``, given in the order of the request; published ones stay cached."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._unused[block_id] = None
                if self._digests[block_id] is None:
                    self._unused.move_to_end(block_id, last=False)

    def drop_cached(self) -> None:
        """Forget every digest, so that no prefix is found on the device any more."""
        for block_id in list(self._by_digest.values()):
            self._forget(block_id)

    def check(self) -> None:
        """Assert that no block is lost or counted twice."""
        in_use = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        assert not in_use & self._unused.keys(), "a used block is on offer"
        assert len(in_use) + len(self._unused) == self.num_blocks, "a block is lost"
        assert all(self._digests[block_id] == key for key, block_id in self._by_digest.items())

    def _forget(self, block_id: int) -> None:
        digest = self._digests[block_id]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block_id] = None

    def __repr__(self) -> str:
        return (
            f"DeviceBlockPool({self.num_blocks} blocks: {self.num_blocks - self.num_free_blocks} used, "
            f"{self.num_cached_blocks} cached)"
        )
