"""A secondary tier in private memory: the one to read first and to copy from.

It really keeps the bytes of each block, evicts by a policy when full, and answers every job exactly once. It
has no thread: a synchronous tier does its work in submit and reports it at the next poll; an asynchronous one
(``simulate_async``) does it at that poll, so that a job is under way in between, as behind a network.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvtier.base import Locality, OffloadKey, ReqContext, get_offload_tenant
from kvtier.config import OffloadingConfig
from kvtier.cpu.policies import BlockStatus, CachePolicy, create_cache_policy
from kvtier.cpu.policies.base import clear_policy
from kvtier.cpu.policies.learning import ArrivedRequest, make_arrived
from kvtier.departed import Loss, make_losses
from kvtier.errors import InvariantError, TierError
from kvtier.misses import Miss
from kvtier.settings import IsDataclass, flag, parse_settings, setting, whole
from kvtier.tiering.base import (
    NO_SETTINGS,
    JobMetadata,
    JobResult,
    PurgeOutcome,
    SecondaryTierManager,
    TierSettings,
)

DEFAULT_POLICY = "lru"

MAX_UNREPORTED_KEYS = 65_536
"""Evicted keys that wait for a report, with ``emit_events``; with more, all blocks are withdrawn from routers."""


@dataclass(frozen=True, slots=True)
class ExampleSettings:
    """What the user set for the tier; each field says what it is."""

    max_blocks: int = field(
        default=1000,
        metadata=setting(
            whole(1), "enough to watch it work; the tier is for reading and for tests", unit="blocks"
        ),
    )
    simulate_async: bool = field(
        default=False,
        metadata=setting(flag, "`true` does a job's work at the next poll, as a tier behind a network would"),
    )


class ExampleSecondaryTier(SecondaryTierManager):
    """Keeps rows in a dictionary.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, shape (num_blocks, row_stride), format 'b'.
        max_blocks: rows kept; beyond them the policy evicts, by default the oldest.
        simulate_async: whether a job is carried out by the next poll, which reports it, instead of in its submit.
        settings: the settings that every tier has.
        clock: seconds, monotonic; when requests arrive, for policies that learn from it.

    Attributes:
        blocks: the rows by key, the least recently used first.
        completed_jobs: what the next poll will report.
    """

    own_settings: ClassVar[type[IsDataclass] | None] = ExampleSettings
    locality: ClassVar[Locality | None] = Locality.LOCAL
    supported_settings: ClassVar[frozenset[str]] = frozenset({"policy"})

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        max_blocks: int = 1000,
        simulate_async: bool = False,
        settings: TierSettings = NO_SETTINGS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, primary_kv_view, settings)
        own = parse_settings(ExampleSettings, {"max_blocks": max_blocks, "simulate_async": simulate_async})
        self.max_blocks = self.capacity_blocks = own.max_blocks
        self.simulate_async = own.simulate_async
        self.blocks: OrderedDict[OffloadKey, bytes] = OrderedDict()
        self.completed_jobs: list[JobResult] = []
        self._clock = clock
        self._order = KeyOrder(
            create_cache_policy(settings.policy or DEFAULT_POLICY, self.max_blocks), self.max_blocks
        )
        self._begun: list[JobMetadata] = []
        # One more than is reported, which shows that some were forgotten. Without events none is recorded.
        self._evicted: deque[OffloadKey] = deque(
            maxlen=MAX_UNREPORTED_KEYS + 1 if settings.emit_events else 0
        )
        self._losses = make_losses(self.get_tier_type(), self.max_blocks, clock)
        self._is_shut_down = False

    @staticmethod
    def get_tier_type() -> str:
        return "example"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.blocks

    def submit_store(self, job: JobMetadata) -> None:
        if self._is_shut_down:
            raise TierError(self.get_tier_type(), f"job {job.job_id} came after shutdown: build a new tier")
        if self.simulate_async:
            self._begun.append(job)
        else:
            self._carry_out(job)

    def submit_load(self, job: JobMetadata) -> None:
        self.submit_store(job)

    def get_finished(self) -> Iterable[JobResult]:
        self._carry_out_begun()
        finished, self.completed_jobs = self.completed_jobs, []
        return finished

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        held = [key for key in keys if key in self.blocks]
        for key in reversed(held):
            self.blocks.move_to_end(key)
        self._order.touch(held)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        self._order.note_request(make_arrived(chains, req_context, self._clock()))

    def request_finished(self, req_context: ReqContext) -> None:
        self._order.on_finished(req_context.req_id)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        return self._losses.explain(key)

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        # Whether an eviction came before or after a store that is still to be reported is the guard's to judge.
        evicted = [key for key in dict.fromkeys(self._evicted) if key not in self.blocks]
        has_forgotten = len(self._evicted) > MAX_UNREPORTED_KEYS
        self._evicted.clear()
        return None if has_forgotten else evicted

    def reset(self, epoch: bytes) -> None:
        del epoch
        self._abandon_begun()
        self.clear()

    def shutdown(self, timeout_s: float) -> bool:
        del timeout_s
        self._is_shut_down = True
        self._abandon_begun()
        return True

    def drain(self, timeout_s: float) -> bool:
        del timeout_s
        self._carry_out_begun()
        return True

    def stats(self) -> dict[str, float]:
        return {"blocks": float(len(self.blocks)), "max_blocks": float(self.max_blocks)}

    def get_num_blocks(self) -> int:
        """Return how many blocks are held."""
        return len(self.blocks)

    def purge(self, tenant: int | None = None) -> PurgeOutcome:
        dropped = [key for key in self.blocks if tenant is None or get_offload_tenant(key) == tenant]
        for key in dropped:
            del self.blocks[key]
            self._order.remove(key)
        return PurgeOutcome(len(dropped), dropped)

    def drop(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            if self.blocks.pop(key, None) is not None:
                self._order.remove(key)
                self._losses.add((key,), Loss.DAMAGED)

    def clear(self) -> None:
        """Drop every block."""
        self.blocks.clear()
        self._order.clear()
        self._losses.clear()

    def _carry_out_begun(self) -> None:
        begun, self._begun = self._begun, []
        for job in begun:
            self._carry_out(job)

    def _carry_out(self, job: JobMetadata) -> None:
        done = frozenset(self._load(job) if job.is_promotion else self._store(job))
        is_whole = done.issuperset(job.keys)
        # A block that was evicted before its load does not count against the tier.
        self.completed_jobs.append(
            JobResult(job.job_id, is_whole, None if is_whole else done, is_fault=False)
        )

    def _store(self, job: JobMetadata) -> Iterable[OffloadKey]:
        named = frozenset(job.keys)
        for key, row in zip(job.keys, _rows_of(job, self.primary_kv_view), strict=True):
            if key not in self.blocks and len(self.blocks) == self.max_blocks:
                evicted = self._order.evict(named)
                del self.blocks[evicted]
                self._evicted.append(evicted)
                self._losses.add((evicted,), Loss.EVICTED)
            self._order.insert(key)
            self.blocks[key] = bytes(row)
            self.blocks.move_to_end(key)
            yield key

    def _load(self, job: JobMetadata) -> Iterable[OffloadKey]:
        for key, row in zip(job.keys, _rows_of(job, self.primary_kv_view), strict=True):
            block = self.blocks.get(key)
            if block is not None:
                row[:] = block
                self.blocks.move_to_end(key)
                self._order.touch([key])
                yield key

    def _abandon_begun(self) -> None:
        self.completed_jobs += [JobResult(job.job_id, success=False) for job in self._begun]
        self._begun.clear()


class KeyOrder:
    """In what order keys leave: a policy of host memory, which orders blocks, with a block for each key.

    Args:
        policy: the policy, empty.
        max_blocks: keys that it can hold.
    """

    def __init__(self, policy: CachePolicy, max_blocks: int) -> None:
        self._policy = policy
        self._max_blocks = max_blocks

    def insert(self, key: OffloadKey) -> None:
        """Order a key, or mark it as used when it is there already."""
        if self._policy.get(key) is not None:
            self._policy.touch([key])
            return
        block = BlockStatus(0)
        block.ref_cnt = 0
        self._policy.insert(key, block)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Record a use of ``keys``."""
        self._policy.touch(keys)

    def remove(self, key: OffloadKey) -> None:
        """Stop ordering a key."""
        self._policy.remove(key)

    def evict(self, protected: Collection[OffloadKey]) -> OffloadKey:
        """Stop ordering the next key and return it, one of ``protected`` when there is no other."""
        victims = self._policy.evict(1, protected) or self._policy.evict(1, ())
        if not victims:
            raise InvariantError("the tier is full and its policy holds nothing")
        return victims[0][0]

    def note_request(self, request: ArrivedRequest) -> None:
        """Let the policy learn that a request has arrived."""
        self._policy.note_request(request)

    def on_finished(self, req_id: str) -> None:
        """Let the policy forget a request that has ended."""
        self._policy.on_finished(req_id)

    def clear(self) -> None:
        """Forget everything."""
        clear_policy(self._policy, self._max_blocks)


def _rows_of(job: JobMetadata, primary_kv_view: memoryview) -> Iterable[memoryview]:
    # A memoryview of more than one dimension has no rows of its own, so the rows are cut from the bytes.
    whole = primary_kv_view.cast("B")
    row_bytes = whole.nbytes // len(primary_kv_view)
    for block_id in job.block_ids.tolist():
        yield whole[block_id * row_bytes : (block_id + 1) * row_bytes]
