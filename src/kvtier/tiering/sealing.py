"""Blocks are sealed some bytes ahead of their writes, where the device fetches them from memory by itself.

It knows no header and no file. A checksum reads its block into the core's cache, and a device that fetches the block
from there is slowed down by it. With other blocks sealed in between, the block has left the cache when its turn comes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

B = TypeVar("B")
S = TypeVar("S")

SEAL_AHEAD_BYTES = 2**20
"""Bytes that are sealed between the checksum of a block and its write, as nearly as whole blocks allow: about half of a
core's cache, and threads share cores. Fewer leave blocks in it; more let the device wait when a thread begins."""


def plan_num_ahead(block_bytes: int, *, has_direct_io: bool) -> int:
    """Return how many blocks are sealed ahead, 0 where a write is a copy by the core that has just read them. Pure.

    Args:
        block_bytes: what is written at a stretch; one of more than 2 MiB pushes its own beginning out.
        has_direct_io: whether writes bypass the page cache.
    """
    return (SEAL_AHEAD_BYTES + block_bytes // 2) // block_bytes if has_direct_io else 0


def seal_ahead(blocks: Iterable[B], seal: Callable[[B], S], num_ahead: int) -> Iterator[S]:
    """Yield every block sealed, in order, each when ``num_ahead`` later ones have been sealed as well.

    Args:
        blocks: what to seal.
        seal: seals one; at most ``num_ahead`` + 1 of its results are in use at a time.
        num_ahead: fewer are sealed before a block where fewer follow it.
    """
    sealed: deque[S] = deque()
    for block in blocks:
        sealed.append(seal(block))
        if len(sealed) > num_ahead:
            yield sealed.popleft()
    yield from sealed
