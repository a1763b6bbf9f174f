"""What clients say with the requests of a replayed trace, where the trace tells how turns ended.

It guesses nothing that a client could not know by the rule that is chosen. A turn goes on the latest one whose whole
prompt begins its own.
"""

from enum import Enum
from typing import Any

from kvtier.sim.trace import StopReason, TraceRequest

STOPS = {StopReason.TOOL_USE: "tool_use", StopReason.END_TURN: "end_turn"}


class ClientHints(Enum):
    """What clients know when they send a request."""

    NONE = "none"
    """They say nothing."""

    AS_LAST_TURN = "as_last_turn"
    """They expect this turn to end as their last one did; nothing of a first turn, and nothing of lengths."""

    FORESEEN = "foreseen"
    """They know how this turn will end and how long its answer will be: a bound on what hints can do."""


class Clients:
    """The clients of a trace.

    Args:
        known: what they know.
    """

    def __init__(self, known: ClientHints) -> None:
        self._known = known
        self._stop_after: dict[int, StopReason] = {}

    def hints_of(self, request: TraceRequest) -> dict[str, Any] | None:  # Any: the type of kv_transfer_params
        """Return what is said with a request, None for nothing; requests come in the order of their arrival."""
        if self._known is ClientHints.NONE:
            return None
        if self._known is ClientHints.FORESEEN:
            return _said(request.stop) | {"expected_output_tokens": request.num_output_tokens}
        before = next((each for each in reversed(request.hash_ids) if each in self._stop_after), None)
        hints = _said(StopReason.UNKNOWN if before is None else self._stop_after[before])
        if request.hash_ids:
            self._stop_after[request.hash_ids[-1]] = request.stop
        return hints


def _said(stop: StopReason) -> dict[str, Any]:  # Any: the type of kv_transfer_params
    return {"expected_stop": STOPS[stop]} if stop in STOPS else {}
