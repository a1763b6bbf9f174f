"""A secondary tier without bytes whose jobs end on simulated time.

The manager and policy of the primary tier serve as its directory and decide which blocks it holds and evicts; a Link
decides when its jobs end. The production ``TieringOffloadingManager`` drives it, breaker, budget and back-off included.
Like a real tier it does not write blocks that it already holds, does not evict blocks that it is reading, and ends jobs
that have not started after their time-out.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.errors import ConfigError
from kvtier.misses import Miss
from kvtier.sim.link import Link, LinkSpeed
from kvtier.sim.timeline import Timeline
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager, TierSettings

DIRECTORY = ReqContext("directory")


@dataclass(frozen=True, slots=True)
class TierModel:
    """A secondary tier to simulate.

    Attributes:
        name: its name in results, of letters, digits, "_" and "-"; unique in its chain.
        num_blocks: its capacity.
        speed: the link to it.
        cache_policy: registered name of its eviction policy.
        settings: the common tier settings. Budgets in bytes count one byte per block.

    Raises:
        ConfigError: the name has other characters; a dot would split it in the names of counters.
    """

    name: str
    num_blocks: int
    speed: LinkSpeed
    cache_policy: str = "lru"
    settings: TierSettings = field(default_factory=TierSettings)

    def __post_init__(self) -> None:
        if re.fullmatch(r"[A-Za-z0-9_-]+", self.name) is None:
            raise ConfigError("name", self.name, 'must consist of letters, digits, "_" and "-"')


class SimulatedTier(SecondaryTierManager):
    """One tier of a simulation. ``make_tier`` builds it with its own tier type.

    Args:
        config: the configuration of the simulated engine.
        primary_kv_view: the primary's rows; never read or written.
        model: the tier to simulate.
        timeline: schedules the ends of its jobs.
        block_bytes: bytes of a block.
        wake: called when a job has ended, so that the next poll reports it.

    Attributes:
        link: its link.
        num_written_blocks: blocks written over its link, without those of dropped jobs.
        num_read_blocks: blocks read over its link.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        model: TierModel,
        timeline: Timeline,
        block_bytes: int,
        wake: Callable[[], object],
    ) -> None:
        super().__init__(config, primary_kv_view, model.settings)
        self.capacity_blocks = model.num_blocks
        self._timeline = timeline
        self.link = Link(timeline, model.speed)
        self.num_written_blocks = 0
        self.num_read_blocks = 0
        self._block_bytes = block_bytes
        self._wake = wake
        self._directory = CPUOffloadingManager(model.num_blocks, model.cache_policy, clock=timeline)
        self._results: list[JobResult] = []

    @staticmethod
    def get_tier_type() -> str:
        return "simulated"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return self._directory.lookup(key, DIRECTORY) is True

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        miss = self._directory.departed.explain(key, behind)
        return None if miss is None else miss._replace(tier=self.get_tier_type())

    def submit_store(self, job: JobMetadata) -> None:
        held = self._directory.table.ready_among(job.keys)
        if held:
            self._directory.touch(held, DIRECTORY)
        missing = self._make_room(job.keys)
        self._submit(job, missing, partial(self._end_store, job, missing))

    def submit_load(self, job: JobMetadata) -> None:
        held = self._directory.table.ready_among(job.keys)
        self._directory.prepare_load(held, DIRECTORY)
        self._submit(job, held, partial(self._end_load, job, held))

    def get_finished(self) -> list[JobResult]:
        results, self._results = self._results, []
        return results

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        self._directory.note_request(chains, req_context)

    def request_finished(self, req_context: ReqContext) -> None:
        self._directory.request_finished(req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._directory.touch(keys, DIRECTORY)

    def reset(self, epoch: bytes) -> None:
        del epoch
        self._directory.reset()

    def waiting_s(self) -> float:
        return self.link.oldest_wait_s()

    def stats(self) -> dict[str, float]:
        held = self._directory.stats()["primary.held_blocks"]
        return {
            "held_blocks": held,
            "written_blocks": float(self.num_written_blocks),
            "read_blocks": float(self.num_read_blocks),
        }

    def _make_room(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        output = self._directory.prepare_store(keys, DIRECTORY)
        if output is not None:
            return output.keys_to_store
        fitting = [self._directory.prepare_store([key], DIRECTORY) for key in keys]
        return [key for output in fitting if output is not None for key in output.keys_to_store]

    def _submit(self, job: JobMetadata, moving: list[OffloadKey], on_end: Callable[[int], object]) -> None:
        overdue_s = self._timeline() + self.settings.job_timeout_s
        overdue = self._timeline.at(overdue_s, self._drop_overdue)

        def end(num_moved: int) -> None:
            self._timeline.cancel(overdue)
            on_end(num_moved)

        self.link.submit(
            is_read=job.is_promotion, num_parts=len(moving), part_bytes=self._block_bytes, on_end=end
        )

    def _drop_overdue(self) -> None:
        self.link.drop_older_than(self.settings.job_timeout_s)

    def _end_store(self, job: JobMetadata, missing: list[OffloadKey], num_moved: int) -> None:
        self.num_written_blocks += num_moved
        self._directory.complete_store(missing[:num_moved], DIRECTORY)
        if num_moved < len(missing):
            self._directory.complete_store(missing[num_moved:], DIRECTORY, success=False)
        is_all_new = num_moved == len(job.keys)
        held = job.keys if is_all_new else self._directory.table.ready_among(job.keys)
        self._report(job, held, is_fault=num_moved < len(missing))

    def _end_load(self, job: JobMetadata, held: list[OffloadKey], num_moved: int) -> None:
        self.num_read_blocks += num_moved
        self._directory.complete_load(held, DIRECTORY)
        self._report(job, held[:num_moved], is_fault=num_moved < len(held))

    def _report(self, job: JobMetadata, arrived: Sequence[OffloadKey], *, is_fault: bool) -> None:
        """Report a job of which the blocks ``arrived`` were moved."""
        if len(arrived) == len(job.keys):
            self._results.append(JobResult(job.job_id, success=True))
        else:
            self._results.append(
                JobResult(job.job_id, success=False, successful_keys=frozenset(arrived), is_fault=is_fault)
            )
        self._wake()


def make_tier(
    config: OffloadingConfig,
    primary_kv_view: memoryview,
    model: TierModel,
    timeline: Timeline,
    block_bytes: int,
    wake: Callable[[], object],
) -> SimulatedTier:
    """Return a tier whose type is ``model.name``, so that managers and results distinguish the tiers of a chain."""

    class NamedTier(SimulatedTier):
        """A simulated tier with its own tier type."""

        @staticmethod
        def get_tier_type() -> str:
            """Return the name of the model."""
            return model.name

    return NamedTier(config, primary_kv_view, model, timeline, block_bytes, wake)
