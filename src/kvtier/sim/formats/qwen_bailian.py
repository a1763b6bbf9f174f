"""The format of the anonymised traces of Qwen on Aliyun Bailian.

One object per line: ``timestamp`` in seconds from the start, ``input_length``, ``output_length``, ``hash_ids``, one for
each 16 tokens of the prompt, and fields about the chat that a replay does not need. These ids name a block's content
alone, so equal ids may follow unequal prefixes, where no prefix cache can hit. They are therefore renumbered: one
number for each distinct prefix, in the order of first appearance.

Source: J. Wang et al., "KVCache Cache in the Wild", USENIX ATC'25, and the dataset's README.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtier.sim.formats.base import TraceFormat, check_num_blocks
from kvtier.sim.formats.lines import Line, read_lines
from kvtier.sim.trace import TraceRequest

ROOT = -1
"""The prefix before the first block of a prompt; chained ids begin with 0."""


class QwenBailianFormat(TraceFormat):
    """Ids of 16 tokens by content, times in seconds."""

    block_tokens = 16

    @staticmethod
    def recognises(line: Line) -> bool:
        return {"chat_id", "hash_ids"} <= line.values.keys()

    @classmethod
    def read(cls, path: Path) -> Iterator[TraceRequest]:
        chain = PrefixChain()
        for line in read_lines(path):
            num_tokens, ids = line.whole("input_length"), line.hash_ids()
            check_num_blocks(line, num_tokens, len(ids), cls.block_tokens)
            chained = chain.number(ids)
            yield TraceRequest(line.seconds("timestamp"), num_tokens, line.whole("output_length"), chained)


class PrefixChain:
    """Numbers prefixes: equal prefixes get equal numbers, different ones different numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def number(self, content_ids: Iterable[int]) -> tuple[int, ...]:
        """Return one number for each prefix of ``content_ids``, shortest first."""
        numbers = self._numbers
        chained: list[int] = []
        last = ROOT
        for content_id in content_ids:
            last = numbers.setdefault((last, content_id), len(numbers))
            chained.append(last)
        return tuple(chained)
