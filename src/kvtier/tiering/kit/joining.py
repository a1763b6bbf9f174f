"""Which jobs of a tier a thread may move with one call: small ones, of the same direction, submitted at about the same time.

Many short requests that arrive together are as many small jobs. Each remains a job of its request, with its own report
and its own failure; only the call of the backend is one. The pool joins jobs that come with the same function
(``IOPool``), and here is decided which do.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvtier.tiering.kit.io_pool import Transfer

M = TypeVar("M")

MAX_JOINED_BYTES = 2 * 2**20
"""Bytes of several jobs that are moved with one call. A request waits for the others in its call: about a millisecond
for so many. Fewer make more calls; more gain nothing, measured with blocks of 64 KiB."""

SAME_DEADLINE_RATIO = 0.01
"""Jobs are joined that were submitted within this share of ``job_timeout_s``: the first one's deadline holds for the call,
so that the others have this much less. Far more than a step takes; with zero no jobs of two steps are joined."""


def plan_max_joined_blocks(row_bytes: int) -> int:
    """Return how many blocks of several jobs are moved with one call. Pure."""
    return max(1, MAX_JOINED_BYTES // max(1, row_bytes))


class _BoundRun(NamedTuple):
    """A function that moves blocks, and the clock's reading when its deadline was set."""

    bound_s: float
    run: Transfer


class SharedRuns(Generic[M]):
    """Gives jobs that may be joined the same function. Used from the scheduler's thread.

    Args:
        bind: returns the function of jobs submitted now, given how they move blocks.
        timeout_s: seconds from a job's submission to its deadline.
        clock: seconds, monotonic.
    """

    def __init__(self, bind: Callable[[M], Transfer], timeout_s: float, clock: Callable[[], float]) -> None:
        self._bind = bind
        self._window_s = SAME_DEADLINE_RATIO * timeout_s
        self._clock = clock
        self._bound: dict[M, _BoundRun] = {}

    def find(self, move: M) -> Transfer:
        """Return the function of a job that is submitted now and moves its blocks by ``move``."""
        now_s = self._clock()
        bound = self._bound.get(move)
        if bound is None or now_s - bound.bound_s > self._window_s:
            bound = self._bound[move] = _BoundRun(now_s, self._bind(move))
        return bound.run

    def clear(self) -> None:
        """Join no job submitted from now on with one from before: the namespace is another."""
        self._bound.clear()
