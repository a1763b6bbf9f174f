"""What a client says of its request, as far as the hazard model can use it.

Nothing here is needed: without hints the model is what it was. A hint is an expectation; a wrong one costs hits and
nothing else. One that makes no sense is ignored, with one warning for each name.
"""

import logging
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

EXPECTED_STOP = "expected_stop"
EXPECTED_OUTPUT_TOKENS = "expected_output_tokens"

STOP_LEVELS = {"tool_use": 1, "end_turn": 2}
"""How a turn is expected to end; 0 when nobody says it."""

OUTPUT_FROM_TOKENS = (128, 512, 2048)
NUM_STOP_LEVELS = len(STOP_LEVELS) + 1
NUM_OUTPUT_LEVELS = len(OUTPUT_FROM_TOKENS) + 2
"""Levels of the length of the answer, of which 0 means that nobody says it."""


class HintReader:
    """Reads the hints of requests, and warns once of each name that had a value without sense."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, hints: Mapping[str, Any]) -> int:  # Any: a client's JSON, checked here
        """Return the hints as one number, 0 for none; split_hint is its inverse."""
        if EXPECTED_STOP not in hints and EXPECTED_OUTPUT_TOKENS not in hints:
            return 0
        return self._read_stop(hints) * NUM_OUTPUT_LEVELS + self._read_output(hints)

    def _read_stop(self, hints: Mapping[str, Any]) -> int:  # Any: a client's JSON
        stop = hints.get(EXPECTED_STOP)
        if stop is None:
            return 0
        if not isinstance(stop, str) or stop not in STOP_LEVELS:
            self._warn(EXPECTED_STOP, stop, f"give one of {', '.join(STOP_LEVELS)}")
            return 0
        return STOP_LEVELS[stop]

    def _read_output(self, hints: Mapping[str, Any]) -> int:  # Any: a client's JSON
        num_tokens = hints.get(EXPECTED_OUTPUT_TOKENS)
        if num_tokens is None:
            return 0
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
            self._warn(EXPECTED_OUTPUT_TOKENS, num_tokens, "give a whole number, zero or more")
            return 0
        return 1 + bisect_right(OUTPUT_FROM_TOKENS, num_tokens)

    def _warn(self, name: str, value: object, remedy: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("kv_transfer_params: %s=%r is ignored, and so are others: %s", name, value, remedy)
