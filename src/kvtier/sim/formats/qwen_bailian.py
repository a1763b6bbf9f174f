"""The format of the anonymised traces of Qwen on Aliyun Bailian.

One object per line, as in Mooncake's format, but with ``timestamp`` in seconds, an id for each 16 tokens of the prompt,
and fields about the chat that a replay does not need. These ids name a block's content alone.

Source: J. Wang et al., "KVCache Cache in the Wild", USENIX ATC'25, and the dataset's README.
"""

from collections.abc import Iterator
from pathlib import Path

from kvtier.sim.formats.base import PrefixChain, TraceFormat
from kvtier.sim.formats.lines import Line, read_lines
from kvtier.sim.formats.mooncake import read_request
from kvtier.sim.trace import TraceRequest


class QwenBailianFormat(TraceFormat):
    """Ids of 16 tokens by content, times in seconds."""

    block_tokens = 16
    time_unit_s = 1.0

    @staticmethod
    def recognises(line: Line) -> bool:
        return {"chat_id", "hash_ids"} <= line.values.keys()

    @classmethod
    def read(cls, path: Path, block_tokens: int, time_unit_s: float | None) -> Iterator[TraceRequest]:
        chain = PrefixChain()
        for line in read_lines(path):
            yield read_request(line, block_tokens, chain, time_unit_s or cls.time_unit_s)
