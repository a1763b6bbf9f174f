"""What a slab holds, as it was found at the start."""

from collections import deque
from dataclasses import dataclass, field

from kvtier.base import OffloadKey


@dataclass(slots=True)
class Contents:
    """Every slot that can be used, once.

    Attributes:
        slot_of: our blocks, oldest first.
        foreign: slots of other namespaces, oldest first.
        free: slots that hold nothing.
        next_generation: beyond every one that was found.
    """

    slot_of: dict[OffloadKey, int] = field(default_factory=dict)
    foreign: deque[int] = field(default_factory=deque)
    free: deque[int] = field(default_factory=deque)
    next_generation: int = 1
