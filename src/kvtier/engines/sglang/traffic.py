"""What was moved since SGLang last asked, in the form of its ``StorageMetrics``: pages and bandwidth of each call."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

MAX_CALLS = 4096
"""Calls that are remembered until SGLang asks, which it does in each step of its scheduler."""


class Moved:
    """The pages of one call.

    Attributes:
        num_pages: how many were moved.
        num_bytes: their bytes.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self.num_bytes = 0

    def add(self, num_pages: int, page_bytes: int) -> None:
        """Count pages."""
        self.num_pages += num_pages
        self.num_bytes += num_pages * page_bytes


class TrafficLog:
    """Pages and bandwidth of the calls since the last ``take``.

    Mutable are the lists. ``_lock`` guards them.

    Args:
        clock: seconds, monotonic.
        is_on: whether SGLang collects metrics; otherwise nothing is kept.
    """

    def __init__(self, clock: Callable[[], float], *, is_on: bool) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_on = is_on
        self._calls: dict[bool, list[tuple[int, float]]] = {True: [], False: []}

    @contextmanager
    def measure(self, *, is_store: bool) -> Iterator[Moved]:
        """Measure one call, whose pages are added to what it yields."""
        moved = Moved()
        if not self._is_on:
            yield moved
            return
        began_s = self._clock()
        yield moved
        took_s = self._clock() - began_s
        if moved.num_pages and took_s > 0:
            with self._lock:
                calls = self._calls[is_store]
                calls.append((moved.num_pages, moved.num_bytes / 1e9 / took_s))
                del calls[:-MAX_CALLS]

    def take(self) -> object:
        """Return the calls as SGLang's StorageMetrics, bandwidth in GB/s, and forget them; None when it is off."""
        if not self._is_on:
            return None
        try:
            # Imported here: it needs SGLang's own requirements, which only an engine has for sure.
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError as error:
            self._is_on = False
            logger.warning("SGLang's metrics of the storage stay empty: %s", error)
            return None
        with self._lock:
            loads, stores = self._calls[False], self._calls[True]
            self._calls = {True: [], False: []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[bandwidth for _, bandwidth in loads],
            backup_bandwidth=[bandwidth for _, bandwidth in stores],
        )
