"""The contract of a trace format: its block size, how it is recognised, how it is read; and what the readers share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtier.sim.formats.lines import Line
from kvtier.sim.trace import TraceRequest

ROOT = -1
"""The prefix before the first block of a prompt."""

FIRST_NEW = 2**63
"""Numbers of prefixes that cannot keep the id of the file begin here; eight bytes hold them all."""


class TraceFormat(ABC):
    """A file format of traces. It has no state: all methods are of the class.

    Attributes:
        block_tokens: prompt tokens that one id stands for, unless the file or its reader says otherwise.
        time_unit_s: seconds of a unit of its times, unless its reader says otherwise; None: there is no choice.
    """

    block_tokens: int
    time_unit_s: float | None = None

    @staticmethod
    @abstractmethod
    def recognises(line: Line) -> bool:
        """Return whether the first line of a file looks like this format. Pure."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path, block_tokens: int, time_unit_s: float | None) -> Iterator[TraceRequest]:
        """Yield the requests in the order of the file, one line in memory at a time.

        Args:
            path: the file.
            block_tokens: prompt tokens that one id stands for.
            time_unit_s: seconds of a unit of its times; None: what the format says.

        Raises:
            TraceError: a line is not of this format.
        """

    @classmethod
    def block_tokens_of(cls, path: Path) -> int | None:
        """Return the tokens that an id of ``path`` stands for; None: the file does not say."""
        del path
        return None


class PrefixChain:
    """Names prefixes: equal prefixes get equal numbers, different ones different numbers.

    Ids that name a block's content alone may be equal behind unequal prefixes, where no prefix cache can hit; all but
    the first of those get another number. Ids that name a prefix stay as they are. So a reader need not know which of
    the two a file has. Text, and integers of 64 bits, get a number too.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}
        self._used: set[int] = set()

    def number(self, ids: Iterable[int | str]) -> tuple[int, ...]:
        """Return one number for each prefix of ``ids``, shortest first."""
        numbers = self._numbers
        chained: list[int] = []
        last = ROOT
        for each in ids:
            number = numbers.get((last, each))
            last = self._add(last, each) if number is None else number
            chained.append(last)
        return tuple(chained)

    def _add(self, last: int, each: int | str) -> int:
        is_free = isinstance(each, int) and 0 <= each < FIRST_NEW and each not in self._used
        number = int(each) if is_free else FIRST_NEW + len(self._numbers)
        self._used.add(number)
        self._numbers[last, each] = number
        return number


def check_num_blocks(line: Line, num_tokens: int, num_ids: int, block_tokens: int) -> None:
    """Compare the length of a prompt with its number of ids; the last partial block may have one or none.

    Raises:
        TraceError: they disagree, because the block size is another one or ids are missing.
    """
    fewest, most = num_tokens // block_tokens, -(-num_tokens // block_tokens)
    if not fewest <= num_ids <= most:
        expected = f"{fewest}" if fewest == most else f"{fewest} or {most}"
        remedy = f"a prompt of {num_tokens} tokens has {expected} ids of {block_tokens} tokens: is it another format?"
        smallest, largest = num_tokens // (num_ids + 1) + 1, (num_tokens - 1) // max(1, num_ids - 1)
        if num_ids and 1 <= smallest <= largest:
            sizes = f"of {smallest}" if smallest == largest else f"from {smallest} to {largest}"
            remedy += f" Blocks {sizes} tokens would fit: name the trace's with --block-tokens"
        raise line.fail(f"{num_ids} hash_ids", remedy)
