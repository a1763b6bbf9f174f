"""kvtier's secondary tiers for vLLM's stock ``TieringOffloadingSpec``: one class per tier, found by ``module_path``.

It keeps no block and moves no byte: it translates vLLM's words into those of ``kvtier.tiering.base`` and back. Between
the two stands kvtier's guard, because vLLM's manager trusts its tiers: a raise or a job that is reported twice ends
the engine there, a block that fails to load is asked for again in every step, and whatever a slow tier has not
written stays pinned. The guard bounds all of it and is always on. vLLM's own backpressure, which drops stores by their
latency, is passed on to vLLM and works beside it where a configuration asks for it.

Source: the contract is that of ``vllm/v1/kv_offload/tiering/base.py``, vLLM 0.29 to 0.32.
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
    OffloadingGaugeMetadata,
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
from kvtier.engines.vllm.metrics import StatsClock
from kvtier.engines.vllm.stock_config import is_reproducible, make_stock_config, require_same_keys
from kvtier.engines.vllm.stock_jobs import StockJobs, kvtier_context
from kvtier.errors import ConfigError, TierError
from kvtier.tiering.base import COMMON_SETTINGS, SecondaryTierManager
from kvtier.tiering.factory import TIERS, create_secondary_tier, own_settings
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.manager import DEFAULT_SHUTDOWN_S, EPOCH_BYTES

logger = logging.getLogger(__name__)

STAT_NAME = "vllm:kvtier_tier_stat"
"""Family of kvtier's own numbers on vLLM's metrics page; those that vLLM counts itself are not repeated."""

MANAGER_SETTINGS = frozenset({"admission", "cascade", "store_threshold", "fill"})
"""Settings that only kvtier's own manager can carry out."""

ANSWERS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class KVTierSecondaryTier(StockTier):
    """One of kvtier's tiers as vLLM's manager drives it. Used from the scheduler's thread.

    Args:
        offloading_spec: vLLM's description of the engine.
        primary_kv_view: the primary's rows, shape (num_blocks, row_stride), format 'b'.
        tier_type: the class name, as the configuration wrote it.
        model_identity: names the weights and the flags that change what they compute; vLLM tells a tier neither.
        tenant_salt: separates tenants that must not share blocks.
        lookup_deadline_s: seconds for which a request is led to wait for an answer about blocks.
        locality: "LOCAL" or "REMOTE"; vLLM lets requests choose by it.
        clock: seconds, monotonic.
        settings: those of kvtier's tier, and whatever else a release of vLLM passes. What nobody knows is ignored,
            with a warning that names the nearest setting.

    Raises:
        KVTierError: a setting cannot work, or the tier cannot start.
    """

    kvtier_type: ClassVar[str]
    """Name under which kvtier has the tier, or a tier of your own as ``"package.module:Class"``."""

    def __init__(
        self,
        offloading_spec: StockSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        model_identity: str = "",
        tenant_salt: str = "",
        lookup_deadline_s: float = DEFAULT_LOOKUP_DEADLINE_S,
        locality: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: object,
    ) -> None:
        # From 0.31 vLLM passes its backpressure detector, which the base class keeps; before there was none.
        for_base = {name: settings.pop(name) for name in base_arguments() & set(settings)}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **for_base)
        read = SettingsReader({"lookup_deadline_s": lookup_deadline_s, "locality": locality})
        self.locality = None if locality is None else read.choice("locality", Locality.LOCAL)
        deadline_s = read.seconds("lookup_deadline_s", DEFAULT_LOOKUP_DEADLINE_S)
        require_same_keys()
        config = make_stock_config(
            offloading_spec.config, model_identity=model_identity, tenant_salt=tenant_salt
        )
        tier = self.build_tier(settings, primary_kv_view, config)
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        self._guard = GuardedTier(tier, primary_kv_view.nbytes, row_bytes, clock)
        self._jobs = StockJobs(self._guard, clock)
        self._deadlines = Deadlines(deadline_s, clock)
        self._stats_clock = StatsClock(clock)
        self._clock = clock
        self._has_stable_keys: bool | None = None
        self._is_shut_down = False

    @classmethod
    def build_tier(
        cls, settings: Mapping[str, object], primary_kv_view: memoryview, config: OffloadingConfig
    ) -> SecondaryTierManager:
        """Build kvtier's tier from those of ``settings`` that it knows; the others are named in the log.

        Raises:
            KVTierError: a setting cannot work, or the tier cannot start.
        """
        known = own_settings(TIERS.resolve(cls.kvtier_type)) | COMMON_SETTINGS
        for name in sorted(set(settings) - known):
            nearest = get_close_matches(name, known, n=1)
            hint = f": did you mean {nearest[0]!r}?" if nearest else ""
            logger.warning("%s ignores %s=%r%s", cls.__name__, name, settings[name], hint)
        for name in sorted(MANAGER_SETTINGS & set(settings)):
            raise ConfigError(name, settings[name], "vLLM's own manager decides what it writes: leave it out")
        understood = {name: value for name, value in settings.items() if name in known}
        return create_secondary_tier({"type": cls.kvtier_type, **understood}, primary_kv_view, config)

    def on_new_request(self, req_context: StockReqContext) -> RequestOffloadingContext:
        """Ask for nothing special: blocks come as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: StockReqContext) -> LookupResult:
        """Say whether the block is held, or RETRY while that is being asked, up to the request's deadline."""
        if not self._accepts(key):
            return LookupResult.MISS
        context = kvtier_context(req_context)
        answer = self._guard.lookup(key, context)
        if answer is None and self._deadlines.is_overdue(context):
            answer = False
            if self._deadlines.is_first_time(context):
                self._guard.record_overdue((key,), is_loading=True)
        return ANSWERS[answer]

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start writing as many leading blocks as the tier's budget has room for; the others are declined."""
        is_wanted = all(self._accepts(key) for key in job_metadata.keys)
        self._jobs.submit_store(job_metadata, is_wanted=is_wanted)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start reading into the job's slots."""
        self._deadlines.end(kvtier_context(job_metadata.req_context))
        self._jobs.submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[StockJobResult]:
        """Return the jobs that have ended since the last call, each once, whatever the tier reports."""
        return self._jobs.drain_reports()

    def touch(self, keys: Collection[OffloadKey], req_context: StockReqContext) -> None:
        """Pass on what is in use."""
        self._guard.touch(keys, kvtier_context(req_context))

    def on_request_finished(self, req_context: StockReqContext) -> None:
        """Forget the request; its jobs go on."""
        context = kvtier_context(req_context)
        self._deadlines.end(context)
        self._guard.request_finished(context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Start what this step's lookups asked for, as one batch."""
        self._guard.end_step()
        # vLLM asks again by itself in each step, so nobody has to be told that an answer has come.
        self._guard.drain_answered(lambda _: False)

    def drain_jobs(self) -> None:
        """Wait for every job, then open an epoch: what was stored before is not found by this engine any more.

        vLLM tells a tier of a reset in no other way. It resets when weights change, and the names of the blocks do
        not change with them, so the old ones must not be found again. They stay for other engines, and for this
        one after a restart.

        Raises:
            TierError: the tier says that it is done and has not reported every job.
        """
        self._jobs.drain()
        self._guard.reset(os.urandom(EPOCH_BYTES))

    def shutdown(self) -> None:
        """Finish what can be finished in time and end the tier's threads; idempotent.

        Raises:
            TierError: a thread may still touch the rows; vLLM leaves them mapped then.
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
        # A tier that refers to itself lives until the next collection, and vLLM cannot unmap the rows meanwhile. Its
        # engine has frozen what it started with, so that this is short.
        if tier() is not None:
            gc.collect()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, object]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Describe the one family that the tier adds to vLLM's metrics page."""
        del extra_config
        documentation = "Counters (since the start) and gauges of kvtier's secondary tiers, by name."
        return {STAT_NAME: OffloadingGaugeMetadata(documentation, labelnames=("tier", "name"))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return kvtier's numbers of the tier and its guard, at most once a second."""
        if not self._stats_clock.is_due():
            return None
        stats = OffloadingConnectorStats()
        for name, value in self._guard.stats().items():
            stats.set_gauge(STAT_NAME, value, (self.tier_type, name))
        return stats

    def _accepts(self, key: OffloadKey) -> bool:
        """Return whether blocks of this engine can be found by a later one; the same for all of its keys."""
        if self._has_stable_keys is None:
            self._has_stable_keys = is_reproducible(key)
            if not self._has_stable_keys:
                logger.error(
                    "%s keeps nothing: vLLM hashes blocks with a random seed, so no later process would find them. "
                    "Set PYTHONHASHSEED=0, or start vLLM with --prefix-caching-hash-algo sha256",
                    self.tier_type,
                )
        return self._has_stable_keys


class KVTierFS(KVTierSecondaryTier):
    """kvtier's tier ``fs``: one file per block in a directory that several engines may share."""

    kvtier_type = "fs"
    medium: ClassVar[Medium | None] = Medium.STORAGE


class Deadlines:
    """How long each request has waited for answers about blocks: until a load of it begins, or it ends.

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
        """Return whether the request, which has no answer now, has waited for its whole time."""
        now_s = self._clock()
        return now_s - self._since_s.setdefault(context.req_id, now_s) >= self._limit_s

    def is_first_time(self, context: ReqContext) -> bool:
        """Return True once for each request that is overdue."""
        is_first = context.req_id not in self._overdue
        self._overdue.add(context.req_id)
        return is_first

    def end(self, context: ReqContext) -> None:
        """Forget the request's wait."""
        self._since_s.pop(context.req_id, None)
        self._overdue.discard(context.req_id)


def base_arguments() -> set[str]:
    """Return what the base class of this release takes beyond what every release passes."""
    common = {"self", "offloading_spec", "primary_kv_view", "tier_type"}
    return set(inspect.signature(StockTier.__init__).parameters) - common
