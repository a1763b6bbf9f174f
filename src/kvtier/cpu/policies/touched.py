"""What a touch means to policies that count uses or keep the order of insertion; it changes nothing itself.

Whoever stores a request chunk by chunk touches the whole request after each chunk, so that the head of the prefix
ends up most recent. Blocks of earlier chunks are ready by then. Counted as a use, every touch would make each
block of a long prompt, or of a long answer, look reused although one request alone has named it, and a policy that
tells blocks used once from blocks used again would have nothing left to tell. Such a touch can be recognised: it
names the blocks just stored, whose writes are in flight. So a touch that names a block in flight puts blocks in
order and counts no use. The price: a request that shares blocks with one that is storing just then is not counted
for that touch. What a policy cannot see is that two touches came from one request (its arrival and the end of its load).
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus


class Touched(NamedTuple):
    """The held blocks that one touch names, each once, the first named last.

    Attributes:
        held: keys of all of them.
        in_flight: keys of those whose write is in flight.
    """

    held: list[OffloadKey]
    in_flight: list[OffloadKey]

    @property
    def is_use(self) -> bool:
        """Whether the touch counts as a use, and does not only put in order what is being stored."""
        return not self.in_flight


def find_touched(get: Callable[[OffloadKey], BlockStatus | None], keys: Collection[OffloadKey]) -> Touched:
    """Return which of ``keys`` are held, and which of these are in flight. Pure."""
    named = [(key, block) for key in reversed(dict.fromkeys(keys)) if (block := get(key)) is not None]
    return Touched([key for key, _ in named], [key for key, block in named if block.ref_cnt < 0])
