"""Tiering as one OffloadingManager over the primary tier and any number of secondary ones.

In a step the tiers are polled once, lookups find blocks and reserve slots for those in lower tiers, and end_step
submits the promotions. A lookup that found a block in a tier answers None until the block has arrived. This file holds
the order of a step; its parts are beside it: cascade (what tiers are still to get), waiting (which requests wait),
transfers (what is in flight), guard (whether a tier may be used).

Source: the division follows vLLM's TieringOffloadingManager as of May 2026 (pull requests 40538 and 40020).
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from kvtier.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvtier.config import DEFAULT_LOOKUP_DEADLINE_S, ModelIdentity
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.cpu.waiting import Waiter, WaitingRequests
from kvtier.histogram import HistogramSnapshot
from kvtier.misses import HOST_ORIGIN, SUSPICIONS, Miss, MissCause
from kvtier.operating import DrainResult, DroppedBlocks, PinnedBlocks, Purge
from kvtier.tiering.admission import make_passing_admission
from kvtier.tiering.announcements import make_event_names
from kvtier.tiering.base import EPOCH_BYTES, SecondaryTierManager
from kvtier.tiering.cascade import CascadePlanner, OwnWork
from kvtier.tiering.departures import MAX_NO_ROOM, LossReport
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.locate import StepMoment, TierBlockLocator
from kvtier.tiering.purging import TierPurges
from kvtier.tiering.transfers import TierTransfers

__all__ = ["CPUPrimaryTierOffloadingManager", "TieringOffloadingManager"]

logger = logging.getLogger(__name__)

DEFAULT_SHUTDOWN_S = 5.0
"""Seconds that shutdown gives tiers to finish what they have accepted. Zero drops it; more delays the end of
the process behind a hung disk."""

NOTHING_FOUND: Mapping[OffloadKey, None] = {}


class TieringOffloadingManager(OffloadingManager):
    """Finds blocks in the primary tier and behind it, and moves them between.

    Args:
        primary_tier: host memory.
        secondary_tiers: the others, in the order of lookups.
        enable_events: whether take_events returns which blocks can be loaded, or no longer.
        lookup_deadline_s: seconds a request may wait for promotions.
        shutdown_timeout_s: seconds that shutdown gives the tiers.
        measures_loads: whether to measure how fast each tier loads, which the locator reports.
        clock: seconds, monotonic.
        make_epoch: gives the 16 random bytes of a new epoch.

    Attributes:
        primary_tier: host memory.
        locator: finds blocks without promoting them.
        leases: the blocks that operators and clients have pinned in host memory.
    """

    locator: TierBlockLocator

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] | None = None,
        enable_events: bool = False,
        *,
        lookup_deadline_s: float = DEFAULT_LOOKUP_DEADLINE_S,
        shutdown_timeout_s: float = DEFAULT_SHUTDOWN_S,
        measures_loads: bool = False,
        clock: Callable[[], float] = time.monotonic,
        make_epoch: Callable[[], bytes] = lambda: os.urandom(EPOCH_BYTES),
    ) -> None:
        self.primary_tier = primary_tier
        view, tiers = primary_tier.get_kv_memoryview(), secondary_tiers or ()
        row_bytes = view.nbytes // len(view)
        self._tiers = [
            GuardedTier(tier, view.nbytes, row_bytes, clock, measures_loads=measures_loads, event_name=name)
            for tier, name in zip(tiers, make_event_names(tiers), strict=True)
        ]
        self._enable_events = enable_events
        self._last_events: list[OffloadingEvent] = []
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock = clock
        self._make_epoch = make_epoch
        self.leases = primary_tier.leases
        self._now_s = clock()
        self._step = 0
        self._is_polled = False
        self._caller_ends_steps = False
        self._is_shut_down = False
        self._no_room: dict[ReqContext, tuple[OffloadKey, str]] = {}
        self._waiting = WaitingRequests(primary_tier.table, lookup_deadline_s)
        self._cascades = CascadePlanner(self._tiers, primary_tier, clock)
        self._losses = LossReport([tier.losses for tier in self._tiers], clock)
        self._transfers = TierTransfers(
            primary_tier, self._tiers, self._cascades.on_evicted, self._cascades.on_unwritten, clock
        )
        self._purges = TierPurges(self.primary_tier, self._tiers, self._cascades, self._transfers)
        admit = primary_tier.admit
        if self._tiers and admit is not None:
            admit = make_passing_admission(admit, self._cascades.wanted)
        self._admit = admit

        def open_step() -> StepMoment:
            if not self._is_polled:
                self._poll()
            return StepMoment(self._step, self._now_s)

        self.locator = TierBlockLocator(
            self._tiers, primary_tier, self._waiting, self._transfers, lookup_deadline_s, open_step
        )

    @property
    def secondary_tiers(self) -> list[SecondaryTierManager]:
        """The tiers behind host memory, in the order of lookups; none after a shutdown."""
        return [guarded.tier for guarded in self._tiers]

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        if self.primary_tier.lifetimes.is_limited:
            self._cascades.forget(self.primary_tier.expire_blocks())
        self.primary_tier.note_request(chains, req_context)
        if self._cascades.is_learning:
            self._cascades.note_request(chains, req_context)
        for tier in self._tiers:
            if tier.is_learning:
                tier.note_request(chains, req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if not self._is_polled:
            self._poll()
        waiting = self._waiting
        waiter = waiting.by_request.get(req_context)
        if waiter is not None:
            if waiter.is_expired:
                return self.primary_tier.find(key, req_context) is True
            if waiter.search_step != self._step and not waiting.begin_search(waiter, self._step):
                return None
        answer = self.primary_tier.find(key, req_context)
        if answer is False:
            return self._lookup_in_tiers(key, req_context)
        if answer is None:
            waiting.wait_for(key, req_context, self._now_s, self._step, has_slot=True)
        elif waiter is None or key not in waiter.holds:
            waiting.on_found(key, req_context)
        return answer

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        if not self._is_polled:
            self._poll()
        try:
            return self.primary_tier.prepare_load(keys, req_context)
        finally:
            self._waiting.end_wait(req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if not self._is_polled:
            self._poll()
        output = self.primary_tier.prepare_admitted_store(keys, req_context, self._admit)
        if output is not None and output.evicted_keys and self._tiers:
            self._cascades.on_evicted(output.evicted_keys)
        return output

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.touch(keys, req_context)
        if self._cascades.counts_uses:
            self._cascades.on_used(keys, req_context)
        for tier in self._tiers:
            if tier.uses_touch:
                tier.touch(keys, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.complete_load(keys, req_context)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        # A promotion of the same key is completed by its tier: the slot is still being written.
        promoting = self._transfers.promoting
        if promoting and not promoting.keys().isdisjoint(keys):
            old_stores = [key for key in keys if key in promoting]
            self.primary_tier.table.orphans.settle_keys(old_stores, is_write=True)
            keys = [key for key in keys if key not in promoting]
        finished = self.primary_tier.finish_writes(keys, success=success)
        if self._waiting.by_key:
            self._waiting.notify(finished)
        if not self._tiers:
            return
        if success:
            self._cascades.offer(finished, req_context)
        for cascade in self._cascades.take(req_context, is_step_over=False):
            self._transfers.cascade(cascade, req_context)

    def will_have_room(self) -> bool:
        return self._cascades.will_have_room()

    def on_unstored(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        del req_context
        if self._tiers:
            self._losses.num_without_room += len(keys) - len(self.primary_tier.table.held_among(keys))

    def is_waiting(self, req_context: ReqContext) -> bool:
        if not self._is_polled:
            self._poll()
        return req_context in self._waiting.unchanged

    def promoted_for(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        waiter: Waiter | None = self._waiting.by_request.get(req_context)
        return {} if waiter is None else waiter.promoted

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        expected = self._explain_expected(key, req_context)
        if expected is not None:
            return expected
        # The most certain first: what a tier remembers, what host memory remembers, and a sibling namespace last.
        suspected: Miss | None = None
        for tier in self._tiers:
            miss = tier.explain(key, req_context, behind)
            if miss is not None and miss.cause not in SUSPICIONS:
                return miss
            suspected = suspected or miss
        return self.primary_tier.departed.explain(key, behind) or suspected

    def _explain_expected(self, key: OffloadKey, req_context: ReqContext) -> Miss | None:
        """Return why a block that is there, or on its way, is missing for this request; None when it is neither."""
        promoting = self._transfers.promoting.get(key)
        if promoting is not None:
            return self._late(promoting.name)
        if self.primary_tier.table.get_block(key) is not None:
            is_over = self.primary_tier.lifetimes.is_over(key)
            return Miss(MissCause.EXPIRED if is_over else MissCause.IN_FLIGHT, HOST_ORIGIN)
        refused = self._no_room.get(req_context)
        if refused is not None and refused[0] == key:
            return Miss(MissCause.NO_ROOM, refused[1])
        waiter = self._waiting.by_request.get(req_context)
        if waiter is not None and waiter.is_expired:
            unanswered = next((tier for tier in self._tiers if key in tier.open_lookups), None)
            if unanswered is not None or key in waiter.overdue:
                return self._late((unanswered or self._tiers[0]).name)
        return None

    def _late(self, tier: str) -> Miss:
        return Miss(MissCause.LATE, tier, MappingProxyType({"deadline_s": self._waiting.lookup_deadline_s}))

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._caller_ends_steps:
            self.end_step()
            self._caller_ends_steps = False
        if not self._enable_events:
            return ()
        events = self.primary_tier.take_events()
        for tier in self._tiers:
            if tier.announcements is not None:
                events += tier.take_events()
        last, self._last_events = self._last_events, []
        return events + last

    def end_step(self) -> None:
        self._caller_ends_steps = True
        if not self._is_polled:
            self._poll()
        if self._transfers.planned:
            failed = self._transfers.start_promotions()
            if failed:
                self._waiting.notify(failed)
        if any(self._cascades.pending):
            backlog = ReqContext(OwnWork.BACKLOG.value)
            for cascade in self._cascades.take(backlog, is_step_over=True):
                self._transfers.cascade(cascade, backlog)
        num_lost = self._losses.num_without_room
        for tier in self._tiers:
            num_lost += tier.losses.num_blocks
            if tier.uses_end_step:
                tier.end_step()
        if num_lost != self._losses.num_said:
            self._losses.warn()
        if self.leases.ends_s:
            self.leases.expire()
        if self.primary_tier.lifetimes.is_limited:
            self._cascades.forget(self.primary_tier.expire_blocks())
        if self._purges.is_under_way:
            self._purges.advance()
        self._waiting.found_this_step.clear()
        self._step += 1
        self._is_polled = False

    def request_finished(self, req_context: ReqContext) -> None:
        self._waiting.end_wait(req_context)
        if self._no_room:
            self._no_room.pop(req_context, None)
        if self.primary_tier.follows_requests:
            self.primary_tier.request_finished(req_context)
        if self._cascades.follows_requests:
            self._cascades.request_finished(req_context)
        for tier in self._tiers:
            if tier.uses_requests:
                tier.request_finished(req_context)

    def has_pending_work(self) -> bool:
        return bool(self._transfers.planned)

    def reset(self) -> None:
        self._begin_anew(None)

    def switch_model(self, model: ModelIdentity | None) -> None:
        self._cascades.is_open = model is not None
        self._begin_anew(model)

    def _begin_anew(self, model: ModelIdentity | None) -> None:
        self._transfers.cancel_promotions()
        self._waiting.interrupt()
        self._cascades.clear()
        self.primary_tier.reset()
        self._transfers.on_reset()
        epoch = self._make_epoch()
        for tier in self._tiers:
            tier.reset(epoch, model)

    def pin(self, keys: Collection[OffloadKey], lease_s: float, *, needs_block: bool = False) -> PinnedBlocks:
        return self.leases.pin(keys, lease_s, needs_block=needs_block)

    def unpin(self, keys: Collection[OffloadKey] | None) -> int:
        return self.leases.unpin(keys)

    def purge(self, tiers: Collection[str] | None, tenant: int | None = None) -> Purge:
        return self._purges.begin(tiers, tenant)

    def drop(self, keys: Collection[OffloadKey]) -> DroppedBlocks:
        self._cascades.forget(keys)
        self.primary_tier.drop_blocks(keys)
        unable = tuple(tier.name for tier in self._tiers if not tier.drop(keys))
        return DroppedBlocks(self.primary_tier.table.held_among(keys), unable)

    def drain(self, timeout_s: float) -> DrainResult:
        if not self._end_jobs(timeout_s):
            return DrainResult(has_ended=False)
        return DrainResult(
            num_lost_blocks=self._losses.take_drained(), num_pending_blocks=self._cascades.num_pending
        )

    def _end_jobs(self, timeout_s: float) -> bool:
        """Give the tiers what they can take until they need no more; False when ``timeout_s`` passed first."""
        end_s = self._clock() + timeout_s
        draining = ReqContext(OwnWork.DRAIN.value)
        while True:
            is_drained = True
            for tier in self._tiers:
                is_drained &= tier.drain(max(0.0, end_s - self._clock()))
            self._poll()
            cascades = self._cascades.take(draining, is_step_over=False) if is_drained else ()
            if not cascades:
                return is_drained
            for cascade in cascades:
                self._transfers.cascade(cascade, draining)

    def stats(self) -> dict[str, float]:
        stats = self.primary_tier.stats() | {
            "waiting_requests": float(len(self._waiting)),
            "expired_requests": float(self._waiting.num_expired),
            "failed_promotions": float(self._transfers.num_failed_promotions),
            "promotions_without_room": float(self._transfers.num_without_room),
            "open_jobs": float(len(self._transfers.jobs)),
            "unknown_results": float(self._transfers.jobs.num_unknown_results),
        }
        for position, tier in enumerate(tuple(self._tiers)):
            own = tier.stats() | self._cascades.stats(tier) | self._transfers.open_jobs_stats(tier)
            stats |= {f"tier.{position}.{tier.name}.{name}": value for name, value in own.items()}
        return stats

    def histograms(self) -> dict[str, HistogramSnapshot]:
        return {
            f"tier.{position}.{tier.name}.{name}": snapshot
            for position, tier in enumerate(tuple(self._tiers))
            for name, snapshot in tier.histograms().items()
        }

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        end_s = self._clock() + self._shutdown_timeout_s
        self._waiting.notify(self._transfers.cancel_promotions())
        self._end_jobs(self._shutdown_timeout_s)
        are_gone = [tier.shutdown(max(0.0, end_s - self._clock())) for tier in self._tiers]
        self._poll()
        self._cascades.lose_pending()
        self._losses.warn(is_last=True)
        for tier in self._tiers:
            if tier.announcements is not None:
                tier.announcements.clear()
                self._last_events += tier.take_events()
        self._tiers.clear()  # a tier that is still referred to would keep the rows mapped
        if all(are_gone):
            self.primary_tier.shutdown()
        else:
            logger.warning("a tier did not end in %.1f s: its rows stay mapped", self._shutdown_timeout_s)
            self.primary_tier.abandon()

    def check(self) -> None:
        """Assert the laws that the state can show.

        Raises:
            InvariantError: a slot leaked, a hold belongs to no request, or a job's blocks are not pinned.
        """
        self.primary_tier.check()
        leases = dict.fromkeys(self.leases.ends_s, 1)
        holds = Counter(self._waiting.count_holds()) + Counter(self._cascades.count_holds())
        self.primary_tier.table.check_holds(dict(Counter(leases) + holds))
        self._transfers.check()
        self._cascades.check()

    def _lookup_in_tiers(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Look up a key that the primary does not hold; the first tier that has it promotes it."""
        waiting = self._waiting
        is_unanswered = False
        lifetimes = self.primary_tier.lifetimes
        if lifetimes.is_limited and lifetimes.is_over(key):
            return False  # it is in use until its transfer has ended: a promotion would need its slot
        for tier in self._tiers:
            answer = tier.lookup(key, req_context)
            if answer:
                protected = waiting.found_this_step.get(req_context, NOTHING_FOUND)
                if not self._transfers.prepare_promotion(tier, key, req_context, protected):
                    if tier.breaker.is_closed and len(self._no_room) < MAX_NO_ROOM:
                        self._no_room[req_context] = key, tier.name
                    return False
                waiting.wait_for(key, req_context, self._now_s, self._step, has_slot=True)
                return None
            is_unanswered |= answer is None
        if not is_unanswered:
            return False
        waiting.wait_for(key, req_context, self._now_s, self._step, has_slot=False)
        return None

    def _poll(self) -> None:
        """Take the tiers' reports, and wake the requests that wait for them.

        The first call in a step that needs them comes here, unless ``_is_polled``.
        """
        self._is_polled = True
        self._now_s = self._clock()
        waiting, transfers = self._waiting, self._transfers
        for tier in self._tiers:
            is_active = bool(tier.open_lookups or transfers.jobs.of_tier[tier])
            # One poll more after the last answer takes what the tier counted meanwhile.
            if not (is_active or tier.was_active):
                continue
            tier.was_active = is_active
            ended = transfers.poll(tier)
            if ended.arrived:
                if self._cascades.fills_tiers:
                    self._cascades.offer_promoted(ended.arrived, tier)
                waiting.notify(ended.arrived, promoted_from=tier.name)
            if ended.failed:
                waiting.notify(ended.failed)
            if tier.open_lookups:
                waiting.notify(tier.drain_answered(waiting.by_key.__contains__))
        by_deadline = waiting.by_deadline
        if by_deadline and by_deadline[0].deadline_s <= self._now_s:
            for overdue in waiting.expire(self._now_s):
                transfers.record_overdue(overdue, self._tiers)
