"""The contract of a trace format: its block size, how it is recognised, how it is read."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from kvtier.sim.formats.lines import Line
from kvtier.sim.trace import TraceRequest


class TraceFormat(ABC):
    """A file format of traces. It has no state: all methods are of the class.

    Attributes:
        block_tokens: prompt tokens that one id stands for, unless the file says otherwise.
    """

    block_tokens: int

    @staticmethod
    @abstractmethod
    def recognises(line: Line) -> bool:
        """Return whether the first line of a file looks like this format. Pure."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> Iterator[TraceRequest]:
        """Yield the requests in the order of the file, one line in memory at a time.

        Raises:
            TraceError: a line is not of this format.
        """

    @classmethod
    def block_tokens_of(cls, path: Path) -> int:
        """Return the tokens that an id of ``path`` stands for."""
        del path
        return cls.block_tokens


def check_num_blocks(line: Line, num_tokens: int, num_ids: int, block_tokens: int) -> None:
    """Compare the length of a prompt with its number of ids; the last partial block may have one or none.

    Raises:
        TraceError: they disagree, because the block size is another one or ids are missing.
    """
    fewest, most = num_tokens // block_tokens, -(-num_tokens // block_tokens)
    if not fewest <= num_ids <= most:
        expected = f"{fewest}" if fewest == most else f"{fewest} or {most}"
        remedy = f"a prompt of {num_tokens} tokens has {expected} ids of {block_tokens} tokens: is it another format?"
        raise line.fail(f"{num_ids} hash_ids", remedy)
