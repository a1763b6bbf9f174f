"""When an exchange with a server must be over, however alive the server seems.

A time-out of a socket begins anew with each byte; a server that sends one now and then would keep a thread for ever.
"""

import math
from collections.abc import Callable
from typing import NamedTuple


class OverdueError(TimeoutError):
    """Bytes still come or go, and the time is over."""


class Deadline(NamedTuple):
    """A moment after which nothing more is read or written.

    Attributes:
        clock: seconds, monotonic.
        end_s: the moment.
    """

    clock: Callable[[], float]
    end_s: float

    def require_time(self) -> None:
        """Do nothing before the moment.

        Raises:
            OverdueError: it has passed.
        """
        if self.clock() >= self.end_s:
            raise OverdueError("the exchange takes too long")


def never() -> Deadline:
    """Return a deadline that does not come. Pure."""
    return Deadline(lambda: 0.0, math.inf)
