"""What a client says about one request, read once from its ``kv_transfer_params`` into a value with types.

Every hint is optional, and none is believed: what it is worth is learned where it is used. A value of the wrong type or
range is ignored with one line in the log, which names the value and the remedy; the request is served as without it.
Nothing that a client sends is kept at a size of the client's choice.

    {"session": "chat-17", "continues": true, "returns_in_s": 30, "pin_s": 600, "priority": 1}
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvtier.redaction import shorten

logger = logging.getLogger(__name__)

SESSION = "session"
TENANT = "tenant"
CONTINUES = "continues"
RETURNS_IN_S = "returns_in_s"
PIN_S = "pin_s"
PRIORITY = "priority"
EXPECTED_STOP = "expected_stop"
EXPECTED_OUTPUT_TOKENS = "expected_output_tokens"

STOPS = ("tool_use", "end_turn")

MAX_NAME_CHARS = 128
"""The longest name of a session or tenant. Names are kept for a while; a longer one only takes memory."""

MAX_RETURN_S = 30 * 86_400.0
"""The latest return that means anything: no cache keeps a block for a month."""

MAX_PIN_S = 86_400.0
"""The longest lease. A client that wants more renews it; one that has died holds nothing longer than a day."""

PRIORITIES = (-1, 0, 1)

MAX_LOGGED_CHARS = 80
"""Characters of an ignored value that the log shows: enough to find its client, whatever that sends."""

WARNING_INTERVAL_S = 60.0
"""Seconds between two log lines about the same hint; those in between are counted."""


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_seconds(value: object, longest_s: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= longest_s


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_priority(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in PRIORITIES


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and value in STOPS


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME_CHARS


NAME = f"a text of 1 to {MAX_NAME_CHARS} characters"

CHECKS: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (SESSION, _is_name, NAME),
    (TENANT, _is_name, NAME),
    (CONTINUES, _is_bool, "true or false"),
    (
        RETURNS_IN_S,
        lambda value: _is_seconds(value, MAX_RETURN_S),
        f"a number of seconds from 0 to {MAX_RETURN_S:g}",
    ),
    (PIN_S, lambda value: _is_seconds(value, MAX_PIN_S), f"a number of seconds from 0 to {MAX_PIN_S:g}"),
    (PRIORITY, _is_priority, "-1, 0 or 1"),
    (EXPECTED_STOP, _is_stop, f"one of {', '.join(STOPS)}"),
    (EXPECTED_OUTPUT_TOKENS, _is_count, "a whole number, zero or more"),
)
"""Each hint: its name, whether a value is valid, and what a valid one is."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request; None means that the client does not say.

    Attributes:
        session: the client's name of the conversation, or of the agent's run, that the request belongs to.
        tenant: who sends it.
        continues: whether a later request will begin with this one's prompt.
        returns_in_s: seconds from this request's arrival to that of the next of its session.
        pin_s: seconds for which its blocks shall stay in host memory.
        priority: -1 for blocks that may leave first, 1 for blocks that matter more than others.
        expected_stop: how the turn is expected to end, one of STOPS.
        expected_output_tokens: how long its answer is expected to be.
    """

    session: str | None = None
    tenant: str | None = None
    continues: bool | None = None
    returns_in_s: float | None = None
    pin_s: float | None = None
    priority: int = 0
    expected_stop: str | None = None
    expected_output_tokens: int | None = None

    @property
    def source(self) -> str | None:
        """Who vouches for the hints: the tenant, else the session; None when neither is named."""
        if self.tenant is not None:
            return "t" + self.tenant
        return None if self.session is None else "s" + self.session

    @property
    def is_ended(self) -> bool:
        """Whether the client says that nothing will begin with this prompt again."""
        return self.continues is False


NO_HINTS = RequestHints()

NO_PARAMS: Mapping[str, Any] = MappingProxyType({})  # Any: a client's JSON


class HintReader:
    """Reads hints; logs an invalid value once in WARNING_INTERVAL_S for each name.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # For each name: when it was logged last, and how many were not logged since.
        self._logged: dict[str, tuple[float, int]] = {}

    def read(self, params: Mapping[str, Any] | None) -> RequestHints:  # Any: a client's JSON, checked here
        """Return the hints among ``params``, the client's ``kv_transfer_params``."""
        if not params or not any(check[0] in params for check in CHECKS):
            return NO_HINTS
        found = {
            name: self._read(name, params.get(name), is_valid, remedy) for name, is_valid, remedy in CHECKS
        }
        if found[CONTINUES] is False and found[RETURNS_IN_S] is not None:
            self.warn(RETURNS_IN_S, found[RETURNS_IN_S], "leave it out where continues is false")
            found[RETURNS_IN_S] = None
        found[PRIORITY] = found[PRIORITY] or 0
        return RequestHints(**found)

    def _read(  # Any: the check decides the type
        self,
        name: str,
        value: Any,  # noqa: ANN401
        is_valid: Callable[[object], bool],
        remedy: str,
    ) -> Any:  # noqa: ANN401
        if value is None or is_valid(value):
            return value
        self.warn(name, value, f"give {remedy}")
        return None

    def warn(self, name: str, value: object, remedy: str) -> None:
        """Log that a value is ignored, and what to do."""
        now_s = self._clock()
        last_s, num_silent = self._logged.get(name, (-WARNING_INTERVAL_S, 0))
        if now_s - last_s < WARNING_INTERVAL_S:
            self._logged[name] = (last_s, num_silent + 1)
            return
        self._logged[name] = (now_s, 0)
        more = f" ({num_silent} more since the last such line)" if num_silent else ""
        shown = shorten(value, MAX_LOGGED_CHARS)
        logger.warning("kv_transfer_params: %s=%s is ignored: %s%s", name, shown, remedy, more)


READER = HintReader()


def parse_hints(params: Mapping[str, Any] | None) -> RequestHints:  # Any: a client's JSON
    """Return the hints among ``params``, a client's ``kv_transfer_params``; what is invalid is logged and ignored."""
    return READER.read(params)
