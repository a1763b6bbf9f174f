"""The public face of tiering: one OffloadingManager over the primary tier and any number of secondary ones.

It holds no bytes and knows no kind of tier. What it decides lives beside it: which loads are wanted
(promotion), which tiers get a store (cascade), who waits for what (waiting), what is in flight and how it
ends (transfers), whether a tier may be used (guard). A step reads: tiers are polled once, lookups find blocks
and reserve slots for those in lower tiers, end_step submits the promotions; a lookup that found one answers
None until it has arrived.

Source: the division follows vLLM's TieringOffloadingManager as of May 2026 (pull requests 40538 and 40020).
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvtier.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvtier.config import DEFAULT_LOOKUP_DEADLINE_S
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.cascade import CascadePlanner
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.locate import StepMoment, TierBlockLocator, lookup_in_tiers
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from kvtier.tiering.transfers import TierTransfers, WantedPromotions
from kvtier.tiering.waiting import WaitingRequests

__all__ = ["CPUPrimaryTierOffloadingManager", "TieringOffloadingManager"]

logger = logging.getLogger(__name__)

DEFAULT_SHUTDOWN_S = 5.0
"""Seconds that shutdown gives tiers to finish what they have accepted. Zero drops it; more delays the end of
the process behind a hung disk."""

EPOCH_BYTES = 16


class TieringOffloadingManager(OffloadingManager):
    """Finds blocks in the primary tier and behind it, and moves them between.

    Args:
        primary_tier: host memory.
        secondary_tiers: the others, in the order in which they are asked.
        enable_events: whether take_events returns what the primary has recorded.
        lookup_deadline_s: seconds a request may wait for promotions.
        shutdown_timeout_s: seconds that shutdown gives the tiers.
        clock: seconds, monotonic.
        make_epoch: gives the 16 random bytes of a new epoch.

    Attributes:
        primary: host memory.
        locator: says where blocks are without promoting them.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] | None = None,
        enable_events: bool = False,
        *,
        lookup_deadline_s: float = DEFAULT_LOOKUP_DEADLINE_S,
        shutdown_timeout_s: float = DEFAULT_SHUTDOWN_S,
        clock: Callable[[], float] = time.monotonic,
        make_epoch: Callable[[], bytes] = lambda: os.urandom(EPOCH_BYTES),
    ) -> None:
        self.primary = primary_tier
        view = primary_tier.get_kv_memoryview()
        row_bytes = view.nbytes // len(view)
        self._guards = [GuardedTier(tier, view.nbytes, row_bytes, clock) for tier in secondary_tiers or ()]
        self._enable_events = enable_events
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock = clock
        self._make_epoch = make_epoch
        self._now_s = clock()
        self._step = 0
        self._is_polled = False
        self._is_stepped = False
        self._is_shut_down = False
        self._waiting = WaitingRequests(primary_tier, lookup_deadline_s)
        self._wanted = WantedPromotions()
        self._transfers = TierTransfers(primary_tier)
        self._cascades = CascadePlanner(self._guards, primary_tier, clock)

        def open_step() -> StepMoment:
            self._poll()
            return StepMoment(self._step, self._now_s)

        self.locator = TierBlockLocator(
            self._guards,
            primary_tier,
            self._waiting,
            self._wanted,
            self._transfers,
            lookup_deadline_s,
            open_step,
        )

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        self.primary.note_request(chains, req_context)
        self._cascades.note_request(chains, req_context)
        for guard in self._guards:
            guard.note_request(chains, req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if not self._guards:
            return self.primary.lookup(key, req_context)
        if not self._is_polled:
            self._poll()
        waiter = self._waiting.get(req_context)
        if (
            waiter is not None
            and not waiter.is_expired
            and not self._waiting.begins_search(waiter, self._step)
        ):
            return None
        answer = self.primary.lookup(key, req_context)
        if waiter is not None and waiter.is_expired:
            return answer is True
        if answer:
            self._waiting.on_found(key, req_context)
        elif answer is None:
            self._waiting.wait_for(key, req_context, self._now_s, self._step, is_held=True)
        else:
            found, guard = lookup_in_tiers(self._guards, key, req_context)
            if guard is not None:
                slot = self._transfers.reserve(guard, key, req_context, self._waiting.found(req_context))
                if slot is None:
                    return False
                self._wanted.add(guard, req_context, key, slot)
            if found is not False:
                answer = None
                self._waiting.wait_for(key, req_context, self._now_s, self._step, is_held=found is True)
        return answer

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._poll()
        try:
            return self.primary.prepare_load(keys, req_context)
        finally:
            self._waiting.end_wait(req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._poll()
        return self.primary.prepare_store(keys, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary.touch(keys, req_context)
        self._cascades.on_used(keys, req_context)
        for guard in self._guards:
            guard.touch(keys, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary.complete_load(keys, req_context)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        # A promotion of the same key is the tier's to complete: its slot is still being written.
        promoting = self._transfers.promoting
        if promoting and not promoting.keys().isdisjoint(keys):
            self.primary.settle_old_stores([key for key in keys if key in promoting])
            keys = [key for key in keys if key not in promoting]
        finished = self.primary.finish_store(keys, success=success)
        self._waiting.notify(finished)
        if success:
            self._cascades.offer(finished, req_context)
        for planned in self._cascades.plan(req_context, is_step_over=False):
            self._transfers.cascade(planned, req_context)

    def is_waiting(self, req_context: ReqContext) -> bool:
        if not self._is_polled:
            self._poll()
        return req_context in self._waiting.idle

    def promoted_for(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the blocks that came up while the request waited for them, each with its tier's type.

        Asked before prepare_load, which ends the wait. What was in the primary, or written to it by the
        device, when the request asked for it is not among them; neither is what came after its deadline.
        """
        waiter = self._waiting.get(req_context)
        return {} if waiter is None else waiter.promoted

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._is_stepped:
            self.end_step()
            self._is_stepped = False  # by this call, not by the caller
        events = self.primary.take_events()
        for guard in self._guards:
            events += guard.take_events()
        return events if self._enable_events else ()

    def end_step(self) -> None:
        self._is_stepped = True
        if not self._is_polled:
            self._poll()
        for planned in self._wanted.take():
            self._waiting.notify(self._transfers.promote(planned))
        if self._cascades.has_due():
            backlog = ReqContext("backlog")
            for due in self._cascades.plan(backlog, is_step_over=True):
                self._transfers.cascade(due, backlog)
        for guard in self._guards:
            guard.end_step()
        self._waiting.end_step()
        self._step += 1
        self._is_polled = False

    def request_finished(self, req_context: ReqContext) -> None:
        self._waiting.end_wait(req_context)
        self.primary.request_finished(req_context)
        self._cascades.request_finished(req_context)
        for guard in self._guards:
            guard.request_finished(req_context)

    def has_pending_work(self) -> bool:
        return len(self._wanted) > 0

    def reset(self) -> None:
        for planned in self._wanted.take():
            self._transfers.cancel(planned)
        self._waiting.interrupt()
        self.primary.reset()
        self._cascades.clear()
        self._transfers.orphan()
        epoch = self._make_epoch()
        for guard in self._guards:
            guard.reset(epoch)

    def drain(self, timeout_s: float) -> bool:
        """Block until the tiers have got and ended what is due to them; False when ``timeout_s`` passed first.

        Blocks that write-back keeps for their eviction stay where they are.
        """
        end_s = self._clock() + timeout_s
        backlog = ReqContext("drain")
        while True:
            is_drained = True
            for guard in self._guards:
                is_drained &= guard.drain(max(0.0, end_s - self._clock()))
            self._is_polled = False
            self._poll()
            due = self._cascades.plan(backlog, is_step_over=False) if is_drained else ()
            if not due:
                return is_drained
            for planned in due:
                self._transfers.cascade(planned, backlog)

    def stats(self) -> dict[str, float]:
        stats = self.primary.stats() | {
            "waiting_requests": float(len(self._waiting)),
            "expired_requests": float(self._waiting.num_expired),
            "failed_promotions": float(self._transfers.num_failed_promotions),
            "open_jobs": float(len(self._transfers.jobs)),
            "unknown_results": float(self._transfers.jobs.num_unknown_results),
        }
        for position, guard in enumerate(self._guards):
            own = guard.stats() | self._cascades.stats(guard)
            stats |= {f"tier.{position}.{guard.name}.{name}": value for name, value in own.items()}
        return stats

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        end_s = self._clock() + self._shutdown_timeout_s
        for planned in self._wanted.take():
            self._waiting.notify(planned.keys)
            self._transfers.cancel(planned)
        self.drain(self._shutdown_timeout_s)
        are_gone = [guard.shutdown(max(0.0, end_s - self._clock())) for guard in self._guards]
        self._is_polled = False
        self._poll()
        self._guards.clear()  # a tier that is still referred to would keep the rows mapped
        if all(are_gone):
            self.primary.shutdown()
        else:
            logger.warning("a tier did not end in %.1f s: its rows stay mapped", self._shutdown_timeout_s)
            self.primary.abandon()

    def check(self) -> None:
        """Assert the laws that the books can show.

        Raises:
            InvariantError: a slot leaked, a hold is nobody's, or a job's blocks are not pinned.
        """
        self.primary.check()
        self.primary.check_holds(self._waiting.holds())
        self._transfers.check()
        self._cascades.check()

    def _poll(self) -> None:
        """Take the tiers' reports, once a step, and tell who waits."""
        if self._is_polled:
            return
        self._is_polled = True
        self._now_s = self._clock()
        for guard in self._guards:
            ended = self._transfers.poll(guard)
            if ended:
                came = self.primary.ready_among(ended)
                self._cascades.offer_promoted(came, guard)
                self._waiting.notify(came, promoted_from=guard.name)
                if len(came) < len(ended):
                    self._waiting.notify(ended)
            answered = guard.drain_answered(self._waiting.is_awaited)
            if answered:
                self._waiting.notify(answered)
        for overdue in self._waiting.expire(self._now_s):
            self._transfers.record_overdue(overdue, self._guards)
