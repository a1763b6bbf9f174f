"""A clock that only moves when a test advances it, for tests of deadlines and time-outs."""


class ManualClock:
    """Time as a value: call it to read it, ``advance`` to move it.

    Args:
        now_s: the first reading, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        """Return the current reading, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds``; it never runs backwards.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds}): a clock cannot run backwards, give zero or more seconds")
        self._now_s += seconds
