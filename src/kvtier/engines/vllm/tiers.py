"""kvtier's secondary tiers for vLLM's stock ``TieringOffloadingSpec``: one class per tier.

The entry point registers them by plain names, such as ``kvtier-fs`` (``vllm_plugin``); without it vLLM finds a class by
``module_path``.

The classes translate between vLLM's contract and ``kvtier.tiering.base``. A ``GuardedTier`` is always between the two,
because vLLM's manager trusts its tiers: an exception or a job that is reported twice ends the engine, a block that
fails to load is requested again in every step, and blocks that a slow tier has not written stay pinned. The guard
bounds all of these. vLLM's own backpressure, which drops stores by their latency, is passed on to vLLM and works beside
the guard. A ``RoomQueue`` keeps requests waiting while host memory has no slot for their blocks.

Source: the contract is that of ``vllm/v1/kv_offload/tiering/base.py``, vLLM 0.29 to 0.33.
"""

import gc
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.base import OffloadingSpec as StockSpec
from vllm.v1.kv_offload.base import ReqContext as StockReqContext
from vllm.v1.kv_offload.tiering.base import JobResult as StockJobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as StockTier
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import DEFAULT_LOOKUP_DEADLINE_S, OffloadingConfig, SettingsReader
from kvtier.engines.vllm.metrics import GrowthMeter, KVTierStats, StatsClock
from kvtier.engines.vllm.stock_config import is_reproducible, make_stock_config, require_same_keys
from kvtier.engines.vllm.stock_jobs import StockJobs, kvtier_context
from kvtier.engines.vllm.stock_room import RoomQueue
from kvtier.engines.vllm_plugin import config_of_engine
from kvtier.errors import ConfigError, TierError
from kvtier.histogram import HistogramSnapshot
from kvtier.observe.family import Family, Kind, SampleFinder
from kvtier.observe.tier_metrics import TIER_FAMILIES
from kvtier.tiering.base import COMMON_SETTINGS, EPOCH_BYTES, SecondaryTierManager
from kvtier.tiering.factory import TIERS, create_secondary_tier, own_setting_names
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.manager import DEFAULT_SHUTDOWN_S

logger = logging.getLogger(__name__)

STOCK_FAMILIES = tuple(family for family in TIER_FAMILIES if not family.vllm_name)
"""Families that the tier adds to vLLM's metrics page: vLLM counts the others itself."""

MANAGER_SETTINGS = frozenset({"admission", "cascade", "store_threshold", "fill"})
"""Settings that only kvtier's own manager supports."""

DEFAULT_ROOM_WAIT_S = 2.0
"""Seconds that a request waits for slots of host memory. Zero computes at once what has none; more lets requests that
need no waiting pass for longer while another fills host memory."""

BUDGET = "max_in_flight_store_bytes"

ROOMS: weakref.WeakKeyDictionary[StockSpec, RoomQueue] = weakref.WeakKeyDictionary()
"""The queue of each engine of this process: its tiers share host memory."""

ANSWERS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class KVTierSecondaryTier(StockTier):
    """Adapts one of kvtier's tiers to vLLM's contract. Used from the scheduler's thread.

    Args:
        offloading_spec: vLLM's description of the engine.
        primary_kv_view: the primary's rows, shape (num_blocks, row_stride), format 'b'.
        tier_type: the class name in the configuration.
        model_identity: name of the weights and of the flags that change what they compute. Empty: found as for kvtier's
            own connector, which needs kvtier's entry point.
        tenant_salt: separates tenants that must not share blocks.
        encryption: how the tier encrypts, as the engine's setting of that name.
        lookup_deadline_s: seconds for which a request may wait for its lookups.
        room_wait_s: seconds for which a request may wait for slots of host memory; 0: it computes what has none. Of
            several tiers the first one's counts.
        locality: "LOCAL" or "REMOTE"; requests can choose by it in vLLM.
        clock: seconds, monotonic.
        settings: the settings of kvtier's tier, and other arguments of vLLM. Unknown ones are ignored with a warning
            that names the nearest setting.

    Raises:
        KVTierError: a setting cannot work, or the tier cannot start.
    """

    kvtier_type: ClassVar[str]
    """Registered name of a tier of kvtier, or a tier of your own as ``"package.module:Class"``."""

    def __init__(
        self,
        offloading_spec: StockSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        model_identity: str = "",
        tenant_salt: str = "",
        encryption: object = None,
        lookup_deadline_s: float = DEFAULT_LOOKUP_DEADLINE_S,
        room_wait_s: float = DEFAULT_ROOM_WAIT_S,
        locality: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: object,
    ) -> None:
        # From 0.31 on vLLM passes its backpressure detector, which the base class keeps.
        for_base = {name: settings.pop(name) for name in base_arguments() & set(settings)}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **for_base)
        read = SettingsReader(
            {"lookup_deadline_s": lookup_deadline_s, "room_wait_s": room_wait_s, "locality": locality}
        )
        self.locality = None if locality is None else read.choice("locality", Locality.LOCAL)
        deadline_s = read.seconds("lookup_deadline_s", DEFAULT_LOOKUP_DEADLINE_S)
        wait_s = read.seconds("room_wait_s", DEFAULT_ROOM_WAIT_S)
        require_same_keys()
        config = make_stock_config(
            offloading_spec.config,
            vllm_config=config_of_engine(),
            model_identity=model_identity,
            tenant_salt=tenant_salt,
            encryption=encryption,
        )
        # vLLM offers a block once: what a smaller budget declines would never be stored.
        settings[BUDGET] = settings.get(BUDGET) or primary_kv_view.nbytes
        tier = self.build_tier(settings, primary_kv_view, config)
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        self._guard = GuardedTier(tier, primary_kv_view.nbytes, row_bytes, clock)
        self._jobs = StockJobs(self._guard, clock)
        self._deadlines = Deadlines(deadline_s, clock)
        self._room = ROOMS.setdefault(offloading_spec, RoomQueue(len(primary_kv_view), wait_s, clock))
        self._stats_clock = StatsClock(clock)
        self._growth = GrowthMeter(STOCK_FAMILIES)
        self._clock = clock
        self._has_stable_keys: bool | None = None
        self._is_shut_down = False

    @classmethod
    def build_tier(
        cls, settings: Mapping[str, object], primary_kv_view: memoryview, config: OffloadingConfig
    ) -> SecondaryTierManager:
        """Build kvtier's tier from its own ``settings``; the others are logged as ignored.

        Raises:
            KVTierError: a setting cannot work, or the tier cannot start.
        """
        known = own_setting_names(TIERS.resolve(cls.kvtier_type)) | COMMON_SETTINGS
        for name in sorted(set(settings) - known):
            nearest = get_close_matches(name, known, n=1)
            hint = f": did you mean {nearest[0]!r}?" if nearest else ""
            logger.warning("%s ignores %s=%r%s", cls.__name__, name, settings[name], hint)
        for name in sorted(MANAGER_SETTINGS & set(settings)):
            raise ConfigError(name, settings[name], "vLLM's own manager decides what to write: leave it out")
        understood = {name: value for name, value in settings.items() if name in known}
        return create_secondary_tier({"type": cls.kvtier_type, **understood}, primary_kv_view, config)

    def on_new_request(self, req_context: StockReqContext) -> RequestOffloadingContext:
        """Return vLLM's defaults: blocks are stored as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: StockReqContext) -> LookupResult:
        """Return whether the block is held, or RETRY while its lookup is pending or it has no slot, up to deadlines."""
        if not self._accepts(key):
            return LookupResult.MISS
        context = kvtier_context(req_context)
        answer = self._guard.lookup(key, context)
        if answer is None and self._deadlines.is_overdue(context):
            answer = False
            if self._deadlines.is_first_time(context):
                self._guard.record_overdue((key,), is_loading=True)
        if answer:
            answer = self._room.answer(key, req_context.req_id)
        elif answer is None:
            self._room.note_search(req_context.req_id)
        return ANSWERS[answer]

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to write as many leading blocks as the tier's budget has room for; decline the others."""
        is_wanted = all(self._accepts(key) for key in job_metadata.keys)
        self._jobs.submit_store(job_metadata, is_wanted=is_wanted)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to read into the job's slots."""
        self._deadlines.end(kvtier_context(job_metadata.req_context))
        self._jobs.submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[StockJobResult]:
        """Return the jobs that have ended since the last call, each once."""
        return self._jobs.drain_reports()

    def touch(self, keys: Collection[OffloadKey], req_context: StockReqContext) -> None:
        """Record a use of ``keys`` in the tier."""
        self._guard.touch(keys, kvtier_context(req_context))

    def on_request_finished(self, req_context: StockReqContext) -> None:
        """Forget the request; its jobs go on."""
        context = kvtier_context(req_context)
        self._deadlines.end(context)
        self._room.leave(req_context.req_id)
        self._guard.request_finished(context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Let requests in whose blocks have room by now, and start this step's lookups as one batch."""
        num_storing = self._guard.in_flight_store_bytes // self._guard.row_bytes
        self._room.end_step(context.new_req_ids, id(self), num_storing)
        self._guard.end_step()
        # vLLM repeats a lookup in each step, so answers need no notification.
        self._guard.drain_answered(lambda _: False)

    def drain_jobs(self) -> None:
        """Wait for every job, then open an epoch, so that this engine does not find earlier blocks any more.

        This is vLLM's only notification of a reset. It resets when weights change, and the keys of blocks do not change
        with them, so the old blocks must not be found again. They stay for other engines, and for this one after a
        restart.

        Raises:
            TierError: the tier has no work left and has not reported every job.
        """
        self._jobs.drain()
        self._room.clear()
        self._guard.reset(os.urandom(EPOCH_BYTES))

    def shutdown(self) -> None:
        """Drain the tier within DEFAULT_SHUTDOWN_S and end its threads; idempotent.

        Raises:
            TierError: a thread may still access the rows; vLLM then leaves them mapped.
        """
        if self._is_shut_down:
            return
        end_s = self._clock() + DEFAULT_SHUTDOWN_S
        self._guard.drain(DEFAULT_SHUTDOWN_S)
        if not self._guard.shutdown(max(0.0, end_s - self._clock())):
            raise TierError(self.kvtier_type, f"is busy after {DEFAULT_SHUTDOWN_S} s: its rows stay mapped")
        self._is_shut_down = True
        tier = weakref.ref(self._guard.tier)
        del self._guard, self._jobs
        # A tier in a reference cycle lives until the next collection, and vLLM cannot unmap the rows before. The
        # collection is short, because vLLM has frozen the objects of its start.
        if tier() is not None:
            gc.collect()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, object]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Describe the families that the tier adds to vLLM's metrics page."""
        del extra_config
        return {family.name: describe_family(family) for family in STOCK_FAMILIES}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has changed of the numbers of the tier and its guard, at most once a second."""
        if not self._stats_clock.is_due():
            return None
        numbers, snapshots = self._guard.stats(), self._guard.histograms()
        place = f"tier.0.{self.tier_type}."
        report = self._growth.report(
            {place + name: value for name, value in numbers.items()},
            {place + name: snapshot for name, snapshot in snapshots.items()},
        )
        return as_stock_stats(report)

    def _accepts(self, key: OffloadKey) -> bool:
        """Return whether a later engine can find this engine's blocks; the same for all of its keys."""
        if self._has_stable_keys is None:
            self._has_stable_keys = is_reproducible(key)
            if not self._has_stable_keys:
                logger.error(
                    "%s stores nothing: vLLM hashes blocks with a random seed, so no later process would find them. "
                    "Set PYTHONHASHSEED=0, or start vLLM with --prefix-caching-hash-algo sha256",
                    self.tier_type,
                )
        return self._has_stable_keys


class KVTierFS(KVTierSecondaryTier):
    """kvtier's tier ``fs``: packs of blocks in a directory that several engines may share."""

    kvtier_type = "fs"
    medium: ClassVar[Medium | None] = Medium.STORAGE


class KVTierObj(KVTierSecondaryTier):
    """kvtier's tier ``obj``: a bucket of an object store, or a shared file system."""

    kvtier_type = "obj"
    medium: ClassVar[Medium | None] = Medium.STORAGE


class KVTierValkey(KVTierSecondaryTier):
    """kvtier's tier ``valkey``: a Valkey or Redis server or cluster."""

    kvtier_type = "valkey"


class KVTierMooncake(KVTierSecondaryTier):
    """kvtier's tier ``mooncake``: a Mooncake store."""

    kvtier_type = "mooncake"


class Deadlines:
    """How long each request has waited for its lookups, until its load starts or it ends.

    Args:
        limit_s: seconds that a request may wait.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._overdue: set[str] = set()

    def is_overdue(self, context: ReqContext) -> bool:
        """Return whether the request, whose lookup is pending now, has reached its limit."""
        now_s = self._clock()
        return now_s - self._since_s.setdefault(context.req_id, now_s) >= self._limit_s

    def is_first_time(self, context: ReqContext) -> bool:
        """Return whether this is the first call for the overdue request."""
        is_first = context.req_id not in self._overdue
        self._overdue.add(context.req_id)
        return is_first

    def end(self, context: ReqContext) -> None:
        """Forget the request."""
        self._since_s.pop(context.req_id, None)
        self._overdue.discard(context.req_id)


def describe_family(family: Family) -> OffloadingMetricMetadata:
    """Return vLLM's description of a family. Pure.

    vLLM does not tell a tier its position, so the label ``tier_index`` is left out.
    """
    labels = tuple(label for label in family.labels if label != "tier_index")
    if family.kind is Kind.HISTOGRAM:
        return OffloadingHistogramMetadata(family.help, labelnames=labels, buckets=family.bounds)
    kinds = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}
    return kinds[family.kind](family.help, labelnames=labels)


def as_stock_stats(report: KVTierStats) -> OffloadingConnectorStats:
    """Return a report as vLLM's own connector has it. Pure."""
    finder, stats = SampleFinder(STOCK_FAMILIES), OffloadingConnectorStats()

    def place(name: str) -> tuple[str, tuple[str, ...]]:
        found = finder.find(name)
        assert found is not None, f"{name} was reported and no family reads it"
        labels = zip(found.family.labels, found.label_values, strict=True)
        return found.family.name, tuple(value for label, value in labels if label != "tier_index")

    for name, growth in report.counters.items():
        family, labels = place(name)
        stats.increase_counter(family, growth, labels)
    for name, value in report.gauges.items():
        family, labels = place(name)
        stats.set_gauge(family, value, labels)
    for name, (counts, sums) in report.histograms.items():
        family, labels = place(name)
        for value in HistogramSnapshot((), tuple(map(int, counts)), tuple(sums)).observations():
            stats.observe_histogram(family, value, labels)
    return stats


def base_arguments() -> set[str]:
    """Return the arguments of this release's base class beyond those of every release."""
    common = {"self", "offloading_spec", "primary_kv_view", "tier_type"}
    return set(inspect.signature(StockTier.__init__).parameters) - common
