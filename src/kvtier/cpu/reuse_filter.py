"""Admits a key to the primary tier only when it has been looked up often enough.

An access is a request's lookup of a key. A waiting request that looks it up again in every step is still one access,
until its prepare_store of the key ends the observation. Both tables are bounded by ``max_tracker_size``, and what is
longest unused is forgotten first.

Off by default for a reason: at threshold 2 every first use of a prefix is lost, and with a large cache that
costs a third of all hits.
"""

from collections import OrderedDict
from collections.abc import Collection

from kvtier.base import OffloadKey, ReqContext
from kvtier.errors import ConfigError

MIN_STORE_THRESHOLD = 2
"""The lowest ``store_threshold`` that filters anything: each key that is stored has been accessed once."""


class ReuseFilter:
    """Access counts of keys, one access a request.

    Args:
        store_threshold: accesses from which a key is admitted.
        max_tracker_size: keys whose accesses are counted, and observations that are remembered.

    Attributes:
        counts: accesses of each key, least recently used first.
    """

    def __init__(self, store_threshold: int, max_tracker_size: int) -> None:
        if max_tracker_size < 1:
            raise ConfigError(
                "max_tracker_size", max_tracker_size, "the reuse filter must count at least one key"
            )
        self.counts: OrderedDict[OffloadKey, int] = OrderedDict()
        self._store_threshold = store_threshold
        self._max_tracker_size = max_tracker_size
        # Requests by identity, least recent lookup first, with the keys that they look up.
        self._observed: OrderedDict[ReqContext, set[OffloadKey]] = OrderedDict()
        self._num_observed = 0

    def observe(self, key: OffloadKey, req_context: ReqContext) -> None:
        """Count an access of ``key``, unless this request's last one goes on; renew the key either way."""
        counts = self.counts
        is_new = self._start_observation(key, req_context)
        if key not in counts:
            counts[key] = 1
            if len(counts) > self._max_tracker_size:
                counts.popitem(last=False)
            return
        counts.move_to_end(key)
        counts[key] += is_new

    def admit(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys`` that were accessed often enough, in order. Pure."""
        counts, threshold = self.counts, self._store_threshold
        return [key for key in keys if counts.get(key, 0) >= threshold]

    def end_observations(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Let the request's next search for any of ``keys`` be a new access."""
        seen = self._observed.get(req_context)
        if seen is None:
            return
        self._num_observed -= len(seen)
        seen.difference_update(keys)
        self._num_observed += len(seen)
        if not seen:
            del self._observed[req_context]

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request has looked up; its accesses stay counted."""
        self._num_observed -= len(self._observed.pop(req_context, ()))

    def clear(self) -> None:
        """Forget everything."""
        self.counts.clear()
        self._observed.clear()
        self._num_observed = 0

    @property
    def num_observations(self) -> int:
        """Pairs of request and key that are being observed."""
        return self._num_observed

    def _start_observation(self, key: OffloadKey, req_context: ReqContext) -> bool:
        seen = self._observed.setdefault(req_context, set())
        self._observed.move_to_end(req_context)
        if key in seen:
            return False
        seen.add(key)
        self._num_observed += 1
        while self._num_observed > self._max_tracker_size:
            # A request that looks up more keys than are tracked loses its own: some may then count twice.
            _, forgotten = self._observed.popitem(last=False)
            self._num_observed -= len(forgotten)
        return True
