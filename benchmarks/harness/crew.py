"""Threads that share numbered work: each takes the next number while there are any.

A floor's threads must not wait for an executor: submitting each block of 64 KiB took longer than writing or reading it
through the page cache.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor


class Crew:
    """A group of threads.

    Args:
        num_threads: number of threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads)

    def share(self, num_items: int, work: Callable[[Iterator[int]], None]) -> None:
        """Run ``work`` in each thread; its iterator yields numbers from 0 that no other thread has taken.

        Raises:
            Exception: an exception of ``work`` in one of the threads, after all have ended.
        """
        numbers = iter(range(num_items))
        threads = [self._pool.submit(work, numbers) for _ in range(self._num_threads)]
        errors = [error for thread in threads if (error := thread.exception()) is not None]
        if errors:
            raise errors[0]

    def each(self, num_items: int, action: Callable[[int], object]) -> None:
        """Run ``action`` for each number below ``num_items``; errors as in ``share``."""

        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                action(number)

        self.share(num_items, work)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
