"""Computes a few requests although their prefix is held, and compares the two: are hits right, and are they worth it?

A request is drawn at its first search, with the probability ``audit_ratio``, and of the first hits after a start a few
more are (``FirstHits``). The engine gets the answer that nothing is
held and computes it at once. Beside that the audit searches as for any other request, which brings blocks of the tiers
into host memory, and pins what is found. When a pinned block has been computed, a job compares the two in the workers,
where a store would copy: it fences device blocks as a store does (``jobs``), and ends with the deviation of each block.
A recurrent state is in its device block after one step alone; a step that passes its end without leaving it there loses
it.

A block that is off by more than batching can explain is dropped from every tier. After more than ``audit_limit`` of
them no hit is loaded any more, until a restart or ``resume``.

The same requests are the control arm of a trial (``control_arm``): the seconds to their first tokens show what loading
saves. A request that is drawn does not wait for a tier, so it takes as long as it would have without kvtier.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    TransferJobId,
    TransferSpec,
)
from kvtier.config import Settings
from kvtier.connector.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StopReason,
    TransferJob,
)
from kvtier.connector.control_arm import Arm, AuditState, ControlArm
from kvtier.connector.features import UNDECIDED, RequestFeature, Withheld
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.jobs import JobKind, OpenTransfer, TransferJobs
from kvtier.connector.planning import PinnedBlock, count_tokens_by_tier, find_computed, iterate_load_keys
from kvtier.connector.prefix_search import PrefixSearch, split_by_need
from kvtier.connector.protocols import SchedulerOutput
from kvtier.connector.request_records import RequestRecords
from kvtier.connector.request_state import RequestState
from kvtier.cpu.common import AuditLoadStoreSpec, CPULoadStoreSpec
from kvtier.errors import BlockNotReadyError
from kvtier.misses import HOST_ORIGIN, Miss, MissCause

logger = logging.getLogger(__name__)

NUM_FIRST_HITS = 64
"""Hits after a start of which some are audited whatever the ratio: what is wrong with an identity shows in the first
blocks that are found. More find out later what these would have shown."""

FIRST_HITS_STRIDE = 16
"""Of so many of them one is audited. Fewer cost more hits at each start."""

MAX_LOGGED_BLOCKS = 20
"""Wrong blocks that are logged by name. More say nothing new: loading has stopped, or ``audit_limit`` is large."""

MAX_DEVIATION = 1.0
"""The largest deviation that batching can explain (``kvtier.cpu.compare``)."""

AUDITED = Withheld(Miss(MissCause.AUDITED))
LOADS_STOPPED = Withheld(
    Miss(MissCause.AUDITED, "", MappingProxyType({"reason": "loads stopped"})), is_unsearched=True
)

REMEDY = (
    "Find out what wrote them (log lines of the tiers, kvtier verify PLACE, weights that changed under an old name), "
    "purge the places or take another tenant_salt, then restart, or run kvtier audit --resume"
)


class FirstHits:
    """Draws one in ``FIRST_HITS_STRIDE`` of the first hits after a start, always the same ones for a seed.

    Whether a request is a hit is known when its search is final. So from the moment on when a draw is due requests are
    drawn, never two at a time, until one of them is a hit. Used from the scheduler's thread.

    Args:
        seed: of the draws.
        num_hits: how many hits are the first ones; 0: none is drawn.
    """

    def __init__(self, seed: int, num_hits: int) -> None:
        rng = random.Random(seed)  # noqa: S311 - a sample, no secret
        starts = range(0, num_hits, FIRST_HITS_STRIDE)
        self._due = deque(start + rng.randrange(FIRST_HITS_STRIDE) for start in starts)
        self._drawn: RequestState | None = None
        self._num_hits = 0

    def draws(self, state: RequestState) -> bool:
        """Return whether to audit a request that is searched for the first time."""
        if self._drawn is not None or not self._due or self._num_hits < self._due[0]:
            return False
        self._drawn = state
        return True

    def on_hit(self, state: RequestState) -> None:
        """Count a hit: one that is loaded, or a drawn request of which something is held, or may be.

        A request that ends before its search counts, or requests that do so would be drawn for ever.
        """
        self._num_hits += 1
        if self._drawn is state:
            self._drawn = None
            self._due.popleft()

    def on_miss(self, state: RequestState) -> None:
        """Let another request be drawn in place of one of which nothing is held."""
        if self._drawn is state:
            self._drawn = None


class Audit(RequestFeature):
    """The audit of one scheduler half. Used from its thread; any thread may call ``stats``.

    Args:
        spec: has settings and groups, and names the namespace.
        namespace: of the blocks, for the log.
        manager: where blocks are.
        jobs: the open jobs.
        records: gets each drawn request's record when its search is final.
        clock: seconds, monotonic.
        search: searches for requests.

    Attributes:
        arms: what loading saves.
        condemned: wrong blocks that are still in host memory, because something uses them; they are not loaded.
        is_stopped: whether nothing is loaded any more.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        namespace: str,
        manager: OffloadingManager,
        jobs: TransferJobs,
        records: RequestRecords,
        clock: Callable[[], float],
        search: PrefixSearch,
    ) -> None:
        settings: Settings = spec.config.settings
        self._ratio = settings.audit_ratio
        self._first_hits = FirstHits(settings.audit_seed, NUM_FIRST_HITS * spec.config.audits_first_hits)
        self._limit = settings.audit_limit
        self._rng = random.Random(settings.audit_seed)  # noqa: S311 - a sample, no secret
        self.arms = ControlArm(self._rng)
        self._namespace = namespace
        self._manager = manager
        self._layouts = layouts = make_group_layouts(spec)
        self._first_layout = split_by_need(layouts).first
        self._compared_groups = spec.audited_groups()
        self._jobs = jobs
        self._records = records
        self._clock = clock
        self._prefix_search = search
        self._states: dict[RequestState, AuditState] = {}
        self.condemned: set[OffloadKey] = set()
        self.is_stopped = False
        self._num_wrong_since_resumed = 0
        self._searching: dict[str, RequestState] = {}
        self._comparing: dict[str, RequestState] = {}
        self._watched: dict[str, RequestState] = {}
        self._deviations: dict[TransferJobId, list[float]] = {}
        self._counts = dict.fromkeys(
            ("requests", "equal_blocks", "close_blocks", "wrong_blocks", "lost_blocks"), 0
        )
        self._largest_deviation = 0.0

    def withholds(self, state: RequestState) -> bool:
        # Drawn at its first search and not when it arrives: then the audit can search for it at once.
        audit = self._states.get(state)
        if audit is None:
            is_drawn = self._rng.random() < self._ratio
            is_drawn = not self.is_stopped and (is_drawn or self._first_hits.draws(state))
            audit = self._states[state] = AuditState(Arm.AUDITED if is_drawn else Arm.LOADED)
            if is_drawn:
                self._searching[state.context.req_id] = state
                self._search(state, audit)
        if self.is_stopped and audit.arm is not Arm.AUDITED:
            audit.arm = Arm.STOPPED
        return audit.is_computed

    def shorten(self, state: RequestState, first_token: int, end_token: int) -> int:
        if not self.condemned:
            return end_token
        wanted = iterate_load_keys(self._layouts, state.keys, first_token, end_token)
        return end_token if self.condemned.isdisjoint(wanted) else first_token

    def skips(self, state: RequestState, tokens_by_tier: Mapping[str, int]) -> bool:
        """Return whether the request computes its hit because such hits turned out slower to load.

        Args:
            state: the request.
            tokens_by_tier: its hit, by medium or type of the tier.
        """
        audit = self._states.get(state)
        tier, num_tokens = tier_of(tokens_by_tier), sum(tokens_by_tier.values())
        if audit is None or audit.arm is Arm.AUDITED or audit.is_forced:
            return False
        # One draw for each request: it is searched again as long as it waits for the engine.
        if audit.arm is not Arm.SKIPPED:
            is_skipped = self.arms.draws_skip(tier, num_tokens)
            if not is_skipped:
                audit.is_forced = is_skipped is not None
                return False
        audit.arm, audit.tier, audit.num_tokens = Arm.SKIPPED, tier, num_tokens
        return True

    def on_pinned(self, state: RequestState, num_loaded_tokens: int) -> None:
        audit = self._states.get(state)
        if audit is None or audit.is_begun:
            return
        audit.is_begun = True
        if num_loaded_tokens:
            audit.arm, audit.tier = Arm.LOADED, tier_of(state.load.tokens_by_tier)
            audit.num_tokens = num_loaded_tokens
            self._first_hits.on_hit(state)
        if audit.num_tokens or audit.is_open:
            audit.is_watched = True
            self._watched[state.context.req_id] = state

    def plan_step(self, output: SchedulerOutput, plan: OffloadingConnectorMetadata) -> None:
        # Before stores are planned, which consume what the engine says of recurrent states.
        for state in list(self._searching.values()):
            self._search(state, self._states[state])
        if self._watched:
            now_s = self._clock()
            for state in list(self._watched.values()):
                self._take_time(state, self._states[state], now_s)
        if self.condemned:
            self._drop(())
        for req_id, state in list(self._comparing.items()):
            self._compare(state, output.num_scheduled_tokens.get(req_id, 0), plan.store_jobs)

    def on_stored(self, state: RequestState, keys: Collection[OffloadKey]) -> None:
        audit = self._states.get(state)
        if audit is not None and audit.is_open:
            audit.stored.update(keys)

    def on_report(self, report: OffloadingWorkerMetadata | None, ended_jobs: Sequence[OpenTransfer]) -> None:
        # A block is as far off as the worst of its parts.
        for job_id, deviations in () if report is None else report.audits:
            known = self._deviations.setdefault(job_id, [0.0] * len(deviations))
            self._deviations[job_id] = [max(pair) for pair in zip(known, deviations, strict=True)]
        for job in ended_jobs:
            if job.kind is JobKind.AUDIT:
                self._on_compared(job)

    def on_finished(self, state: RequestState, stop: StopReason, is_traffic: bool) -> None:
        audit, req_id = self._states.get(state), state.context.req_id
        if audit is None:
            return
        if audit.is_watched:
            self._take_time(state, audit, self._clock())
            self._watched.pop(req_id, None)
        if self._searching.pop(req_id, None) is not None:
            self._first_hits.on_hit(state)
            if audit.is_begun:
                self._settle(state, audit)
        self._unpin(state, audit)
        del self._states[state]

    def on_reset(self) -> None:
        for state in list(self._comparing.values()):
            self._unpin(state, self._states[state])
        for state in list(self._searching.values()):
            self._first_hits.on_hit(state)
            self._settle(state, self._states[state])
        self._searching.clear()
        self.condemned.clear()

    def why_computed(self, state: RequestState) -> Withheld | None:
        audit = self._states.get(state)
        if audit is None or audit.arm is Arm.LOADED:
            return None
        if audit.arm is Arm.AUDITED:
            return AUDITED if audit.is_searched else UNDECIDED
        return LOADS_STOPPED if audit.arm is Arm.STOPPED else None

    def resume(self) -> bool:
        """Load hits again; return whether loading was stopped."""
        was_stopped, self.is_stopped = self.is_stopped, False
        self._num_wrong_since_resumed = 0
        if was_stopped:
            logger.warning("hits are loaded again, on an operator's command")
        return was_stopped

    def stats(self) -> dict[str, float]:
        counts = {f"audit.{name}": float(count) for name, count in self._counts.items()}
        counts["audit.largest_deviation"] = min(self._largest_deviation, 1e9)
        counts["audit.loads_stopped"] = float(self.is_stopped)
        return counts | self.arms.stats()

    def _search(self, state: RequestState, audit: AuditState) -> None:
        """Search for a drawn request; when that is final, pin what is found."""
        first_token = state.search.num_local_tokens or 0
        if state.search.blocking_job in self._jobs.by_id or self._manager.is_waiting(state.context):
            return
        state.grow_keys(self._layouts)
        end_token = self._prefix_search.find_end(state, first_token)
        if end_token is None:
            self._locate(state, audit, first_token)
            return
        del self._searching[state.context.req_id]
        if end_token <= first_token:
            self._first_hits.on_miss(state)
        else:
            self._first_hits.on_hit(state)
            keys = iterate_load_keys(self._layouts, state.keys, first_token, end_token)
            if audit.stored.isdisjoint(keys):
                self._pin(state, audit, first_token, end_token)
        self._settle(state, audit)

    def _locate(self, state: RequestState, audit: AuditState, first_token: int) -> None:
        """Find out how long a hit is whose blocks are still to come: the request may end before they do."""
        layout, locator = self._first_layout, self._manager.locator
        if locator is None or audit.num_tokens:
            return
        last_token = state.request.num_tokens - 1
        first, end = first_token // layout.block_tokens, last_token // layout.block_tokens
        keys = state.keys[layout.idx][first : max(first, end)]
        run = locator.locate(keys, state.context)
        # A tier may answer late. What the request has stored by then was not held when it came.
        if run is None or not audit.stored.isdisjoint(keys[: len(run.places)]):
            return
        tokens: dict[str, int] = {}
        for place in run.places:
            name = CPULoadStoreSpec.medium() if place.tier is None else run.tiers[place.tier].name
            tokens[name] = tokens.get(name, 0) + layout.block_tokens
        audit.tier, audit.num_tokens = tier_of(tokens), sum(tokens.values())

    def _pin(self, state: RequestState, audit: AuditState, first_token: int, end_token: int) -> None:
        context = state.context
        promoted = self._manager.promoted_for(context)
        tokens = count_tokens_by_tier(self._layouts, state.keys, promoted, first_token, end_token)
        places: dict[OffloadKey, tuple[int, int]] = {}
        for layout in self._layouts:
            if layout.idx in self._compared_groups:
                span = layout.span(first_token, end_token)
                blocks = range(span.first_block, span.end_block)
                places |= {state.keys[layout.idx][block]: (layout.idx, block) for block in blocks}
        try:
            held = self._manager.prepare_load(list(places), context)
        except BlockNotReadyError:
            return  # they have left since they were found: there is nothing to compare with
        assert isinstance(held, BlockIDsLoadStoreSpec), "host memory is slots"
        slots = held.block_ids.tolist()
        audit.blocks = {key: PinnedBlock(*places[key], slot) for key, slot in zip(places, slots, strict=True)}
        audit.tier, audit.num_tokens = tier_of(tokens), end_token - first_token
        self._counts["requests"] += 1
        self._comparing[context.req_id] = state

    def _settle(self, state: RequestState, audit: AuditState) -> None:
        """Record that a search is over; the record of a request that waited for it can be made now."""
        audit.is_searched = True
        if audit.is_begun:
            self._records.on_begun(state, 0)
        self._add_to_trial(audit)

    def _take_time(self, state: RequestState, audit: AuditState, now_s: float) -> None:
        request = state.request
        if audit.time_s is None and request.num_tokens > request.num_prompt_tokens:
            audit.time_s = now_s - state.search.began_s
            self._watched.pop(state.context.req_id, None)
            self._add_to_trial(audit)

    def _add_to_trial(self, audit: AuditState) -> None:
        """Add a request of which hit and time are known."""
        if audit.is_counted or not audit.is_begun:
            return
        if audit.time_s is not None and audit.num_tokens:
            audit.is_counted = True
            self.arms.add(audit.tier, audit.num_tokens, audit.time_s, audit.arm)

    def _compare(
        self, state: RequestState, num_scheduled_tokens: int, jobs: dict[TransferJobId, TransferJob]
    ) -> None:
        """Add to ``jobs`` the comparisons of a request's pinned blocks that are computed with this step."""
        audit, tables = self._states[state], state.blocks
        if not tables.is_allocated or tables.is_stale:
            return
        end_token = min(tables.num_computed_tokens + num_scheduled_tokens, state.request.num_tokens)
        lost: list[OffloadKey] = []
        for layout in self._layouts:
            computed = find_computed(layout, tables, audit.blocks, end_token)
            lost += computed.lost
            keys = list(computed.device_blocks)
            if not keys:
                continue
            blocks = [audit.blocks.pop(key) for key in keys]
            device_blocks = [one for of_block in computed.device_blocks.values() for one in of_block]
            sizes = [len(device_blocks) if other.idx == layout.idx else 0 for other in self._layouts]
            source = GPULoadStoreSpec(device_blocks, sizes, [0] * len(sizes))
            slots = AuditLoadStoreSpec(pinned.slot for pinned in blocks)
            job_id = self._jobs.open_store(state, keys, device_blocks, JobKind.AUDIT)
            jobs[job_id] = TransferJob(state.context.req_id, TransferSpec(source, slots))
        self._lose(state, audit, lost)
        if not audit.blocks:
            self._comparing.pop(state.context.req_id, None)

    def _on_compared(self, job: OpenTransfer) -> None:
        """Unpin the blocks of a comparison that every worker has ended, and drop those that are wrong."""
        deviations = self._deviations.pop(job.job_id, [])
        if job.has_failed or len(deviations) != len(job.keys):
            self._counts["lost_blocks"] += len(job.keys)
            self._manager.complete_load(job.keys, job.state.context)
            return
        wrong = [pair for pair in zip(job.keys, deviations, strict=True) if not pair[1] <= MAX_DEVIATION]
        num_equal = deviations.count(0.0)
        self._counts["equal_blocks"] += num_equal
        self._counts["close_blocks"] += len(deviations) - num_equal - len(wrong)
        self._largest_deviation = max(self._largest_deviation, *deviations)
        self._manager.complete_load(job.keys, job.state.context)
        if wrong:
            self._on_wrong(job.state, wrong)

    def _on_wrong(self, state: RequestState, wrong: Sequence[tuple[OffloadKey, float]]) -> None:
        num_known = self._counts["wrong_blocks"]
        self._counts["wrong_blocks"] += len(wrong)
        self._num_wrong_since_resumed += len(wrong)
        for key, deviation in wrong[: max(0, MAX_LOGGED_BLOCKS - num_known)]:
            logger.error(
                "namespace %s: block %s is held with other bytes than request %s has computed, %.3g times the "
                "tolerance: it is dropped",
                self._namespace,
                key.hex(),
                state.context.req_id,
                deviation,
            )
        self._drop([key for key, _ in wrong])
        if self._num_wrong_since_resumed > self._limit and not self.is_stopped:
            self.is_stopped = True
            logger.error(
                "namespace %s: %d blocks were wrong, more than audit_limit=%d: no hit is loaded any more. %s",
                self._namespace,
                self._num_wrong_since_resumed,
                self._limit,
                REMEDY,
            )

    def _drop(self, keys: Iterable[OffloadKey]) -> None:
        self.condemned.update(keys)
        dropped = self._manager.drop(list(self.condemned))
        if dropped is not None:
            self.condemned = set(dropped.in_use)

    def _unpin(self, state: RequestState, audit: AuditState) -> None:
        """Unpin the blocks of a request that are not being compared."""
        self._lose(state, audit, list(audit.blocks))
        self._comparing.pop(state.context.req_id, None)

    def _lose(self, state: RequestState, audit: AuditState, keys: list[OffloadKey]) -> None:
        """Unpin blocks that will not be compared."""
        if not keys:
            return
        for key in keys:
            del audit.blocks[key]
        self._counts["lost_blocks"] += len(keys)
        self._manager.complete_load(keys, state.context)


def tier_of(tokens_by_tier: Mapping[str, int]) -> str:
    """Return the secondary tier with the most tokens of a hit, "host" when all are in host memory. Pure."""
    behind = {tier: num for tier, num in tokens_by_tier.items() if tier != CPULoadStoreSpec.medium()}
    return max(behind, key=lambda tier: behind[tier]) if behind else HOST_ORIGIN


def make_audit(
    spec: OffloadingSpec,
    manager: OffloadingManager,
    jobs: TransferJobs,
    records: RequestRecords,
    clock: Callable[[], float],
    search: PrefixSearch,
) -> Audit | None:
    """Return the audit; None when it is off, or the spec's handlers cannot compare. The arguments are the audit's."""
    if spec.config.settings.audit_ratio == 0:
        return None
    namespace = spec.audited_namespace()
    if namespace is None:
        return None
    return Audit(spec, namespace, manager, jobs, records, clock, search)
