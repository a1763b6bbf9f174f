"""Threads that share numbered work: each takes the next number as long as there are any.

A floor's threads must not wait for an executor: through the page cache handing over each block of 64 KiB by itself took
longer than to write or read it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor


class Crew:
    """Some threads.

    Args:
        num_threads: how many.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads)

    def share(self, num_items: int, work: Callable[[Iterator[int]], None]) -> None:
        """Let each thread do ``work``, which takes numbers from 0 on that no other thread has taken.

        Raises:
            Exception: what ``work`` has raised in one of the threads, when all have ended.
        """
        numbers = iter(range(num_items))
        threads = [self._pool.submit(work, numbers) for _ in range(self._num_threads)]
        errors = [error for thread in threads if (error := thread.exception()) is not None]
        if errors:
            raise errors[0]

    def each(self, num_items: int, action: Callable[[int], object]) -> None:
        """Do ``action`` for each number below ``num_items``; errors are as those of ``share``."""

        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                action(number)

        self.share(num_items, work)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
