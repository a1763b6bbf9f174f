"""One thread that carries out copies in the order of submission and reports each exactly once.

It does not know what a copy is: a job brings functions, one for each part of it, which return when the bytes are
there and raise when they may not be. Whoever needs a part only can wait for it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.base import TransferJobId, TransferResult, TransferType

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Job:
    job_id: TransferJobId
    num_bytes: int
    parts: tuple[Callable[[], None], ...]
    num_copied: int = 0


class CopyThread:
    """The copies of one direction.

    Mutable are the queue, the open jobs and how far they are, the results and whether jobs are accepted. All of it is
    guarded by one condition, which is never held while bytes are copied.

    Thread: every public method may be called by any thread.

    Args:
        transfer_type: the media, for the results and the thread's name.
        clock: seconds, for ``transfer_time``.
    """

    def __init__(self, transfer_type: TransferType, clock: Callable[[], float] = time.perf_counter) -> None:
        self._transfer_type = transfer_type
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._open: dict[TransferJobId, _Job] = {}
        self._finished: list[TransferResult] = []
        self._is_accepting = True
        # A daemon: an engine that dies of an exception must exit without having called shutdown.
        self._thread = threading.Thread(
            target=self._run, name=f"kvtier-copy-{'-to-'.join(transfer_type)}", daemon=True
        )
        self._thread.start()

    def submit(self, job_id: TransferJobId, num_bytes: int, *parts: Callable[[], None]) -> bool:
        """Queue a copy whose parts are made one after the other.

        Returns:
            False when the thread has ended or the id belongs to a job that is not reported yet.
        """
        with self._changed:
            if not self._is_accepting or job_id in self._open:
                return False
            job = _Job(job_id, num_bytes, parts)
            self._open[job_id] = job
            self._queue.append(job)
            self._changed.notify_all()
            return True

    def take_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in the order of submission; does not block."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has ended, well or badly; unknown ids are ignored."""
        with self._changed:
            self._changed.wait_for(lambda: self._open.keys().isdisjoint(job_ids))

    def wait_for_part(self, job_ids: set[TransferJobId], part: int) -> bool:
        """Block until each of ``job_ids`` has copied its parts up to ``part`` or has ended; unknown ids are ignored.

        Returns:
            False when one that is not reported yet has failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: all(job.num_copied > part for job in self._open.values() if job.job_id in job_ids)
            )
            return all(result.success for result in self._finished if result.job_id in job_ids)

    def shutdown(self) -> None:
        """Let the begun copy end, fail the queued ones and end the thread; idempotent."""
        with self._changed:
            self._is_accepting = False
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._carry_out(job)
        except BaseException:  # thread top: whatever ends the thread must end its jobs too
            logger.exception("copy thread %s died; its jobs fail", self._thread.name)
        finally:
            self._fail_open_jobs()

    def _next_job(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._is_accepting)
            return self._queue.popleft() if self._queue else None

    def _carry_out(self, job: _Job) -> None:
        start_s = self._clock()
        try:
            for part in job.parts:
                part()
                self._note_copied(job)
        except Exception:  # thread top
            logger.exception("job %d: copying %s to %s failed", job.job_id, *self._transfer_type)
            self._report(job, success=False)
        else:
            self._report(job, success=True, transfer_time=self._clock() - start_s)

    def _note_copied(self, job: _Job) -> None:
        with self._changed:
            job.num_copied += 1
            self._changed.notify_all()

    def _report(self, job: _Job, *, success: bool, transfer_time: float | None = None) -> None:
        transfer_size = job.num_bytes if success else None
        result = TransferResult(job.job_id, success, transfer_size, transfer_time, self._transfer_type)
        with self._changed:
            del self._open[job.job_id]
            self._finished.append(result)
            self._changed.notify_all()

    def _fail_open_jobs(self) -> None:
        with self._changed:
            self._is_accepting = False
            unfinished = list(self._open.values())
        for job in unfinished:
            self._report(job, success=False)
