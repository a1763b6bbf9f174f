"""A guard around a call that may not return: the test fails instead of hanging."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, from a thread of its own; the caller waits for it.

    Args:
        limit_s: seconds of wall clock after which it has hung; far more than it should take.
        what: the call, in words, for the message.
        call: what to do; one that has hung goes on and its outcome is dropped.

    Raises:
        AssertionError: it has not returned in time.
        BaseException: what ``call`` raised.
    """
    outcomes: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except BaseException as error:  # noqa: BLE001  # thread top
            errors.append(error)

    thread = threading.Thread(target=run, name="kvtier-call-guard", daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), f"{what} has not returned after {limit_s} s"
    if errors:
        raise errors[0]
    return outcomes[0]
