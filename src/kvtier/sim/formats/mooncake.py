"""The format of the traces that were released with the Mooncake paper, which other tools write too.

One object per line: ``timestamp`` in milliseconds from the start, ``input_length``, ``output_length``, and
``hash_ids``, one for each 512 tokens of the prompt. Mooncake's ids name a prefix, those of other tools a prefix or a
block's content; both are read. A line may have ``stop``, why the turn ended: 0 when unknown or missing, 1 when the
model called a tool, 2 when it ended its turn. Other fields are ignored.

Source: R. Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST'25.
"""

from collections.abc import Iterator
from pathlib import Path

from kvtier.sim.formats.base import PrefixChain, TraceFormat, check_num_blocks
from kvtier.sim.formats.lines import Line, read_lines
from kvtier.sim.trace import StopReason, TraceRequest

MS = 0.001
FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})

MAX_TOKENS_PER_S = 1e6
"""Prompt tokens per second of a whole trace, at most. The hour of Mooncake's chat service has 40,000; with its times in
seconds, read as milliseconds, it would have 40 million. A larger limit lets the times of smaller services pass."""

MAX_FRACTION_TOKENS_PER_S = 1e5
"""The same for times with fractions, which seconds have more often than milliseconds."""

MIN_WHOLE_REQUESTS = 10
"""Requests from which whole times are checked. A few requests within some milliseconds are a burst."""


class MooncakeFormat(TraceFormat):
    """Ids of 512 tokens, times in milliseconds."""

    block_tokens = 512
    time_unit_s = MS

    @staticmethod
    def recognises(line: Line) -> bool:
        return line.values.keys() >= FIELDS and "chat_id" not in line.values

    @classmethod
    def read(cls, path: Path, block_tokens: int, time_unit_s: float | None) -> Iterator[TraceRequest]:
        chain, pace = PrefixChain(), _Pace()
        for line in read_lines(path):
            request = read_request(line, block_tokens, chain, time_unit_s or MS)
            if time_unit_s is None:
                pace.add(line, request)
            yield request
        pace.check()


class _Pace:
    """How many prompt tokens a second the times of a file amount to, which shows when they are not milliseconds."""

    def __init__(self) -> None:
        self._num_requests = self._num_tokens = 0
        self._first_s, self._last_s = float("inf"), 0.0
        self._last: Line | None = None
        self._fraction: Line | None = None

    def add(self, line: Line, request: TraceRequest) -> None:
        """Count a request."""
        self._num_requests += 1
        self._num_tokens += request.num_prompt_tokens
        self._first_s, self._last_s = (
            min(self._first_s, request.arrival_s),
            max(self._last_s, request.arrival_s),
        )
        self._last = line
        if self._fraction is None and line.values["timestamp"] % 1:
            self._fraction = line

    def check(self) -> None:
        """Refuse a pace that no service has.

        Raises:
            TraceError: the times cannot be milliseconds.
        """
        line = self._fraction or self._last
        span_s = self._last_s - self._first_s
        most = MAX_TOKENS_PER_S if self._fraction is None else MAX_FRACTION_TOKENS_PER_S
        too_few = self._fraction is None and self._num_requests < MIN_WHOLE_REQUESTS
        if line is None or span_s <= 0 or too_few or self._num_tokens <= most * span_s:
            return
        remedy = (
            f"as milliseconds the times have {self._num_tokens / span_s:,.0f} prompt tokens a second, which no "
            "service computes: give --time-unit s if they are seconds, --time-unit ms if they are right"
        )
        raise line.fail(line.values["timestamp"], remedy)


def read_request(line: Line, block_tokens: int, chain: PrefixChain, time_unit_s: float) -> TraceRequest:
    """Return the request of a line, of this format or of one with more fields.

    Raises:
        TraceError: a field is missing or wrong, or the ids do not fit the prompt.
    """
    num_tokens, ids = line.whole("input_length"), line.hash_ids()
    check_num_blocks(line, num_tokens, len(ids), block_tokens)
    arrival_s = line.seconds("timestamp", unit_s=time_unit_s)
    return TraceRequest(arrival_s, num_tokens, line.whole("output_length"), chain.number(ids), _stop_of(line))


def _stop_of(line: Line) -> StopReason:
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
