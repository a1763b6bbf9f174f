"""The lines of a recorded trace: one for the recording, one for each request, one for the end.

Each line is one JSON object:

    {"kvtier_trace": 1, "block_tokens": 16}
    {"timestamp": 12.5, "input_length": 70, "output_length": 8, "hash_ids": [5, 7, 9, 11], "stop": 2}
    {"kvtier_trace_end": 1, "requests": 1, "dropped": 0, "is_full": false}

A line of a request may have three fields more, which say where its prompt came from: ``origins``, the tokens that were
not computed, by "device", "host" or the type of a tier; ``missed``, the others, with a cause for each run of them
(``kvtier.misses``); and ``waited``, milliseconds from its first search to the final answer.

``timestamp`` is the arrival of the request, in milliseconds since the start of the recording. ``hash_ids`` has one id
for each full block of the prompt; a partial last block has none, because engines hash full blocks only. Requests stand
in the order in which they ended. The last line is missing when a recording did not end in order.
"""

import json
from dataclasses import dataclass

from kvtier.connector.common import StopReason
from kvtier.misses import RequestRecord, run_to_json

TRACE_MARK = "kvtier_trace"
END_MARK = "kvtier_trace_end"
VERSION = 1
"""A reader refuses other versions, because their fields may differ in meaning."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The first line.

    Attributes:
        block_tokens: prompt tokens of a block.
    """

    block_tokens: int

    def to_line(self) -> bytes:
        """Return the line with its end."""
        return _to_line({TRACE_MARK: VERSION, "block_tokens": self.block_tokens})


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request.

    Attributes:
        arrival_s: its arrival, since the start of the recording.
        num_prompt_tokens: length of its prompt.
        num_output_tokens: length of its answer so far.
        hash_ids: one id for each full block of the prompt, head first.
        stop: why its answer ended.
        record: where its prompt came from; None when that is unknown, as for a request that was never computed.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    stop: StopReason
    record: RequestRecord | None = None

    def to_line(self) -> bytes:
        """Return the line with its end; times to a microsecond."""
        values: dict[str, object] = {
            "timestamp": round(self.arrival_s * 1000, 3),
            "input_length": self.num_prompt_tokens,
            "output_length": self.num_output_tokens,
            "hash_ids": self.hash_ids,
            "stop": self.stop.value,
        }
        if self.record is not None:
            values["origins"] = dict(self.record.tokens_by_origin)
            values["missed"] = [run_to_json(run) for run in self.record.missed]
            values["waited"] = round(self.record.waited_s * 1000, 3)
        return _to_line(values)


@dataclass(frozen=True, slots=True)
class TraceEnd:
    """The last line of a recording that ended in order.

    Attributes:
        num_requests: lines of requests before it.
        num_dropped: requests that ended before it and were not written.
        is_full: whether it ended because the file had reached its limit.
    """

    num_requests: int
    num_dropped: int
    is_full: bool

    def to_line(self) -> bytes:
        """Return the line with its end."""
        counts = {"requests": self.num_requests, "dropped": self.num_dropped}
        return _to_line({END_MARK: VERSION, **counts, "is_full": self.is_full})


def _to_line(values: dict[str, object]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode("ascii") + b"\n"
