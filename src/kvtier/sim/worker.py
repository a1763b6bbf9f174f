"""The worker half of a simulated engine: loads, stores and flushes on two links instead of on tensors.

It follows the order that the contract of the connector fixes: what is flushed ends before anything of the step begins;
loads begin before the forward pass; stores begin in the step after the one that computed them.
"""

from collections.abc import Callable
from functools import partial

from kvtier.base import BlockIDsLoadStoreSpec, TransferJobId
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata, TransferJob
from kvtier.sim.link import Link, LinkSpeed
from kvtier.sim.timeline import Timeline


class SimulatedWorker:
    """Moves what a step's metadata says.

    Args:
        timeline: where ends are planned.
        speed: of the link to the device; loads and stores have one each, because such links go both ways at once.
        block_bytes: bytes of a block.
        wake: called when a job has ended, which the next report then has.

    Attributes:
        to_device: the link of loads.
        to_host: the link of stores.
        has_report: whether a job has ended that was not reported yet.
    """

    def __init__(
        self, timeline: Timeline, speed: LinkSpeed, block_bytes: int, wake: Callable[[], object]
    ) -> None:
        self.to_device = Link(timeline, speed)
        self.to_host = Link(timeline, speed)
        self._timeline = timeline
        self._copied_s = 0.0
        self._block_bytes = block_bytes
        self._wake = wake
        self._computed_later: dict[TransferJobId, TransferJob] = {}
        self._storing: set[TransferJobId] = set()
        self._flushing: set[TransferJobId] = set()
        self._after_flush: list[Callable[[], object]] = []
        self._report = OffloadingWorkerMetadata()
        self._ended_loads: dict[str, bool] = {}
        self.has_report = False

    def begin_step(self, metadata: OffloadingConnectorMetadata) -> None:
        """Begin the flushes and loads of a step; its stores wait for ``begin_stores``."""
        flushed = metadata.jobs_to_flush
        if flushed:
            self._begin(dict.fromkeys(flushed & self._computed_later.keys()))
            self._flushing |= flushed & self._storing
        self._computed_later.update(metadata.store_jobs)
        for job_id, job in metadata.load_jobs.items():
            self.after_flush(partial(self._load, job_id, job))

    def begin_stores(self) -> None:
        """Begin the stores of what has been computed."""
        self._begin(dict.fromkeys(self._computed_later))

    def after_flush(self, action: Callable[[], object]) -> None:
        """Run ``action`` when the stores that had to end first have ended; now when there are none."""
        if self._flushing:
            self._after_flush.append(action)
        else:
            action()

    def drain_report(self) -> OffloadingWorkerMetadata:
        """Return the jobs that ended since the last call."""
        report, self._report = self._report, OffloadingWorkerMetadata()
        self.has_report = False
        return report

    def drain_ended_loads(self) -> dict[str, bool]:
        """Return the requests whose load ended since the last call, and whether it went well."""
        ended, self._ended_loads = self._ended_loads, {}
        return ended

    def _load(self, job_id: TransferJobId, job: TransferJob) -> None:
        source = job.transfer_spec.source
        begun_s = self._timeline()
        if not isinstance(source, BlockIDsLoadStoreSpec):
            self._end_load(job_id, job, is_good=False)
            return
        self.to_device.submit(
            is_read=True,
            num_parts=1,
            part_bytes=len(source.block_ids) * self._block_bytes,
            on_end=lambda _: self._end_copy(job_id, job, len(source.block_ids), begun_s),
        )

    def _end_copy(self, job_id: TransferJobId, job: TransferJob, num_blocks: int, begun_s: float) -> None:
        now_s = self._timeline()
        self._report.load_bytes += num_blocks * self._block_bytes
        self._report.load_time_s += now_s - max(begun_s, self._copied_s)
        self._copied_s = now_s
        self._end_load(job_id, job, is_good=True)

    def _end_load(self, job_id: TransferJobId, job: TransferJob, *, is_good: bool) -> None:
        self._ended_loads[job.req_id] = is_good
        self._report_end(job_id, is_good=is_good)

    def _begin(self, job_ids: dict[TransferJobId, None]) -> None:
        for job_id in job_ids:
            destination = self._computed_later.pop(job_id).transfer_spec.destination
            num_blocks = len(destination.block_ids) if isinstance(destination, BlockIDsLoadStoreSpec) else 0
            self._storing.add(job_id)
            self.to_host.submit(
                is_read=False,
                num_parts=1,
                part_bytes=num_blocks * self._block_bytes,
                on_end=partial(self._end_store, job_id),
            )

    def _end_store(self, job_id: TransferJobId, num_parts: int) -> None:
        del num_parts
        self._storing.discard(job_id)
        self._report_end(job_id, is_good=True)
        if self._flushing:
            self._flushing.discard(job_id)
            if not self._flushing:
                waiting, self._after_flush = self._after_flush, []
                for action in waiting:
                    action()

    def _report_end(self, job_id: TransferJobId, *, is_good: bool) -> None:
        self._report.mark_completed(job_id, success=is_good)
        self.has_report = True
        self._wake()
