"""The primary tier's manager: what is held, what may be read now, where to write next.

It moves no bytes: workers copy between the places that its specs name. A block table keeps slots and pins, a policy
orders the blocks, and optional parts filter keys by reuse, limit lifetimes and log events. Scheduler side, one thread,
never blocks. Every call makes a few C-speed passes over its batch: an engine names thousands of blocks a step.

Source: the contract follows vLLM's ``kv_offload/cpu/manager``, pull requests 37874 and 40020.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from itertools import chain

from kvtier.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RowMemory,
    get_offload_tenant,
    overrides,
)
from kvtier.config import DEFAULT_LOOKUP_DEADLINE_S, DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.block_table import BlockTable
from kvtier.cpu.common import CPULoadStoreSpec, EventLog
from kvtier.cpu.lifetimes import BlockLifetimes
from kvtier.cpu.pin_leases import PinLeases
from kvtier.cpu.policies.base import Admit, CachePolicy
from kvtier.cpu.policies.learning import ReuseForecaster, make_arrived
from kvtier.cpu.policies.registry import create_cache_policy, create_reuse_forecaster
from kvtier.cpu.reuse_filter import MIN_STORE_THRESHOLD, ReuseFilter
from kvtier.cpu.tenant_quotas import TenantBlocks
from kvtier.cpu.waiting import WaitingRequests
from kvtier.departed import HostDeparture, make_host_departures
from kvtier.errors import UnknownNameError
from kvtier.misses import HOST_ORIGIN, Miss, MissCause
from kvtier.operating import DroppedBlocks, PinnedBlocks, Purge, PurgedBlocks
from kvtier.tenants import Tenants

logger = logging.getLogger(__name__)


class CPUOffloadingManager(OffloadingManager):
    """Holds at most ``num_blocks`` blocks, one in each slot.

    Args:
        num_blocks: slots of the primary tier.
        cache_policy: registered name of the eviction policy.
        enable_events: whether to record what is stored and evicted.
        store_threshold: accesses of a key before it is stored; below 2 every key is.
        max_tracker_size: keys whose accesses are counted.
        clock: seconds, monotonic; the times of arrival that policies learn from.
        ttl_s: seconds after its store that a block is a miss; None: never.
        tenants: the tenants of requests; None where there are none.
        block_bytes: bytes of a slot, for quotas and counts of tenants.
        lookup_deadline_s: seconds a request may wait for stores of others, from its first lookup that returned None.

    Attributes:
        medium, store_threshold, max_tracker_size: the medium of its events, "CPU"; the arguments.
        table: the blocks, their slots and pins.
        lifetimes: when blocks expire.
        tenant_blocks: the blocks of each tenant; None where there are none.
        leases: the blocks that operators and clients have pinned.
        departed: the blocks that left, or were refused.
        admit: decides which blocks that are offered are stored; None: all.
        forecast: the policy's estimates of reuse; None when it gives none.
        follows_requests: whether request_finished has an effect on more than what lookup has made wait.

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
        ttl_s: float | None = None,
        tenants: Tenants | None = None,
        block_bytes: int = 1,
        lookup_deadline_s: float = DEFAULT_LOOKUP_DEADLINE_S,
    ) -> None:
        self.medium = CPULoadStoreSpec.medium()
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        policy = create_cache_policy(cache_policy, num_blocks)
        self.table = BlockTable(num_blocks, policy)
        self._get_block = self.table.get_block
        self._policy = policy
        self._clock = clock
        self.lifetimes = BlockLifetimes(ttl_s, clock)
        self.tenant_blocks = None if tenants is None else TenantBlocks(self.table, tenants, block_bytes)
        self._quotas = self.tenant_blocks if self.tenant_blocks and self.tenant_blocks.has_quotas else None
        self.leases = PinLeases(self.table, clock, self._quotas)
        lifetimes = self.lifetimes if self.lifetimes.is_limited else None
        self.table.listeners = tuple(one for one in (lifetimes, self.tenant_blocks) if one is not None)
        self._is_learning = overrides(policy.note_request, CachePolicy.note_request)
        self.admit: Admit | None = policy.admit if overrides(policy.admit, CachePolicy.admit) else None
        self.forecast = policy.forecast
        is_filtering = store_threshold >= MIN_STORE_THRESHOLD
        self._filter = ReuseFilter(store_threshold, max_tracker_size) if is_filtering else None
        self._events = EventLog(self.medium, is_on=enable_events)
        self._is_shut_down = False
        self.follows_requests = self._is_learning or is_filtering
        self._waiting = WaitingRequests(self.table, lookup_deadline_s)
        self.departed = make_host_departures(num_blocks, clock)
        self._num_loaded = self._num_stored = self._num_failed = self._num_evicted = self._num_refused = (
            self._num_expired
        ) = 0

    @property
    def num_blocks(self) -> int:
        """Slots of the primary tier."""
        return self.table.num_blocks

    @property
    def num_free(self) -> int:
        """Slots that a store can take without evicting."""
        return self.table.slots.num_free

    @property
    def num_evictable(self) -> int:
        """Ready blocks without a pin."""
        return self.table.num_evictable

    @property
    def counts(self) -> dict[OffloadKey, int] | None:
        """Accesses that the reuse filter has counted, least recently used first; None when it is off."""
        return None if self._filter is None else self._filter.counts

    @property
    def events(self) -> list[OffloadingEvent] | None:
        """The events that ``take_events`` would return now, oldest first; None where none are recorded."""
        return list(self._events.events) if self._events.is_on else None

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        if self.lifetimes.is_limited:
            self.expire_blocks()
        params, policy = req_context.kv_transfer_params, self._policy
        if self._is_learning and (params or policy.learns_without_hints):
            policy.note_request(make_arrived(chains, req_context, self._clock()))
        if params and (pin_s := req_context.hints.pin_s):
            self.leases.pin_for_request(chain.from_iterable(chains), pin_s)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = self.find(key, req_context)
        return self._waiting.answer_in_flight(key, req_context, self._clock()) if answer is None else answer

    def find(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return what lookup does, with None without an end: for a caller that has a deadline of its own."""
        if self._filter is not None:
            self._filter.observe(key, req_context)
        block = self._get_block(key)
        if block is None:
            return False
        if block.ref_cnt < 0:
            return None
        # One that is in use beyond its time is not found, or a hot one would never expire.
        return not (self.lifetimes.is_limited and self.lifetimes.is_over(key))

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        if self._waiting.by_request:
            self._waiting.end_wait(req_context)
        slots = self.table.pin_ready(keys)
        self._num_loaded += len(slots)
        return CPULoadStoreSpec(slots)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        return self.prepare_admitted_store(keys, req_context, self.admit)

    def prepare_admitted_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, admit: Admit | None
    ) -> PrepareStoreOutput | None:
        """Do what prepare_store does, with ``admit`` in place of the policy's."""
        admitted = keys if self._filter is None else self._filter.admit(keys)
        if len(admitted) < len(keys):
            self.departed.add(self.table.absent_among(keys, admitted), HostDeparture.REUSE_FILTER)
        if admit is not None:
            offered = admitted
            admitted = admit(offered, req_context.req_id)
            if len(admitted) < len(offered):
                admitted = self.leases.add_leased(admitted, offered)
                self.departed.add(self.table.absent_among(offered, admitted), HostDeparture.ADMISSION)
        protected = () if admitted is keys else frozenset(keys)
        output = self.reserve(admitted, protected)
        if output is not None and self._filter is not None:
            self._filter.end_observations(keys, req_context)
        return output

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._policy.touch(keys)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        orphans = self.table.orphans
        self.table.unpin_each(orphans.settle_keys(keys, is_write=False) if orphans.by_slot else keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.finish_writes(keys, success=success)

    def finish_writes(
        self, keys: Collection[OffloadKey], *, success: bool, is_promotion: bool = False
    ) -> list[OffloadKey]:
        """Do what complete_store does and return those of ``keys`` whose write has ended by it, in their order.

        Args:
            keys: the blocks.
            success: whether their bytes are whole.
            is_promotion: whether a tier has written them: such writes began after the last reset, and why one failed is
                the tier's to remember.
        """
        table = self.table
        if not is_promotion and table.orphans.by_slot:
            keys = table.orphans.settle_keys(keys, is_write=True)
        finished = table.finish_writes(keys, success=success)
        if self._waiting.by_key:
            self._waiting.notify(finished)
        if table.listeners:
            table.report_finished(finished, success=success)
        if success:
            self._num_stored += len(finished)
            self._events.record(finished, removed=False)
        else:
            self._num_failed += len(finished)
            if not is_promotion:
                self.departed.add(finished, HostDeparture.JOB_FAILED)
        return finished

    def reserve(
        self, keys: Collection[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> PrepareStoreOutput | None:
        """Reserve slots for those of ``keys`` that are not held; neither filter nor admission applies.

        Args:
            keys: the blocks to store; none of them is evicted for it.
            protected: further keys that must not be evicted; its ``in`` should not search.

        Returns:
            As prepare_store.
        """
        table, get = self.table, self._get_block
        distinct = dict.fromkeys(keys)
        # Nearly always nothing is held, and a C loop finds that out in half the time.
        missing = [key for key in distinct if get(key) is None] if any(map(get, distinct)) else list(distinct)
        evicted: list[OffloadKey] = []
        num_to_evict = len(missing) - table.slots.num_free
        if num_to_evict > 0:
            named = distinct if len(missing) < len(distinct) else ()
            victims = self.evict(num_to_evict, named, protected, new=missing)
            if victims is None:
                return None
            evicted = victims
        return PrepareStoreOutput(missing, CPULoadStoreSpec(table.assign(missing)), evicted)

    def evict(
        self,
        num: int,
        named: Collection[OffloadKey],
        protected: Collection[OffloadKey],
        why: HostDeparture = HostDeparture.EVICTED,
        new: Sequence[OffloadKey] = (),
    ) -> list[OffloadKey] | None:
        """Evict ``num`` blocks outside ``named`` and ``protected``; return which, and remember ``why``.

        Args:
            num: how many.
            named: blocks that stay.
            protected: further ones; its ``in`` should not search.
            why: why they leave.
            new: the blocks of one request for which room is made, where tenants have quotas.

        Returns:
            None, counted, when that cannot be done, and then nothing has changed.
        """
        if self.leases.ends_s:
            self.leases.expire()
        if self._quotas is None or not new:
            evicted = self.table.evict(num, named, protected)
        else:
            evicted = self._quotas.evict(num, len(new), get_offload_tenant(new[0]), named, protected)
        if evicted is None:
            self._num_refused += 1
            return None
        self._num_evicted += len(evicted)
        return self._report_gone(evicted, why)

    def take_events(self) -> list[OffloadingEvent]:
        return self._events.take()

    def request_finished(self, req_context: ReqContext) -> None:
        self._waiting.end_wait(req_context)
        self._policy.on_finished(req_context.req_id)
        if self._filter is not None:
            self._filter.request_finished(req_context)

    def end_step(self) -> None:
        if self.leases.ends_s:
            self.leases.expire()
        if self.lifetimes.is_limited:
            self.expire_blocks()

    def expire_blocks(self) -> list[OffloadKey]:
        """Forget the idle blocks whose time to live is over, leases included; return their keys."""
        expired = self.lifetimes.list_expired()
        idle = self.drop_blocks(expired, HostDeparture.EXPIRED) if expired else expired
        self._num_expired += len(idle)
        return idle

    def pin(self, keys: Collection[OffloadKey], lease_s: float, *, needs_block: bool = False) -> PinnedBlocks:
        return self.leases.pin(keys, lease_s, needs_block=needs_block)

    def unpin(self, keys: Collection[OffloadKey] | None) -> int:
        return self.leases.unpin(keys)

    def purge(self, tiers: Collection[str] | None, tenant: int | None = None) -> Purge:
        for name in tiers or ():
            if name != HOST_ORIGIN:
                raise UnknownNameError("tier", name, [HOST_ORIGIN])
        if tiers is not None and not tiers:
            return Purge(PurgedBlocks())
        num_purged = len(self.purge_blocks(tenant))
        return Purge(PurgedBlocks({HOST_ORIGIN: num_purged}, {HOST_ORIGIN: self.count_held(tenant)}))

    def count_held(self, tenant: int | None) -> int:
        """Return how many blocks of a tenant, by number, are held; of all for None. Pure."""
        if tenant is None:
            return self.table.num_held
        return 0 if self.tenant_blocks is None else len(self.tenant_blocks.held.get(tenant, ()))

    def purge_blocks(self, tenant: int | None = None) -> list[OffloadKey]:
        """End every lease and evict every block that is not in use, or those of a tenant; return their keys."""
        if tenant is not None:
            held = {} if self.tenant_blocks is None else self.tenant_blocks.held.get(tenant, {})
            return self.drop_blocks(tuple(held), HostDeparture.PURGED)
        self.leases.unpin(None)
        num_evictable = self.table.num_evictable
        return self.evict(num_evictable, (), (), HostDeparture.PURGED) or []

    def drop(self, keys: Collection[OffloadKey]) -> DroppedBlocks:
        self.drop_blocks(keys)
        return DroppedBlocks(self.table.held_among(keys))

    def drop_blocks(
        self, keys: Collection[OffloadKey], why: HostDeparture = HostDeparture.DROPPED
    ) -> list[OffloadKey]:
        """End the leases of ``keys`` and forget those that are idle; return these."""
        self.leases.unpin(keys)
        return self._report_gone(self.table.forget_idle(keys), why)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        if self._get_block(key) is not None:
            is_over = self.lifetimes.is_over(key)
            return Miss(MissCause.EXPIRED if is_over else MissCause.IN_FLIGHT, HOST_ORIGIN)
        return self.departed.explain(key, behind)

    def reset(self) -> None:
        self._waiting.interrupt()
        self.leases.unpin(None)
        self._report_gone(self.table.forget_blocks(), HostDeparture.RESET)
        if self._filter is not None:
            self._filter.clear()

    def shutdown(self) -> None:
        if self._events.is_on and not self._is_shut_down:
            held = self.table.slots.held_blocks(self._get_block)
            self._events.record([key for key, block in held.items() if block.ref_cnt >= 0], removed=True)
        self._is_shut_down = True

    def stats(self) -> dict[str, float]:
        numbers = self.table.stats() | {
            "leased_blocks": len(self.leases.ends_s),
            "refused_pins": self.leases.num_refused,
            "tracked_keys": len(self.counts or ()),
            "loaded": self._num_loaded,
            "stored": self._num_stored,
            "failed": self._num_failed,
            "evicted": self._num_evicted,
            "refused": self._num_refused,
            "event_merges": self._events.num_merges,
        }
        if self.lifetimes.is_limited:
            numbers["expired"] = self._num_expired
        stats = {f"primary.{name}": float(number) for name, number in numbers.items()}
        for listener in self.table.listeners:
            stats |= listener.stats()
        return stats

    def is_ready(self, key: OffloadKey) -> bool:
        """Return whether ``key`` can be read now; unlike lookup this is no access. Pure."""
        return self.table.is_ready(key)

    def check(self) -> None:
        """Recount slots and blocks; for tests, it visits every block.

        Raises:
            InvariantError: a slot is lost or in two places, a counter is wrong, or the policy disagrees.
        """
        self.table.check()
        self.leases.check()

    def _report_gone(self, keys: list[OffloadKey], why: HostDeparture) -> list[OffloadKey]:
        """Remember why blocks have left, and record the event; return them."""
        self.departed.add(keys, why)
        self._events.record(keys, removed=True)
        return keys


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """The manager together with the rows, as secondary tiers use it.

    ``prepare_read`` and its siblings are the tiers' words for load and store. They pin and complete like the engine's
    calls, but a read is not counted as a load, and neither the reuse filter nor the policy's admission applies to a
    write.

    Args:
        mmap_region: the rows; any object with ``create_kv_memoryview()`` and ``cleanup()``. The other arguments are
            those of the manager.
    """

    def __init__(
        self,
        num_blocks: int,
        mmap_region: RowMemory,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE,
        *,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._region = mmap_region
        self._view = mmap_region.create_kv_memoryview()
        super().__init__(
            num_blocks,
            cache_policy,
            enable_events,
            store_threshold,
            max_tracker_size,
            clock=clock,
            ttl_s=ttl_s,
            tenants=tenants,
            block_bytes=self._view.nbytes // len(self._view),
        )

    def get_kv_memoryview(self) -> memoryview:
        """Return the rows: writable, zero-copy, shape (num_blocks, row_stride), format 'b'."""
        return self._view

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pin ready ``keys`` for a tier that will read them."""
        return CPULoadStoreSpec(self.table.pin_ready(keys))

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin ``keys`` after a tier has read them."""
        self.table.unpin_each(keys)

    def prepare_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, protected: Collection[OffloadKey] = ()
    ) -> PrepareStoreOutput | None:
        """Reserve slots that a tier will fill; its arguments beside the request are those of ``reserve``."""
        return self.reserve(keys, protected)

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the in-flight ones of ``keys`` ready after a tier has filled them, or drop them."""
        self.finish_writes(keys, success=success, is_promotion=True)

    def create_forecaster(self, max_blocks: int) -> ReuseForecaster:
        """Build what estimates reuse in place of the policy, remembering at most ``max_blocks`` blocks."""
        return create_reuse_forecaster(max_blocks)

    def shutdown(self) -> None:
        super().shutdown()
        try:
            self._view.release()
        except BufferError:
            # An array over the rows still exists; the region unmaps them when the last one is gone.
            logger.warning("the primary's rows are still in use: they are unmapped later")
        self._region.cleanup()

    def abandon(self) -> None:
        """Clean the region but leave the rows mapped: a thread of a tier may still touch them."""
        super().shutdown()
        self._region.cleanup()
