"""For clients: hints as ``extra_body`` of OpenAI's client, and return times that an agent's loop learns by itself.

A server that offloads with kvtier reads them from ``kv_transfer_params`` (``values``). Nothing here imports a client
library: the answer of ``with_hints`` is a plain dictionary, for whatever sends the request.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import exp, log
from typing import Any

from kvtier.errors import ConfigError
from kvtier.hints.values import (
    CHECKS,
    CONTINUES,
    MAX_RETURN_S,
    PIN_S,
    PRIORITY,
    RETURNS_IN_S,
    SESSION,
)

PARAMS = "kv_transfer_params"

NEW_SHARE = 0.3
"""Weight of the last duration against all earlier ones. More follows one slow run of a tool; less learns late that a
test suite has grown."""

SHORTEST_S = 0.001
"""Shorter durations count as this one."""

MAX_TOOLS = 256
"""Tools whose durations are remembered, those used last. Names that a model makes up take no more memory."""

NO_TOOL = ""
"""In place of a tool's name: before the first one."""


def with_hints(
    *,
    session: str | None = None,
    continues: bool | None = None,
    returns_in_s: float | None = None,
    pin_s: float | None = None,
    priority: int | None = None,
    extra_body: Mapping[str, Any] | None = None,  # Any: a request's JSON
) -> dict[str, Any]:  # Any: a request's JSON
    """Return an ``extra_body`` with these hints. Pure.

        client.chat.completions.create(..., extra_body=with_hints(session="chat-17", returns_in_s=30))

    Args:
        session: your name of the conversation or of the agent's run.
        continues: whether a later request will begin with this one's prompt.
        returns_in_s: seconds until that request.
        pin_s: seconds for which the prompt's blocks shall stay in host memory.
        priority: -1, 0 or 1.
        extra_body: what else the body has; its own ``kv_transfer_params`` are kept, hints given here win.

    Raises:
        ConfigError: a value that the server would ignore.
    """
    hints = {
        SESSION: session,
        CONTINUES: continues,
        RETURNS_IN_S: returns_in_s,
        PIN_S: pin_s,
        PRIORITY: priority,
    }
    given = {name: value for name, value in hints.items() if value is not None}
    _require_valid(given)
    body = dict(extra_body or {})
    body[PARAMS] = {**(body.get(PARAMS) or {}), **given}
    return body


class ToolTimes:
    """How long tools take, learned from their runs; may be shared by the loops of a process.

    The averages and the counts are mutable; a lock guards them, so that loops in several threads can share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of each tool, the used last at the end: the average of the logarithm of its duration.
        self._log_s: OrderedDict[str, float] = OrderedDict()
        self._after: dict[str, Counter[str]] = {}

    def add(self, tool: str, duration_s: float, before: str = NO_TOOL) -> None:
        """Learn from a run.

        Args:
            tool: its name.
            duration_s: how long it took.
            before: the tool that ran before it in the same loop.
        """
        new = log(max(duration_s, SHORTEST_S))
        with self._lock:
            old = self._log_s.get(tool, new)
            self._log_s[tool] = old + NEW_SHARE * (new - old)
            self._log_s.move_to_end(tool)
            self._after.setdefault(before, Counter())[tool] += 1
            if len(self._log_s) > MAX_TOOLS:
                self._forget(next(iter(self._log_s)))

    def expected_s(self, tools: Iterable[str] = (), before: str = NO_TOOL) -> float | None:
        """Return how long the next run is expected to take; None while nothing is known. Pure.

        Args:
            tools: those that will run, at the same time; without any, those that ran after ``before`` count, as often
                as they did.
            before: the tool that ran last.
        """
        named = list(tools)
        with self._lock:
            if named:
                known = [self._log_s[tool] for tool in named if tool in self._log_s]
                return exp(max(known)) if known else None
            after = self._after.get(before) or Counter(dict.fromkeys(self._log_s, 1))
            counts = [(count, self._log_s[tool]) for tool, count in after.items() if tool in self._log_s]
        total = sum(count for count, _ in counts)
        return exp(sum(count * log_s for count, log_s in counts) / total) if total else None

    def _forget(self, tool: str) -> None:
        del self._log_s[tool]
        self._after.pop(tool, None)
        for counts in self._after.values():
            counts.pop(tool, None)


class AgentLoop:
    """One run of an agent: measures its tools and says when the next request will come.

        loop = AgentLoop("run-17")
        reply = client.chat.completions.create(..., extra_body=loop.hints())
        with loop.tool("search"):
            ...
        reply = client.chat.completions.create(..., extra_body=loop.hints())

    Used from one thread, but for ``tool``.

    Args:
        session: your name of the run.
        times: what is known of the tools; loops that share it learn from each other.
        clock: seconds, monotonic.
    """

    def __init__(
        self, session: str, times: ToolTimes | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        _require_valid({SESSION: session})
        self._session = session
        self._times = ToolTimes() if times is None else times
        self._clock = clock
        self._last_tool = NO_TOOL
        self._asked_at_s: float | None = None
        # The model's own time: from a request to its first tool.
        self._answers = ToolTimes()

    def hints(
        self,
        tools: Iterable[str] = (),
        *,
        is_last: bool = False,
        extra_body: Mapping[str, Any] | None = None,  # Any: a request's JSON
    ) -> dict[str, Any]:  # Any: a request's JSON
        """Return the ``extra_body`` of the request that is sent now.

        Args:
            tools: the tools that will run after it, where that is known; otherwise the past tells.
            is_last: whether the run ends with its answer.
            extra_body: what else the body has.
        """
        self._asked_at_s = self._clock()
        if is_last:
            return with_hints(session=self._session, continues=False, extra_body=extra_body)
        tool_s = self._times.expected_s(tools, self._last_tool)
        if tool_s is None:
            return with_hints(session=self._session, continues=True, extra_body=extra_body)
        returns_in_s = min(tool_s + (self._answers.expected_s() or 0.0), MAX_RETURN_S)
        return with_hints(
            session=self._session, continues=True, returns_in_s=round(returns_in_s, 3), extra_body=extra_body
        )

    @contextmanager
    def tool(self, name: str) -> Iterator[None]:
        """Measure one run of a tool, also when it raises."""
        begun_s = self._clock()
        if self._asked_at_s is not None:
            self._answers.add("answer", begun_s - self._asked_at_s)
            self._asked_at_s = None
        try:
            yield
        finally:
            self._times.add(name, self._clock() - begun_s, self._last_tool)
            self._last_tool = name


def _require_valid(hints: Mapping[str, object]) -> None:
    for name, is_valid, remedy in CHECKS:
        if name in hints and not is_valid(hints[name]):
            raise ConfigError(name, hints[name], f"must be {remedy}")
    if hints.get(CONTINUES) is False and RETURNS_IN_S in hints:
        raise ConfigError(RETURNS_IN_S, hints[RETURNS_IN_S], "must be left out where continues is false")
