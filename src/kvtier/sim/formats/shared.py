"""The format of kvtier's own traces: Mooncake's, with the reason why each turn ended.

``stop`` is 0 when unknown or missing, 1 when the model called a tool, 2 when it ended its turn.
"""

from collections.abc import Iterator
from pathlib import Path

from kvtier.sim.formats.base import TraceFormat
from kvtier.sim.formats.lines import Line, read_lines
from kvtier.sim.formats.mooncake import FIELDS, read_request
from kvtier.sim.trace import StopReason, TraceRequest


class SharedFormat(TraceFormat):
    """Mooncake's format with a reason for the end of each turn."""

    block_tokens = 512

    @staticmethod
    def recognises(line: Line) -> bool:
        return line.values.keys() == FIELDS | {"stop"}

    @classmethod
    def read(cls, path: Path) -> Iterator[TraceRequest]:
        for line in read_lines(path):
            yield read_request(line, cls.block_tokens, stop_of(line))


def stop_of(line: Line) -> StopReason:
    """Return why the turn of a line ended.

    Raises:
        TraceError: ``stop`` is not a known number.
    """
    value = line.values.get("stop", 0)
    if type(value) is int:
        for reason in StopReason:
            if reason.value == value:
                return reason
    raise line.fail(value, "stop must be 0 (unknown), 1 (tool use) or 2 (end of turn)")
