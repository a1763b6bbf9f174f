"""Threads that move the blocks of jobs: two queues, loads first, bounded.

A job comes with the function that moves some of its blocks. A job of many blocks is cut into tasks as threads become
free, so one large job uses every thread and many small ones share them. Small jobs that come with the same function are
joined: a thread moves them with one call, and each is still reported by itself. A job is reported once, when no thread
touches its slots any more.

A job that is not finished by its deadline loses the tasks that have not begun: their keys have failed. A task that is
in a system call just then is waited for, because a slot that may still be written must stay reserved; a call that never
returns therefore keeps its job open, and nothing else of it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.base import JobId, OffloadKey
from kvtier.errors import TierError, format_foreign
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES

logger = logging.getLogger(__name__)


class TransferOutcome(NamedTuple):
    """What a transfer achieved.

    Attributes:
        succeeded: the keys whose bytes were moved.
        is_fault: whether what failed counts against the tier; no room or an evicted block does not.
        faults: which of the keys that failed do; None: all of them where ``is_fault``. A store whose tier joins jobs
            names them, so that the fault of one job is not taken for another's.
    """

    succeeded: Collection[OffloadKey]
    is_fault: bool = False
    faults: Collection[OffloadKey] | None = None


LEAST_JOINED_BLOCKS = 16
"""Blocks up to which small jobs are joined although other threads have nothing to do, where a call costs much beside
its blocks (``cuts_evenly``). With fewer, such calls take most of the time; with more a thread moves alone what several
could."""

MAX_JOINED_BYTES = 2 * 2**20
"""Bytes of several jobs that are moved with one call. A request waits for the others in its call: about a millisecond
for so many. Fewer make more calls of short requests; more only make requests wait."""

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
    is_alone: bool = False


@dataclass(slots=True)
class _Queue:
    """The jobs of one direction that have blocks to begin, and how many blocks these are."""

    jobs: deque[_PoolJob] = field(default_factory=deque)
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Task:
    """Some blocks of a job, or all of several small ones, moved by one thread with one call."""

    jobs: Sequence[_PoolJob]
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
        max_joined_blocks: blocks of several whole jobs that a thread moves with one call; 1 joins none. Jobs are joined
            that were submitted with the same object as ``run``.
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
        max_joined_blocks: int = 1,
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
        self._max_joined_blocks = min(max_joined_blocks, max_task_blocks)
        self._least_joined_blocks = LEAST_JOINED_BLOCKS if cuts_evenly else 1
        self._max_queued_blocks = max_queued_blocks
        self._changed = threading.Condition()
        self._loads = _Queue()
        self._stores = _Queue()
        self._reports: list[JobResult] = []
        self._num_open_jobs = 0
        self._num_joined_jobs = 0
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
            num_queued = self._loads.num_blocks + self._stores.num_blocks + len(job.keys)
            if num_queued > self._max_queued_blocks:
                limit = f"{num_queued} blocks would wait, at most {self._max_queued_blocks} may"
                raise TierError(self._name, f"job {job.job_id} declined: {limit}")
            if self._num_alive_threads < self._num_threads:
                self._start_threads()
            self._num_open_jobs += 1
            if not job.keys:
                self._report_if_ended(opened)
                return
            queue = self._loads if job.is_promotion else self._stores
            queue.num_blocks += len(job.keys)
            queue.jobs.append(opened)
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
            waiting = [
                job.submitted_s for job in (*self._loads.jobs, *self._stores.jobs) if job.num_begun == 0
            ]
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
            for queue in (self._loads, self._stores):
                for job in queue.jobs:
                    self._fail_unbegun(queue, job)
                queue.jobs.clear()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_alive_threads == 0, timeout_s)

    def stats(self) -> dict[str, float]:
        """Return the queue's gauges, and counts of jobs that were joined and of blocks that failed at a deadline."""
        with self._changed:
            return {
                "open_jobs": self._num_open_jobs,
                "queued_blocks": self._loads.num_blocks + self._stores.num_blocks,
                "joined_jobs": self._num_joined_jobs,
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
            first = task.jobs[0]
            outcome = TransferOutcome((), is_fault=True)
            try:
                outcome = first.run(task.keys, task.block_ids)
            except Exception as error:  # noqa: BLE001  # thread top
                # Not its text: a client's may quote a request, and a request may carry a secret.
                logger.error("tier %s: job %d failed\n%s", self._name, first.job_id, format_foreign(error))  # noqa: TRY400
            self._finish(task, outcome)

    def _take_task(self) -> _Task | None:
        with self._changed:
            while True:
                may_store = self._num_storing_threads < self._num_store_threads
                queue = self._loads if self._loads.jobs or not may_store else self._stores
                if queue.jobs and queue.jobs[0].deadline_s <= self._clock():
                    self._fail_unbegun(queue, queue.jobs.popleft(), is_timeout=True)
                elif queue.jobs:
                    return self._cut_task(queue)
                elif self._is_closed:
                    self._num_alive_threads -= 1
                    self._changed.notify_all()
                    return None
                else:
                    self._changed.wait()

    def _cut_task(self, queue: _Queue) -> _Task:
        job = queue.jobs[0]
        begin = job.num_begun
        is_store = queue is self._stores
        num_threads = self._num_store_threads if is_store else self._num_threads
        # A share of what waits, not of the job: only the last tasks are small, so that threads end together.
        share = -(-queue.num_blocks // num_threads)
        num_joined = max(share, self._least_joined_blocks)
        if self._cuts_evenly:
            share = max(share, -(-len(job.keys) // num_threads))
        end = min(begin + min(share, self._max_task_blocks), len(job.keys))
        task = _Task([job], job.keys[begin:end], job.block_ids[begin:end], is_store)
        is_small = end - begin == len(job.keys) < self._max_joined_blocks
        if is_small and len(queue.jobs) > 1 and not job.is_alone:
            task = self._join_jobs(queue, min(num_joined, self._max_joined_blocks), is_store=is_store)
        elif end == len(job.keys):
            queue.jobs.popleft()
        job.num_begun = end
        for one in task.jobs:
            one.num_running_tasks += 1
        self._num_storing_threads += is_store
        queue.num_blocks -= len(task.keys)
        return task

    def _join_jobs(self, queue: _Queue, max_blocks: int, *, is_store: bool) -> _Task:
        """Take the first job, and those behind it that fit beside it into ``max_blocks`` and one call."""
        first = queue.jobs.popleft()
        jobs, keys, block_ids = [first], list(first.keys), list(first.block_ids)
        known = set(keys)
        while queue.jobs:
            job = queue.jobs[0]
            is_whole = job.num_begun == 0 and len(keys) + len(job.keys) <= max_blocks
            # A store of blocks need not expect one of them twice in a call.
            if not is_whole or job.run is not first.run or job.is_alone or not known.isdisjoint(job.keys):
                break
            jobs.append(queue.jobs.popleft())
            job.num_begun = len(job.keys)
            keys += job.keys
            block_ids += job.block_ids
            known.update(job.keys)
        self._num_joined_jobs += len(jobs) if len(jobs) > 1 else 0
        return _Task(jobs, keys, block_ids, is_store)

    def _finish(self, task: _Task, outcome: TransferOutcome) -> None:
        with self._changed:
            # No other thread is woken although it may store now: this one looks for work next.
            self._num_storing_threads -= task.is_store
            for job in task.jobs:
                job.num_running_tasks -= 1
            if len(task.jobs) > 1:
                self._finish_joined(task, outcome)
                return
            job = task.jobs[0]
            job.succeeded.extend(outcome.succeeded)
            job.is_fault |= outcome.is_fault
            self._report_if_ended(job)

    def _finish_joined(self, task: _Task, outcome: TransferOutcome) -> None:
        """Give each job of a call what is its own of the outcome."""
        succeeded, faults = frozenset(outcome.succeeded), frozenset(outcome.faults or ())
        if outcome.is_fault and not succeeded and not faults:
            self._separate(task)
            return
        for job in task.jobs:
            job.succeeded.extend(filter(succeeded.__contains__, job.keys))
            job.is_fault = outcome.is_fault and (outcome.faults is None or not faults.isdisjoint(job.keys))
            self._report_if_ended(job)

    def _separate(self, task: _Task) -> None:
        """Queue the jobs of a call that has failed as a whole again, each by itself: it may have been one's fault."""
        queue = self._stores if task.is_store else self._loads
        for job in reversed(task.jobs):
            job.num_begun = 0
            job.is_alone = True
            queue.num_blocks += len(job.keys)
            if self._is_closed:
                self._fail_unbegun(queue, job)
            else:
                queue.jobs.appendleft(job)
        self._changed.notify_all()

    def _expire(self, now_s: float) -> None:
        for queue in (self._loads, self._stores):
            overdue = [job for job in queue.jobs if job.deadline_s <= now_s]
            for job in overdue:
                queue.jobs.remove(job)
                self._fail_unbegun(queue, job, is_timeout=True)

    def _fail_unbegun(self, queue: _Queue, job: _PoolJob, *, is_timeout: bool = False) -> None:
        """Fail the blocks that no thread has begun; the caller takes the job out of its queue."""
        num_dropped = len(job.keys) - job.num_begun
        job.num_begun = len(job.keys)
        job.is_fault = True
        queue.num_blocks -= num_dropped
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


def plan_max_joined_blocks(row_bytes: int) -> int:
    """Return how many blocks of several jobs are moved with one call. Pure."""
    return max(1, MAX_JOINED_BYTES // max(1, row_bytes))


def check_job(job: JobMetadata, num_rows: int, tier: str) -> None:
    """Refuse a job that no thread could carry out.

    Raises:
        TierError: keys and slots do not fit together, or one of them cannot be.
    """

    def refusal(reason: str) -> TierError:
        return TierError(tier, f"job {job.job_id} {reason}")

    if len(job.keys) != len(job.block_ids):
        counts = f"{len(job.keys)} keys and {len(job.block_ids)} slots"
        raise refusal(f"has {counts}: give one slot for each key")
    too_long = next((key for key in job.keys if not 0 < len(key) <= MAX_KEY_BYTES), None)
    if too_long is not None:
        limit = f"1 to {MAX_KEY_BYTES} bytes fit into a header"
        raise refusal(f"has a key of {len(too_long)} bytes: {limit}")
    if job.keys and not (job.block_ids.min() >= 0 and job.block_ids.max() < num_rows):
        slots = f"slots {job.block_ids.min()} to {job.block_ids.max()}"
        raise refusal(f"names {slots}, the primary has {num_rows}")
