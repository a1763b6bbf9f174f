"""Threads that move the blocks of jobs: two queues, loads first, bounded.

A job comes with the function that moves some of its blocks. A job of many blocks is cut into tasks as threads become
free, so one large job uses every thread and many small ones share them. A job is reported once, when no thread touches
its slots any more.

A job that is not finished by its deadline loses the tasks that have not begun: their keys have failed. A task that is
in a system call just then is waited for, because a slot that may still be written must stay reserved; a call that never
returns therefore keeps its job open, and nothing else of it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvtier.base import JobId, OffloadKey
from kvtier.errors import TierError, format_foreign
from kvtier.tiering.base import JobMetadata, JobResult

logger = logging.getLogger(__name__)


class TransferOutcome(NamedTuple):
    """What a transfer achieved.

    Attributes:
        succeeded: the keys whose bytes were moved.
        is_fault: whether what failed counts against the tier; no room or an evicted block does not.
    """

    succeeded: Collection[OffloadKey]
    is_fault: bool = False


OVERDUE_CHECK_S = 1.0
"""Seconds between two looks whether a job that is waited for is overdue, which matters only while each thread hangs."""

Transfer = Callable[[Sequence[OffloadKey], Sequence[int]], TransferOutcome]
"""Moves blocks, given keys and their slots. Runs on a thread of the pool; may block and raise."""

DEFAULT_MAX_QUEUED_BLOCKS = 65_536
"""Blocks that may wait for a thread. Far beyond what budgets let through, so reaching it means that the tier is not
polled; fewer would refuse the promotion of one very long prefix."""


@dataclass(slots=True)
class _PoolJob:
    """A job that was accepted and is not reported yet."""

    job_id: JobId
    keys: tuple[OffloadKey, ...]
    block_ids: list[int]
    run: Transfer
    submitted_s: float
    deadline_s: float
    num_begun: int = 0
    num_running_tasks: int = 0
    succeeded: list[OffloadKey] = field(default_factory=list)
    is_fault: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    """Some blocks of a job, moved by one thread with one call."""

    job: _PoolJob
    keys: Sequence[OffloadKey]
    block_ids: Sequence[int]
    is_store: bool


class IOPool:
    """Named daemon threads that work off jobs, loads before stores; started by the first job.

    Mutable are the two queues, the jobs in them and in the threads' hands, counts, and the list of reports.
    ``_changed`` guards them; a transfer runs outside it.

    Args:
        name: of the tier, for the threads and messages.
        num_threads: transfers at the same time.
        clock: seconds, monotonic.
        num_store_threads: how many of them may store at the same time, None for each; the others are there for loads.
        max_task_blocks: blocks that a thread takes at a stretch. One gives the best balance; more amortise
            what a transfer costs once per call, and a load waits that much longer behind a store.
        cuts_evenly: whether a job has no tasks smaller than a thread's share of it. Smaller ones at its end let
            threads end together, and each costs a call.
        max_queued_blocks: blocks that may wait for a thread; a submit beyond it raises.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        clock: Callable[[], float],
        num_store_threads: int | None = None,
        max_task_blocks: int = 1,
        cuts_evenly: bool = False,
        max_queued_blocks: int = DEFAULT_MAX_QUEUED_BLOCKS,
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._num_store_threads = (
            num_threads if num_store_threads is None else min(num_store_threads, num_threads)
        )
        self._clock = clock
        self._max_task_blocks = max_task_blocks
        self._cuts_evenly = cuts_evenly
        self._max_queued_blocks = max_queued_blocks
        self._changed = threading.Condition()
        self._loads: deque[_PoolJob] = deque()
        self._stores: deque[_PoolJob] = deque()
        self._reports: list[JobResult] = []
        self._num_open_jobs = 0
        self._num_queued_blocks = 0
        self._num_timeout_blocks = 0
        self._num_alive_threads = 0
        self._num_storing_threads = 0
        self._is_closed = False

    def submit(self, job: JobMetadata, run: Transfer, timeout_s: float) -> None:
        """Queue a job, a promotion ahead of every store.

        Args:
            job: what to move.
            run: moves some of its blocks; a raise fails those blocks.
            timeout_s: seconds until tasks that have not begun fail.

        Raises:
            TierError: the pool is closed or its queue is full; nothing was started.
        """
        now_s = self._clock()
        block_ids = job.block_ids.tolist()
        opened = _PoolJob(job.job_id, job.keys, block_ids, run, now_s, now_s + timeout_s)
        with self._changed:
            if self._is_closed:
                raise TierError(self._name, f"job {job.job_id} came after shutdown; nothing was started")
            num_queued = self._num_queued_blocks + len(job.keys)
            if num_queued > self._max_queued_blocks:
                limit = f"{num_queued} blocks would wait, at most {self._max_queued_blocks} may"
                raise TierError(self._name, f"job {job.job_id} declined: {limit}")
            if self._num_alive_threads < self._num_threads:
                self._start_threads()
            self._num_open_jobs += 1
            if not job.keys:
                self._report_if_ended(opened)
                return
            self._num_queued_blocks = num_queued
            (self._loads if job.is_promotion else self._stores).append(opened)
            self._changed.notify_all()

    def get_finished(self) -> list[JobResult]:
        """Return the jobs that ended since the last call, each once; what is overdue fails first."""
        with self._changed:
            self._expire(self._clock())
            reports, self._reports = self._reports, []
        return reports

    def wait(self, job_id: JobId) -> JobResult:
        """Block until an accepted job has ended and return its report, which ``get_finished`` then leaves out.

        Thread: any, but one for each job. A job that is overdue fails; a transfer that runs is waited for.
        """
        with self._changed:
            while True:
                self._expire(self._clock())
                for place, report in enumerate(self._reports):
                    if report.job_id == job_id:
                        return self._reports.pop(place)
                self._changed.wait(OVERDUE_CHECK_S)

    def oldest_wait_s(self) -> float:
        """Return the age in seconds of the oldest job that no thread has begun, 0 when there is none."""
        with self._changed:
            waiting = [job.submitted_s for job in (*self._loads, *self._stores) if job.num_begun == 0]
        return max(0.0, self._clock() - min(waiting)) if waiting else 0.0

    def drain(self, timeout_s: float) -> bool:
        """Block until every accepted job has ended; False when ``timeout_s`` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open_jobs == 0, timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        """Refuse new jobs, report what has not begun as failed, and end the threads; idempotent.

        Returns:
            False when ``timeout_s`` passed and a transfer may still be running; its job stays open.
        """
        with self._changed:
            self._is_closed = True
            for job in (*self._loads, *self._stores):
                self._fail_unbegun(job)
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_alive_threads == 0, timeout_s)

    def stats(self) -> dict[str, float]:
        """Return the queue's gauges and the count of blocks that failed at a deadline."""
        with self._changed:
            return {
                "open_jobs": self._num_open_jobs,
                "queued_blocks": self._num_queued_blocks,
                "timeout": self._num_timeout_blocks,
            }

    def _start_threads(self) -> None:
        for number in range(self._num_alive_threads, self._num_threads):
            thread = threading.Thread(target=self._work, name=f"kvtier-{self._name}-io-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self._num_alive_threads == 0:
                    raise TierError(self._name, f"no thread can be started: {error}") from error
                return
            self._num_alive_threads += 1

    def _work(self) -> None:
        while (task := self._take_task()) is not None:
            outcome = TransferOutcome((), is_fault=True)
            try:
                outcome = task.job.run(task.keys, task.block_ids)
            except Exception as error:  # noqa: BLE001  # thread top
                # Not its text: a client's may quote a request, and a request may carry a secret.
                logger.error("tier %s: job %d failed\n%s", self._name, task.job.job_id, format_foreign(error))  # noqa: TRY400
            self._finish(task, outcome)

    def _take_task(self) -> _Task | None:
        with self._changed:
            while True:
                may_store = self._num_storing_threads < self._num_store_threads
                queue = self._loads or (self._stores if may_store else None)
                if queue and queue[0].deadline_s <= self._clock():
                    self._fail_unbegun(queue.popleft(), is_timeout=True)
                elif queue:
                    return self._cut_task(queue)
                elif self._is_closed:
                    self._num_alive_threads -= 1
                    self._changed.notify_all()
                    return None
                else:
                    self._changed.wait()

    def _cut_task(self, queue: deque[_PoolJob]) -> _Task:
        job = queue[0]
        begin = job.num_begun
        is_store = queue is self._stores
        num_threads = self._num_store_threads if is_store else self._num_threads
        # A share of what waits, not of the job: only the last tasks are small, so that threads end together. The
        # next few jobs are enough, since each has a block at least.
        waiting = islice(queue, num_threads)
        share = -(-sum(len(other.keys) - other.num_begun for other in waiting) // num_threads)
        if self._cuts_evenly:
            share = max(share, -(-len(job.keys) // num_threads))
        end = min(begin + min(share, self._max_task_blocks), len(job.keys))
        job.num_begun = end
        job.num_running_tasks += 1
        self._num_storing_threads += is_store
        self._num_queued_blocks -= end - begin
        if end == len(job.keys):
            queue.popleft()
        return _Task(job, job.keys[begin:end], job.block_ids[begin:end], is_store)

    def _finish(self, task: _Task, outcome: TransferOutcome) -> None:
        with self._changed:
            # No other thread is woken although it may store now: this one looks for work next.
            self._num_storing_threads -= task.is_store
            task.job.num_running_tasks -= 1
            task.job.succeeded.extend(outcome.succeeded)
            task.job.is_fault |= outcome.is_fault
            self._report_if_ended(task.job)

    def _expire(self, now_s: float) -> None:
        for queue in (self._loads, self._stores):
            overdue = [job for job in queue if job.deadline_s <= now_s]
            for job in overdue:
                queue.remove(job)
                self._fail_unbegun(job, is_timeout=True)

    def _fail_unbegun(self, job: _PoolJob, *, is_timeout: bool = False) -> None:
        """Fail the blocks that no thread has begun; the caller takes the job out of its queue."""
        num_dropped = len(job.keys) - job.num_begun
        job.num_begun = len(job.keys)
        job.is_fault = True
        self._num_queued_blocks -= num_dropped
        self._num_timeout_blocks += num_dropped if is_timeout else 0
        self._report_if_ended(job)

    def _report_if_ended(self, job: _PoolJob) -> None:
        """Report a job of which no task is running or still to begin: all succeeded, or which keys did."""
        if job.num_running_tasks or job.num_begun < len(job.keys):
            return
        succeeded = frozenset(job.succeeded)
        took_s = self._clock() - job.submitted_s
        if succeeded.issuperset(job.keys):
            result = JobResult(job.job_id, success=True, took_s=took_s)
        else:
            result = JobResult(
                job.job_id,
                success=False,
                successful_keys=succeeded or None,
                is_fault=job.is_fault,
                took_s=took_s,
            )
        self._reports.append(result)
        self._num_open_jobs -= 1
        self._changed.notify_all()
