"""Where the prompts of requests came from, for ``kvtier why``, ``top`` and the metrics.

The front is the scheduler half of a connector as far as its operators see it: it has a manager, records and numbers.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from kvtier.base import OffloadingManager
from kvtier.connector.groups import GroupLayout
from kvtier.connector.missed_parts import origin_of
from kvtier.connector.protocols import StoppedLoads
from kvtier.connector.request_records import MAX_RECORDS, PARTIAL_BLOCK
from kvtier.misses import DEVICE_ORIGIN, MISSED_TOKENS, NEVER_SEEN, Miss, MissedRun, RequestRecord


class RequestLog:
    """The records of the latest requests, and counts of all.

    Mutable are the records and counts. A lock guards them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self._counts: Counter[str] = Counter()

    @property
    def latest(self) -> Sequence[RequestRecord]:
        """The latest, oldest first. Thread: any."""
        with self._lock:
            return tuple(self._latest)

    def add(self, record: RequestRecord) -> None:
        """Keep a record."""
        with self._lock:
            self._latest.append(record)
            self._counts["connector.recorded_requests"] += 1
            for origin, num_tokens in record.tokens_by_origin.items():
                self._counts[f"connector.prompt_tokens.{origin}"] += num_tokens
            for (cause, tier), num_tokens in record.missed_by_cause().items():
                self._counts[f"{MISSED_TOKENS}{cause.value}" + (f".{tier}" if tier else "")] += num_tokens

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a count of the front's own."""
        with self._lock:
            self._counts[f"llamacpp.{name}"] += amount

    def stats(self) -> dict[str, float]:
        """Return the counts by dotted name. Thread: any."""
        with self._lock:
            return {name: float(number) for name, number in self._counts.items()}


class ControlledFront:
    """What operators see of the front.

    Args:
        manager: which blocks are held.
        records: of the requests.

    Attributes:
        manager: as given.
        records: as given.
        audit: None; the self-test stands in its place.
        layouts: none, as no command names a prefix by its tokens.
    """

    def __init__(self, manager: OffloadingManager, records: RequestLog) -> None:
        self.manager = manager
        self.records = records
        self.audit: StoppedLoads | None = None
        self.layouts: Sequence[GroupLayout] = ()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by dotted name. Thread: any."""
        return {**self.manager.stats(), **self.records.stats()}

    def has_open_stores(self) -> bool:
        """Return whether a worker still has to report a store: there is none."""
        return False


def make_record(
    name: str,
    num_prompt_tokens: int,
    num_slot_tokens: int,
    restored: Mapping[str, int],
    block_tokens: int,
    miss: Miss | None,
    waited_s: float,
) -> RequestRecord:
    """Return the record of a request.

    Args:
        name: of the request.
        num_prompt_tokens: length of its prompt.
        num_slot_tokens: tokens that the server's slot held.
        restored: tokens that were restored in their place, by tier.
        block_tokens: tokens of a block.
        miss: why the block behind them is missing; None: nothing is known of it.
        waited_s: seconds until the request was passed on.
    """
    last = max(0, num_prompt_tokens - 1)
    origins: Counter[str] = Counter()
    left = last
    for origin, num_tokens in [(origin_of(tier), n) for tier, n in restored.items()] or [
        (DEVICE_ORIGIN, num_slot_tokens)
    ]:
        origins[origin] += min(left, num_tokens)
        left -= min(left, num_tokens)
    begin = last - left
    full = max(begin, last // block_tokens * block_tokens)
    runs = [
        MissedRun(begin, full - begin, miss or NEVER_SEEN),
        MissedRun(full, num_prompt_tokens - full, PARTIAL_BLOCK),
    ]
    missed = tuple(run for run in runs if run.num_tokens)
    found = {origin: num_tokens for origin, num_tokens in origins.items() if num_tokens}
    return RequestRecord(name, time.time(), num_prompt_tokens, found, missed, waited_s)
