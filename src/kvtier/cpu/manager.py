"""The primary tier's manager: what is held, what may be read now, where to write next.

It moves no byte: workers copy, told by the specs that come out of here. The books keep the blocks, the policy
orders them, the reuse filter admits keys, the event log waits to be read; here they become the contract that
an engine drives. Scheduler side, one thread, never blocks. Every call makes a few C-speed passes over its
batch, because an engine asks for thousands of blocks a step.

Source: the contract follows vLLM's ``kv_offload/cpu/manager``, pull requests 37874 and 40020.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

from kvtier.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.block_table import BlockTable
from kvtier.cpu.common import CPULoadStoreSpec, EventLog
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.learning import AdmissionControl, ArrivedRequest, RequestLearner, ReuseForecast
from kvtier.cpu.policies.registry import create_cache_policy
from kvtier.cpu.reuse_filter import ReuseFilter
from kvtier.errors import BlockNotReadyError

MIN_STORE_THRESHOLD = 2
"""The first ``store_threshold`` that filters anything: whatever is stored has been accessed once."""


class CPUOffloadingManager(BlockTable, OffloadingManager):
    """Holds at most ``num_blocks`` blocks, one in each slot.

    Args:
        num_blocks: slots of the primary tier.
        cache_policy: registered name of the eviction policy.
        enable_events: whether to record what is stored and evicted.
        store_threshold: accesses of a key before it is stored; below 2 every key is.
        max_tracker_size: keys whose accesses are counted.
        clock: seconds, monotonic; when requests arrive, for policies that learn from it.

    Attributes:
        admission: what refuses blocks that are offered; None when nothing does.
        forecast: who can tell how likely blocks come back; None when the policy cannot.

    Raises:
        ConfigError: ``num_blocks`` or, with the filter on, ``max_tracker_size`` is below one.
        UnknownNameError: there is no such policy.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policy = create_cache_policy(cache_policy, num_blocks)
        super().__init__(num_blocks, policy)
        self._clock = clock
        self._learner = policy if isinstance(policy, RequestLearner) else None
        self.admission: AdmissionControl | None = policy if isinstance(policy, AdmissionControl) else None
        self.forecast: ReuseForecast | None = policy if isinstance(policy, ReuseForecast) else None
        is_filtering = store_threshold >= MIN_STORE_THRESHOLD
        self._filter = ReuseFilter(store_threshold, max_tracker_size) if is_filtering else None
        self._events = EventLog(CPULoadStoreSpec.medium(), is_enabled=enable_events)
        self._num_loaded = self._num_stored = self._num_failed = self._num_evicted = self._num_refused = 0

    @property
    def counts(self) -> dict[OffloadKey, int] | None:
        """Accesses that the reuse filter has counted, least recently used first; None when it is off."""
        return None if self._filter is None else self._filter.counts

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        if self._learner is not None:
            hints = req_context.kv_transfer_params or {}
            request = ArrivedRequest(req_context.req_id, tuple(chains), self._clock(), hints)
            self._learner.note_request(request)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._filter is not None:
            self._filter.observe(key, req_context)
        block = self._get_block(key)
        if block is None:
            return False
        return True if block.ref_cnt >= 0 else None

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        del req_context
        blocks = list(map(self._get_block, keys))
        num_idle = 0
        # One pass pins while it looks: looking first would be a second one. What a bad key leaves behind is taken back.
        for block in blocks:
            if block is None or (num_pins := block.ref_cnt) < 0:
                raise self._refuse_load(keys, blocks)
            if num_pins:
                block.ref_cnt = num_pins + 1
            else:
                block.ref_cnt = 1
                num_idle += 1
        slots = [block.block_id for block in blocks if block is not None]
        if len(set(slots)) < len(slots):
            _take_back_pins(_repeated(blocks))
        self._num_evictable -= num_idle
        self._num_loaded += len(slots)
        return CPULoadStoreSpec(slots)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if self._filter is None and self.admission is None:
            return self._reserve(keys)
        admitted = keys if self._filter is None else self._filter.admit(keys)
        if self.admission is not None:
            admitted = self.admission.admit(admitted, req_context.req_id)
        protected = () if admitted is keys else frozenset(keys)
        output = self._reserve(admitted, protected)
        if output is not None and self._filter is not None:
            self._filter.end_observations(keys, req_context)
        return output

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        del req_context
        self._policy.touch(keys)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        del req_context
        self._unpin_each(self._orphans.settle_keys(keys, is_write=False) if self._orphans else keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        del req_context
        self.finish_store(keys, success=success)

    def finish_store(self, keys: Collection[OffloadKey], *, success: bool) -> list[OffloadKey]:
        """Do what complete_store does and return those of ``keys`` whose write has ended by it, in their order."""
        finished = self._finish_writes(keys, success=success)
        self._on_finished(finished, success=success)
        return finished

    def take_events(self) -> list[OffloadingEvent]:
        return self._events.take()

    def request_finished(self, req_context: ReqContext) -> None:
        if self._learner is not None:
            self._learner.on_finished(req_context.req_id)
        if self._filter is not None:
            self._filter.request_finished(req_context)

    def reset(self) -> None:
        self._events.record(self._forget_blocks(), removed=True)
        if self._filter is not None:
            self._filter.clear()

    def claim_orphans(self, block_ids: Iterable[int], *, is_write: bool) -> None:
        """Right after a reset: one transfer of each of ``block_ids`` will be reported by settle_orphans.

        Without it the report is expected by key, from complete_load or complete_store.
        """
        self._orphans.claim(map(int, block_ids), is_write=is_write)

    def settle_orphans(self, block_ids: Iterable[int], is_write: bool) -> None:
        """Report transfers of before a reset by slot; slots that no reset left in use are ignored."""
        self._orphans.settle_slots(map(int, block_ids), is_write=is_write)

    def stats(self) -> dict[str, float]:
        num_orphaned = len(self._orphans)
        numbers = {
            "capacity_blocks": self.num_blocks,
            "held_blocks": self.num_blocks - self.num_free - num_orphaned,
            "free_blocks": self.num_free,
            "evictable_blocks": self._num_evictable,
            "in_flight_blocks": self._num_in_flight,
            "orphaned_blocks": num_orphaned,
            "tracked_keys": len(self.counts or ()),
            "loaded": self._num_loaded,
            "stored": self._num_stored,
            "failed": self._num_failed,
            "evicted": self._num_evicted,
            "refused": self._num_refused,
            "dropped_events": self._events.num_dropped,
        }
        return {f"primary.{name}": float(number) for name, number in numbers.items()}

    def _reserve(
        self, keys: Collection[OffloadKey], protected: Collection[OffloadKey] = frozenset()
    ) -> PrepareStoreOutput | None:
        """Reserve slots for those of ``keys`` that are not held, without asking the reuse filter.

        Args:
            keys: what is to be stored; none of them is evicted for it.
            protected: further keys that must not be evicted; its ``in`` should not search.

        Returns:
            As prepare_store.
        """
        get = self._get_block
        distinct = dict.fromkeys(keys)
        # Nearly always nothing is held, and a C loop finds that out in half the time.
        missing = [key for key in distinct if get(key) is None] if any(map(get, distinct)) else list(distinct)
        named = distinct if len(missing) < len(distinct) else ()
        evicted = self._make_room(len(missing), named, protected)
        if evicted is None:
            return None
        return PrepareStoreOutput(missing, CPULoadStoreSpec(self._assign(missing)), evicted)

    def _make_room(
        self, num: int, named: Collection[OffloadKey], protected: Collection[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Evict blocks outside ``named`` and ``protected`` until ``num`` slots are free; return which.

        Returns:
            None, counted, when that cannot be done, and then nothing has changed.
        """
        num_to_evict = num - self._slots.num_free
        if num_to_evict <= 0:
            return []
        evicted = self._evict(num_to_evict, named, protected)
        if evicted is None:
            self._num_refused += 1
            return None
        self._num_evicted += len(evicted)
        self._events.record(evicted, removed=True)
        return evicted

    def _refuse_load(
        self, keys: Collection[OffloadKey], blocks: Sequence[BlockStatus | None]
    ) -> BlockNotReadyError:
        """Unpin the blocks before the first that cannot be read; return the error that names it."""
        position, block = next(
            (position, block) for position, block in enumerate(blocks) if block is None or block.ref_cnt < 0
        )
        _take_back_pins(blocks[:position])
        key = next(islice(keys, position, None))
        return BlockNotReadyError(key, "absent" if block is None else "in flight")

    def _on_finished(self, finished: list[OffloadKey], *, success: bool) -> None:
        """Count and announce writes into held blocks that have ended."""
        if success:
            self._num_stored += len(finished)
            self._events.record(finished, removed=False)
        else:
            self._num_failed += len(finished)


def _take_back_pins(blocks: Iterable[BlockStatus | None]) -> None:
    for block in blocks:
        if block is not None:
            block.ref_cnt -= 1


def _repeated(blocks: Iterable[BlockStatus | None]) -> Iterator[BlockStatus | None]:
    """Yield each block as often as it comes again after its first time. Pure."""
    seen: set[BlockStatus | None] = set()
    for block in blocks:
        if block in seen:
            yield block
        seen.add(block)
