"""Which touches count as a use, for policies that count uses or keep the order of insertion.

A connector that stores a request chunk by chunk touches the whole request after each chunk, so that the head of the
prefix ends up most recent. Blocks of earlier chunks are ready by then. If every touch counted as a use, each block of a
long prompt would look reused although a single request has named it. Such a touch names the blocks just stored, whose
writes are in flight. So a touch that names a block in flight only orders blocks and counts no use. The cost: a request
that shares blocks with one that is storing at that moment counts no use by that touch. A policy cannot tell that two
touches came from one request (at its arrival and at the end of its load).
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
        """Whether the touch counts as a use; one that names a block in flight only orders blocks."""
        return not self.in_flight


def find_touched(get: Callable[[OffloadKey], BlockStatus | None], keys: Collection[OffloadKey]) -> Touched:
    """Return which of ``keys`` are held, and which of these are in flight. Pure."""
    named = [(key, block) for key in reversed(dict.fromkeys(keys)) if (block := get(key)) is not None]
    return Touched([key for key, _ in named], [key for key, block in named if block.ref_cnt < 0])
