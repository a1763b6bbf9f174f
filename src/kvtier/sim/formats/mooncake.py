"""The format of the traces that were released with the Mooncake paper.

One object per line: ``timestamp`` in milliseconds from the start, ``input_length``, ``output_length``, and
``hash_ids``, one for each 512 tokens of the prompt, chained: equal ids mean an equal prefix.

Source: R. Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST'25.
"""

from collections.abc import Iterator
from pathlib import Path

from kvtier.sim.formats.base import TraceFormat, check_num_blocks
from kvtier.sim.formats.lines import Line, read_lines
from kvtier.sim.trace import StopReason, TraceRequest

MS = 0.001
FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})


class MooncakeFormat(TraceFormat):
    """Chained ids of 512 tokens, times in milliseconds."""

    block_tokens = 512

    @staticmethod
    def recognises(line: Line) -> bool:
        return line.values.keys() == FIELDS

    @classmethod
    def read(cls, path: Path) -> Iterator[TraceRequest]:
        for line in read_lines(path):
            yield read_request(line, cls.block_tokens)


def read_request(line: Line, block_tokens: int, stop: StopReason = StopReason.UNKNOWN) -> TraceRequest:
    """Return the request of a line, of this format or of one with more fields.

    Raises:
        TraceError: a field is missing or wrong, or the ids do not fit the prompt.
    """
    num_tokens, ids = line.whole("input_length"), line.hash_ids()
    check_num_blocks(line, num_tokens, len(ids), block_tokens)
    arrival_s = line.seconds("timestamp", unit_s=MS)
    return TraceRequest(arrival_s, num_tokens, line.whole("output_length"), ids, stop)
