"""The contract of a secondary tier, the jobs it is given, and the settings that every tier has.

A tier reads and writes rows of the primary tier through a memoryview, never device memory. It is called on the
scheduler's thread and must not block there, so threads of its own do the work. ``get_finished`` reports each submitted
job exactly once, whatever happened to it.

Source: the contract follows vLLM's multi-tier offloading as of May 2026 (pull requests 40538 and 40020).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.base import BlockIds, JobId, Locality, OffloadKey, ReqContext
from kvtier.config import ModelIdentity, OffloadingConfig
from kvtier.errors import TierError
from kvtier.histogram import HistogramSnapshot
from kvtier.misses import Miss
from kvtier.settings import (
    IsDataclass,
    choice,
    flag,
    parse_settings,
    seconds_up_to,
    setting,
    size_bytes,
    text,
    whole,
)
from kvtier.tiering.admission import TierAdmission, parse_admission

if TYPE_CHECKING:
    from kvtier.tiering.kit.place import Place, TierFinding

DEFAULT_JOB_TIMEOUT_S = 30.0
"""Seconds after which a tier ends a job as failed. Shorter gives slots back sooner when a disk or server
hangs; longer lets a slow one finish large batches. Waiting requests are bounded by ``lookup_deadline_s``."""

MAX_JOB_TIMEOUT_S = 86_400.0
"""Seconds. A day is longer than any transfer; far longer times overflow the clocks of threads that wait."""

EPOCH_BYTES = 16
"""Random bytes of an epoch."""

FAILURES_TO_OPEN = 5
"""Consecutive failures after which a tier is left out: lookups and submits that raise, lookups without an answer,
requests past their deadline, and jobs that moved no block, unless their report says ``is_fault=False``. One would open
on a single read error; many more would make every waiting request pay for a dead tier."""


class CascadeMode(Enum):
    """When a block is written to a tier."""

    ON_STORE = "on_store"
    ON_EVICT = "on_evict"
    MUST_WRITE = "must_write"


def _parse_policy(name: str, value: object) -> str | None:
    return text(name, value) or None


def _parse_admission(name: str, value: object) -> TierAdmission | None:
    del name  # the parser knows its own
    return parse_admission(value)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The settings that every secondary tier has; ``docs/guide/settings.md`` has the table.

    Attributes:
        required: a tier that cannot start refuses the engine instead of being left out.
        cascade: when blocks are written to the tier.
        store_threshold: how often the primary must have stored or touched a key before the tier gets it;
            below 2 it gets every key.
        job_timeout_s: seconds after which the tier ends a job as failed.
        max_in_flight_store_bytes: bytes of primary slots that the tier's unfinished stores may hold; None
            means an eighth of the primary.
        fill: whether a hit in a slower tier is copied into this one.
        policy: name of the policy that orders the tier; None leaves it to the tier.
        admission: how likely a block must be used again to be written; None writes each.
        emit_events: whether what the tier gains and loses is reported as OffloadingEvents of its own medium.
        encryption: whether the tier encrypts where the engine's setting of that name says how.
    """

    required: bool = field(
        default=False,
        metadata=setting(
            flag,
            "a tier that cannot start is left out, whatever the reason; with `true` the engine refuses to start",
        ),
    )
    cascade: CascadeMode = field(
        default=CascadeMode.ON_STORE,
        metadata=setting(
            choice(CascadeMode),
            'durable and shared at once; `"on_evict"` writes blocks shortly before host memory evicts them: fewer '
            "writes, but blocks that are only in host memory are lost with the engine; "
            '`"must_write"` keeps blocks in host memory [until the tier has them](tiers.md#prompt-caches)',
        ),
    )
    store_threshold: int = field(
        default=0,
        metadata=setting(
            whole(0),
            "every block is written; 2 waits until a second request has stored or touched it",
            unit="requests",
            default_text="`0`: off",
        ),
    )
    job_timeout_s: float = field(
        default=DEFAULT_JOB_TIMEOUT_S,
        metadata=setting(
            seconds_up_to(MAX_JOB_TIMEOUT_S),
            "a job that hangs fails and frees its slots; `lookup_deadline_s` bounds how long requests wait",
            unit="seconds",
        ),
    )
    max_in_flight_store_bytes: int | None = field(
        default=None,
        metadata=setting(
            size_bytes,
            "further blocks wait in host memory, unpinned, so that a slow tier cannot fill it",
            unit="bytes",
            default_text="an eighth of host memory",
        ),
    )
    fill: bool = field(
        default=False,
        metadata=setting(
            flag, "`true` also stores blocks here that are loaded from a slower tier further down the list"
        ),
    )
    policy: str | None = field(
        default=None,
        metadata=setting(
            _parse_policy,
            "eviction order of `fs` and `example`: any of the [policies](../concepts/policies.md), or "
            '`"package.module:Class"`; the other tiers have an order of their own and refuse it',
            default_text="the tier's own",
        ),
    )
    admission: TierAdmission | None = field(
        default=None,
        metadata=setting(
            _parse_admission,
            'every block is written; `{"min_reuse_probability": 0.3, "horizon_s": 1024}` writes those that come back '
            "within so many seconds with at least this probability ([how](../concepts/hazard.md#behind-the-host))",
            unit="mapping",
        ),
    )
    emit_events: bool = field(
        default=False,
        metadata=setting(
            flag,
            "`true` adds what the engine can load from the tier to its [events](events.md); `fs` and `example` "
            "report what they evict themselves, the others what a lookup or a load turned out to miss",
        ),
    )
    encryption: bool = field(
        default=True,
        metadata=setting(
            flag,
            "where the engine's [`encryption`](encryption.md) is set every tier encrypts; `false` leaves the blocks of "
            "this one as they are",
        ),
    )


NO_SETTINGS = TierSettings()
"""Every common setting at its default."""


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """One transfer between the primary tier and a secondary one.

    Attributes:
        job_id: unique for the life of the manager.
        keys: the blocks.
        block_ids: their slots in the primary tier, shape (len(keys),), int64, in the same order.
        is_promotion: True for tier -> primary.
        req_context: the request on whose behalf; the same object as in its lookups.
    """

    job_id: JobId
    keys: tuple[OffloadKey, ...]
    block_ids: BlockIds
    is_promotion: bool
    req_context: ReqContext


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        job_id: the job.
        success: True when every key arrived.
        successful_keys: which keys arrived when not all did; None means none.
        is_fault: whether a failure speaks against the tier; False when it is well but had no room for a
            store, or the block of a load was evicted meanwhile.
        took_s: seconds from the job's submission to its end, on the tier's own clock; None when it does not say, and
            then the job took until it was reported, which with an engine that computes for long can be much later.
    """

    job_id: JobId
    success: bool
    successful_keys: frozenset[OffloadKey] | None = None
    is_fault: bool = True
    took_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PurgeOutcome:
    """How the purge of a tier ended.

    Attributes:
        num_blocks: blocks that it has removed.
        keys: those of them that the tier does not remember itself, as far as their names tell.
        error: why it ended before all were removed; empty when it did not.
    """

    num_blocks: int
    keys: Sequence[OffloadKey] = ()
    error: str = ""


class SecondaryTierManager(ABC):
    """A tier behind host memory that keeps rows under keys.

    Called on the scheduler's thread; no call may block. The primary pins a job's slots until the job is
    reported, so a tier may read (store) or write (load) them until then and not afterwards. Five methods must be
    written; the manager does not call the others where they have no effect.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.

    Attributes:
        supported_settings: common settings that this tier supports beyond the default set: "policy".
        own_settings: the dataclass of the tier's own settings (``kvtier.settings``); None: the settings are the other
            arguments of the constructor.
        can_encrypt: whether it keeps to the engine's setting ``encryption``; otherwise it is refused where that is set.
        keeps_quotas: whether it keeps to the quotas of the engine's tenants; otherwise one for it is refused.
        no_quotas_reason: why it cannot, for that refusal; empty where there is nothing to say.
        locality: where its blocks are as seen from the engine, for events; None when that depends, as for a directory.
        settings: the settings that every tier has.
        capacity_blocks: the most blocks that it can hold; None when it cannot say.
        place_setting: its setting that says where its blocks are; None where they cannot be seen without an engine.
    """

    supported_settings: ClassVar[frozenset[str]] = frozenset()
    own_settings: ClassVar[type[IsDataclass] | None] = None
    can_encrypt: ClassVar[bool] = False
    keeps_quotas: ClassVar[bool] = False
    no_quotas_reason: ClassVar[str] = ""
    locality: ClassVar[Locality | None] = None
    capacity_blocks: int | None = None
    place_setting: ClassVar[str | None] = None
    settings: TierSettings = NO_SETTINGS

    def __init__(
        self, config: OffloadingConfig, primary_kv_view: memoryview, settings: TierSettings = NO_SETTINGS
    ) -> None:
        self.config = config
        self.primary_kv_view = primary_kv_view
        self.settings = settings

    @staticmethod
    @abstractmethod
    def get_tier_type() -> str:
        """Return the name under which the tier is registered."""

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> "list[TierFinding] | None":
        """Find out whether an engine with these settings could work; leaves nothing behind, and never raises TierError.

        Args:
            own: the tier's own settings, complete.

        Returns:
            None where that shows at the start of the engine only.

        Raises:
            ConfigError: a setting that cannot work.
        """
        del own
        return None

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> "Place":
        """Return the place that the tier's own settings describe; changes nothing there.

        For tiers with a ``place_setting``, whose blocks can be seen without an engine.

        Args:
            own: as in a configuration; at least ``place_setting``.

        Raises:
            ConfigError: there is no such place, or it is none of this tier's.
            TierError: it cannot be reached, or the tier has no places.
        """
        del own
        raise TierError(cls.get_tier_type(), "its blocks cannot be seen without an engine")

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True when held, False when not, None while the answer is fetched: call again later."""

    def lookup_run(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return what ``lookup`` says of ``keys``, in order, up to and including the first that is not held."""
        answers: list[bool | None] = []
        for key in keys:
            answers.append(self.lookup(key, req_context))
            if answers[-1] is False:
                break
        return answers

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Start writing the job's slots; a raise means that nothing was started."""

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Start reading into the job's slots; a raise means that nothing was started."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each exactly once.

        Called at most once a step, and not while the tier has neither a job nor a pending lookup.
        """

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Learn that a request arrived, as ``OffloadingManager.note_request``; its end is ``request_finished``."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark ``keys`` as recently used."""

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget what was kept for the request; jobs go on, others may wait for them."""

    def end_step(self) -> None:
        """Start what the lookups of this step need, as one batch."""

    def drain_answered(self) -> Collection[OffloadKey] | None:
        """Return the keys whose lookup answered None and has an answer now, each once.

        Returns:
            None when the tier does not keep track; the manager then looks some of the keys up again in each step, those
            first that have waited longest, so that an answer may be noticed a few steps later.
        """
        return None

    def check_reachable(self) -> None:
        """Contact the backend once and check that it grants access; called at the start, may block for seconds.

        Raises:
            TierError: it is unreachable or refuses, and why.
        """

    def drain_unanswered(self) -> int:
        """Return how many lookups since the last call got no answer from the backend, for the circuit breaker."""
        return 0

    def drain_emptied(self) -> bool:
        """Return whether the backend has lost every block since the last call, for events; a tier may never know."""
        return False

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        """Return blocks that the tier has evicted since the last call; called only with ``emit_events``.

        A tier that overrides this knows what it holds: what was announced before its circuit breaker opened is
        announced again when that closes.

        Returns:
            None when there were more than it remembers; all its blocks are withdrawn then.
        """
        return ()

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        """Return why ``key`` is missing, as ``OffloadingManager.explain``; None when nothing is known of it."""
        return None

    def wait_indexed(self, timeout_s: float) -> bool:
        """Block until what the tier held at the start is counted; False when ``timeout_s`` passed first.

        A tier that counts nothing, or has counted before its constructor returns, leaves the default.
        """
        del timeout_s
        return True

    def waiting_s(self) -> float:
        """Return the age in seconds of the oldest accepted job that has not begun, 0 when there is none."""
        return 0.0

    def drain(self, timeout_s: float) -> bool:
        """Block until every accepted job has ended; False when ``timeout_s`` passed first."""
        del timeout_s
        return True

    def drop(self, keys: Collection[OffloadKey]) -> None:
        """Begin to delete ``keys`` of this engine's namespace for good; what is being read or written may go later.

        A tier that does not override this keeps them, and its engine does not look them up any more.
        """

    def purge(self, tenant: int | None = None) -> PurgeOutcome | None:
        """Begin to drop every block of this engine's namespace for good; loads under way may fail.

        No job of the tier is open when a purge begins, and none is submitted before it has ended.

        Args:
            tenant: number of the tenant of requests whose blocks are to go; None: all.

        Returns:
            How it ended, where it has by now. One with an error and no block says that this tier, or its place, cannot
            do that. None: ``poll_purge`` tells when it has ended.
        """
        blocks = "" if tenant is None else " one tenant's blocks"
        return PurgeOutcome(0, error=f"a tier of this type cannot purge{blocks} while its engine runs")

    def poll_purge(self) -> PurgeOutcome | int:
        """Return how the purge ended, once; while it goes on, how many blocks it has removed."""
        return PurgeOutcome(0, error="purge returned None, and the tier has no poll_purge")

    def reset(self, epoch: bytes) -> bool | None:
        """Move to the namespace of ``epoch``: what was stored before stays for others and is never found here again.

        Returns:
            False: not supported. The manager then leaves the tier out for good, or it would serve old blocks.
        """
        del epoch
        return False

    def switch_model(self, model: ModelIdentity) -> bool | None:
        """Move to the namespace that an engine started with the weights ``model`` has; otherwise as ``reset``.

        A tier that does not override this is reset: no other engine finds what comes after it.
        """
        return self.reset(os.urandom(EPOCH_BYTES))

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name. Thread: any."""
        return {}

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return histograms by name. Thread: any."""
        return {}

    def shutdown(self, timeout_s: float) -> bool:
        """End the tier's threads; idempotent.

        Returns:
            False when ``timeout_s`` passed and a thread may still touch the primary's rows.
        """
        del timeout_s
        return True


class TierFailure(Enum):
    """Why a block that a tier should have had was not loaded; the names of the counters."""

    ABSENT = "absent"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"


COMMON_SETTINGS = frozenset(TierSettings.__dataclass_fields__)


def parse_tier_settings(values: Mapping[str, Any]) -> TierSettings:  # Any: this is where values get types
    """Read the settings that every tier has out of a tier's configuration; other keys are ignored.

    Raises:
        ConfigError: a value of the wrong type or range.
    """
    return parse_settings(TierSettings, {name: values[name] for name in values if name in COMMON_SETTINGS})
