"""At most ten log lines a minute for any one cause; the next line says how many were left out.

A cause is a module and a format string: a directory that was removed fails for each block, with another name in each
line. The limit is a filter on each of kvtier's own loggers. One on their parent alone would have no effect, because
``logging`` asks a parent's handlers and not its filters.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LINES = 10
"""Lines of one cause in ``PERIOD_S``. Fewer hide how a fault spreads; more fill a disk when several causes repeat."""

PERIOD_S = 60.0
"""Seconds that the limit is about."""

MAX_CAUSES = 1024
"""Causes that are remembered; the one logged longest ago is forgotten first. The code has fewer format strings."""

PACKAGE = "kvtier"


@dataclass(slots=True)
class _Cause:
    """The recent lines of one cause.

    Attributes:
        logged_s: the clock's reading at each of them, at most ``MAX_LINES``.
        num_left_out: lines since the last of them.
        first_left_out_s: the clock's reading at the first of those.
    """

    logged_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    num_left_out: int = 0
    first_left_out_s: float = 0.0


class LogLimit(logging.Filter):
    """Lets at most ``MAX_LINES`` records of a cause pass in ``PERIOD_S``.

    What it remembers of each cause is mutable. A lock guards it, because any thread may log.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._causes: OrderedDict[tuple[str, str], _Cause] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; one that follows others that were not says how many."""
        if record.levelno < logging.INFO:  # an operator who asks for details gets each
            return True
        now_s = self._clock()
        with self._lock:
            cause = self._find(record)
            is_full = len(cause.logged_s) == MAX_LINES and now_s - cause.logged_s[0] < PERIOD_S
            if is_full:
                if not cause.num_left_out:
                    cause.first_left_out_s = now_s
                cause.num_left_out += 1
                return False
            cause.logged_s.append(now_s)
            num_left_out, cause.num_left_out = cause.num_left_out, 0
        if num_left_out:
            in_s = now_s - cause.first_left_out_s
            text = f" ({num_left_out:,} more lines like this one were left out in the last {in_s:.0f} s)"
            # The arguments stay: a handler may format them in its own way.
            record.msg = str(record.msg) + (text.replace("%", "%%") if record.args else text)
        return True

    def forget(self) -> None:
        """Forget every cause."""
        with self._lock:
            self._causes.clear()

    def _find(self, record: logging.LogRecord) -> _Cause:
        name = (record.name, str(record.msg))
        cause = self._causes.get(name)
        if cause is None:
            cause = self._causes[name] = _Cause()
            if len(self._causes) > MAX_CAUSES:
                self._causes.popitem(last=False)
        else:
            self._causes.move_to_end(name)
        return cause


LIMIT = LogLimit()
"""The limit of this process."""


def limit_log_lines(limit: logging.Filter = LIMIT) -> None:
    """Put the limit on every logger of kvtier that exists; idempotent. Each half of a connector calls it at its start.

    A module's logger exists once the module is imported, so a half calls it when it has built what it needs.
    """
    loggers = list(logging.Logger.manager.loggerDict.items())
    for name, found in loggers:
        is_own = name == PACKAGE or name.startswith(f"{PACKAGE}.")
        if is_own and isinstance(found, logging.Logger) and limit not in found.filters:
            found.addFilter(limit)
