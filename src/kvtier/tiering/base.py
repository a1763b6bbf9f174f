"""The contract of a secondary tier, the jobs it is given, and the settings that every tier has.

It knows no tier. A tier reads and writes rows of the primary tier through a memoryview, never device memory;
it is called on the scheduler's thread and must not block there, so the work is done by threads of its own.
Each submitted job is reported exactly once by get_finished, whatever happened to it.

Source: the contract follows vLLM's multi-tier offloading as of May 2026 (pull requests 40538 and 40020).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from kvtier.base import BlockIds, JobId, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig, SettingsReader
from kvtier.tiering.admission import TierAdmission, parse_admission

DEFAULT_JOB_TIMEOUT_S = 30.0
"""Seconds after which a tier ends a job as failed. Shorter gives slots back sooner when a disk or server
hangs; longer lets a slow one finish large batches. Waiting requests are bounded by ``lookup_deadline_s``."""


FAILURES_TO_OPEN = 5
"""Consecutive failed jobs after which a tier is left out. One would open on a single evicted block; many
more would let every waiting request pay for a dead tier."""


class CascadeMode(Enum):
    """When a block is written to a tier."""

    ON_STORE = "on_store"
    ON_EVICT = "on_evict"


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
        admission: what must be expected of a block for it to be written; None writes each.
        emit_events: whether what the tier gains and loses is reported as OffloadingEvents of its own medium.
    """

    required: bool = False
    cascade: CascadeMode = CascadeMode.ON_STORE
    store_threshold: int = 0
    job_timeout_s: float = DEFAULT_JOB_TIMEOUT_S
    max_in_flight_store_bytes: int | None = None
    fill: bool = False
    policy: str | None = None
    admission: TierAdmission | None = None
    emit_events: bool = False


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


class SecondaryTierManager(ABC):
    """A place behind the primary tier that keeps rows under keys.

    Called on the scheduler's thread; no call may block. The primary pins a job's slots until the job is
    reported, so a tier may read (store) or write (load) them until then and not afterwards.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.

    Attributes:
        supported_settings: common settings that this tier supports beyond the default set: "policy".
        settings: the settings every tier has; create_secondary_tier assigns them before the first call.
        capacity_blocks: the most blocks that it can hold; None when it cannot say.
    """

    supported_settings: ClassVar[frozenset[str]] = frozenset()
    settings: TierSettings = TierSettings()
    capacity_blocks: int | None = None

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview) -> None:
        self.config = config
        self.primary_kv_view = primary_kv_view

    @staticmethod
    @abstractmethod
    def get_tier_type() -> str:
        """Return the name under which the tier is registered."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True when held, False when not, None when the answer is being fetched: ask again later."""

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Start writing the job's slots; a raise means that nothing was started."""

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Start reading into the job's slots; a raise means that nothing was started."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each exactly once."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark ``keys`` as recently used."""

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget what was kept for the request; jobs go on, others may wait for them."""

    def end_step(self) -> None:
        """Start what the lookups of this step asked for, as one batch."""

    def drain_answered(self) -> Collection[OffloadKey] | None:
        """Return the keys whose lookup answered None and has an answer now, each once.

        Returns:
            None when the tier does not keep track; who waits for it then asks again in every step.
        """
        return None

    def waiting_s(self) -> float:
        """Return the age in seconds of the oldest accepted job that nobody works on yet, 0 when none."""
        return 0.0

    def drain(self, timeout_s: float) -> bool:
        """Block until every accepted job has ended; False when ``timeout_s`` passed first."""
        del timeout_s
        return True

    def reset(self, epoch: bytes) -> None:
        """Move to the namespace of ``epoch``; what was stored before stays for others and is never found.

        Args:
            epoch: 16 random bytes.
        """

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        return {}

    def shutdown(self, timeout_s: float) -> bool:
        """End the tier's threads; idempotent.

        Returns:
            False when ``timeout_s`` passed and a thread may still touch the primary's rows.
        """
        del timeout_s
        return True


class ReachableTier(ABC):
    """What else a tier can do whose place may be away while the tier itself is well."""

    @abstractmethod
    def check_reachable(self) -> None:
        """Ask the place once whether it is there and lets us in; called at the start, may block for seconds.

        Raises:
            TierError: it does not, and why.
        """

    @abstractmethod
    def drain_unanswered(self) -> int:
        """Return how many questions since the last call found nobody to answer them, for the circuit breaker."""


class RequestAware(ABC):
    """What else a tier can do that orders its blocks by what it learns from requests: be told of them."""

    @abstractmethod
    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Learn that a request arrived, as ``OffloadingManager.note_request``; its end is ``request_finished``."""


class EvictionReporter(ABC):
    """What else a tier can do that knows what it evicts: tell it, for events."""

    @abstractmethod
    def drain_evicted(self) -> Collection[OffloadKey]:
        """Return blocks that the tier has evicted since the last call; asked only with ``emit_events``."""


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
    read = SettingsReader(values)
    return TierSettings(
        required=read.flag("required", default=False),
        cascade=read.choice("cascade", CascadeMode.ON_STORE),
        store_threshold=read.whole("store_threshold", 0, minimum=0),
        job_timeout_s=read.seconds("job_timeout_s", DEFAULT_JOB_TIMEOUT_S),
        max_in_flight_store_bytes=read.size_bytes("max_in_flight_store_bytes", None),
        fill=read.flag("fill", default=False),
        policy=read.text("policy", "") or None,
        admission=parse_admission(values.get("admission")),
        emit_events=read.flag("emit_events", default=False),
    )
