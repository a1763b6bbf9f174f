"""What the headers of a slab say, before anyone has judged it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.base import OffloadKey


class FoundBlock(NamedTuple):
    """A slot whose header is right.

    Attributes:
        generation: of its write; first, so that blocks sort by age.
        slot: its number.
        namespace: first bytes of its namespace's digest.
        key: the block.
    """

    generation: int
    slot: int
    namespace: bytes
    key: OffloadKey


@dataclass(slots=True)
class Headers:
    """What the headers of a slab, or of a part of it, say; slots in any order.

    Attributes:
        blocks: one for each slot whose header is right.
        free: slots that hold nothing.
        unknown: slots with headers of another version or codec.
        unreadable: slots that the disk did not give, and why.
        newest: the highest generation.
        oldest_unfinished: generation from which on a crash can have left half a block, as the newest header says.
    """

    blocks: list[FoundBlock] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    unreadable: list[tuple[int, OSError]] = field(default_factory=list)
    newest: int = 0
    oldest_unfinished: int = 0

    def add(self, part: "Headers") -> None:
        """Take over what other headers of the same slab say."""
        self.blocks += part.blocks
        self.free += part.free
        self.unknown += part.unknown
        self.unreadable += part.unreadable
        self.note(part.newest, part.oldest_unfinished)

    def note(self, generation: int, oldest_unfinished: int) -> None:
        """Take over what one header says of unfinished writes, if it is the newest."""
        if generation >= self.newest:
            self.newest, self.oldest_unfinished = generation, oldest_unfinished
