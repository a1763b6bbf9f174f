"""Transfer queues, which run the copies of one direction in order: on a device queue, or on a thread.

``DeviceTransferQueue`` launches copies on a device queue, which returns a handle for each, and checks later whether
they have ended. Because the device runs them in order, it checks a copy only when the earlier ones have ended.
``CopyThread`` runs copies of CPU tensors itself.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtier.base import TransferJobId, TransferResult, TransferType

logger = logging.getLogger(__name__)


class CopyHandle(Protocol):
    """A launched copy. Any call may raise when the device has failed."""

    def is_done(self) -> bool:
        """Return True when the copy has ended; does not block."""

    def block(self) -> None:
        """Block until the copy has ended."""

    def publish(self) -> None:
        """Order compute launched from now on after the copy, which may still run; does not block."""

    def elapsed_s(self) -> float:
        """Return the seconds that the copy took; it must have ended."""


class DeviceQueue(Protocol):
    """Runs copies one after another."""

    def launch(self, copy: Callable[[], None]) -> CopyHandle:
        """Launch ``copy``; when this raises, nothing of it runs any more."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """One launched copy: the bytes of its job, or of each of several that were joined."""

    sizes: Mapping[TransferJobId, int]
    handle: CopyHandle

    def has_any(self, job_ids: AbstractSet[TransferJobId]) -> bool:
        """Return whether one of ``job_ids`` is copied here."""
        return not self.sizes.keys().isdisjoint(job_ids)


class DeviceTransferQueue:
    """The copies of one direction on a device queue.

    Thread: all calls come from one thread; only ``wait`` and ``shutdown`` block.

    Args:
        transfer_type: the media, for the results.
        queue: launches copies.
    """

    def __init__(self, transfer_type: TransferType, queue: DeviceQueue) -> None:
        self._transfer_type = transfer_type
        self._queue = queue
        self._open: deque[_Launched] = deque()
        self._finished: list[TransferResult] = []
        self._is_accepting = True

    def submit(self, job_id: TransferJobId, num_bytes: int, copy: Callable[[], None]) -> bool:
        """Launch a copy.

        Returns:
            False when the queue has shut down, the id is in use, or the launch failed.
        """
        return self._launch({job_id: num_bytes}, copy)

    def submit_joined(
        self,
        sizes: Mapping[TransferJobId, int],
        copy: Callable[[], None],
        copy_alone: Callable[[TransferJobId], None],
    ) -> bool:
        """Launch one copy that moves the bytes of several jobs; each is reported by itself.

        Args:
            sizes: the bytes of each job.
            copy: moves those of all.
            copy_alone: moves those of one; not needed here, because a device that fails a copy fails all.

        Returns:
            False when none was accepted, for the reasons of ``submit``.
        """
        del copy_alone
        return self._launch(sizes, copy)

    def drain_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in the order of submission; does not block."""
        self._settle(lambda handle: handle.is_done())
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has succeeded or failed; unknown ids are ignored."""
        last = max((at for at, copy in enumerate(self._open) if copy.has_any(job_ids)), default=-1)
        waited_for = {id(copy.handle) for copy in list(self._open)[: last + 1]}

        def is_waited_for(handle: CopyHandle) -> bool:
            if id(handle) not in waited_for:
                return False
            handle.block()
            return True

        self._settle(is_waited_for)

    def shutdown(self) -> None:
        """Block until every launched copy has ended, and accept no more; idempotent."""
        self._is_accepting = False
        self.wait({job_id for copy in self._open for job_id in copy.sizes})

    def _launch(self, sizes: Mapping[TransferJobId, int], copy: Callable[[], None]) -> bool:
        if not self._is_accepting or any(launched.has_any(sizes.keys()) for launched in self._open):
            return False
        try:
            handle = self._queue.launch(copy)
        except Exception:  # thread top: the device's runtime raises any type; the engine continues
            logger.exception("jobs %s: launching %s to %s failed", list(sizes), *self._transfer_type)
            return False
        self._open.append(_Launched(sizes, handle))
        return True

    def _settle(self, has_ended: Callable[[CopyHandle], bool]) -> None:
        """Move ended copies from open to finished, oldest first, up to the first that has not ended."""
        try:
            while self._open and has_ended(self._open[0].handle):
                handle = self._open[0].handle
                handle.publish()
                self._report(success=True, transfer_time=handle.elapsed_s())
        except Exception:  # thread top: when the device fails, all its jobs do
            logger.exception("%s to %s: the device failed", *self._transfer_type)
            self._fail_all()

    def _fail_all(self) -> None:
        """End every open job as failed and accept no more."""
        num_jobs = sum(len(copy.sizes) for copy in self._open)
        logger.error("%s to %s: %d jobs fail with the device", *self._transfer_type, num_jobs)
        self._is_accepting = False
        while self._open:
            self._report(success=False)

    def _report(self, *, success: bool, transfer_time: float | None = None) -> None:
        sizes = self._open.popleft().sizes
        self._finished += _make_results(sizes, success, transfer_time, self._transfer_type)


@dataclass(eq=False, slots=True)
class _Job:
    job_id: TransferJobId
    num_bytes: int
    copy: Callable[[], None]


class CopyThread:
    """The copies of one direction, run by a thread.

    Mutable are the queue, the open jobs, the results and whether jobs are accepted. One condition guards them; it is
    never held while bytes are copied.

    Thread: any thread may call every public method.

    Args:
        transfer_type: the media, for the results and the thread's name.
        clock: seconds, for ``transfer_time``.
    """

    def __init__(self, transfer_type: TransferType, clock: Callable[[], float] = time.perf_counter) -> None:
        self._transfer_type = transfer_type
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._open: dict[TransferJobId, _Job] = {}
        self._finished: list[TransferResult] = []
        self._is_accepting = True
        # A daemon: an engine that dies of an exception must exit without calling shutdown.
        self._thread = threading.Thread(
            target=self._run, name=f"kvtier-copy-{'-to-'.join(transfer_type)}", daemon=True
        )
        self._thread.start()

    def submit(self, job_id: TransferJobId, num_bytes: int, copy: Callable[[], None]) -> bool:
        """Queue a copy.

        Returns:
            False when the thread has ended or the id belongs to a job that is not reported yet.
        """
        with self._changed:
            if not self._is_accepting or job_id in self._open:
                return False
            job = self._open[job_id] = _Job(job_id, num_bytes, copy)
            self._queue.append(partial(self._carry_out, job))
            self._changed.notify_all()
            return True

    def submit_joined(
        self,
        sizes: Mapping[TransferJobId, int],
        copy: Callable[[], None],
        copy_alone: Callable[[TransferJobId], None],
    ) -> bool:
        """Queue one copy that moves the bytes of several jobs; each is reported by itself.

        Args:
            sizes: the bytes of each job.
            copy: moves those of all.
            copy_alone: moves those of one; called for each when ``copy`` has failed, so that none fails another.

        Returns:
            False when none was accepted, for the reasons of ``submit``.
        """
        with self._changed:
            if not self._is_accepting or not sizes.keys().isdisjoint(self._open):
                return False
            jobs = {job_id: _Job(job_id, size, partial(copy_alone, job_id)) for job_id, size in sizes.items()}
            self._open.update(jobs)
            self._queue.append(partial(self._carry_out_joined, list(jobs.values()), copy))
            self._changed.notify_all()
            return True

    def drain_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in the order of submission; does not block."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has succeeded or failed; unknown ids are ignored."""
        with self._changed:
            self._changed.wait_for(lambda: self._open.keys().isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Finish the started copy, fail the queued ones and end the thread; idempotent."""
        with self._changed:
            self._is_accepting = False
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                task()
        except BaseException:  # thread top: anything that ends the thread must fail its jobs
            logger.exception("copy thread %s died; its jobs fail", self._thread.name)
        finally:
            self._fail_open_jobs()

    def _next_task(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._is_accepting)
            return self._queue.popleft() if self._queue else None

    def _carry_out(self, job: _Job) -> None:
        start_s = self._clock()
        try:
            job.copy()
        except Exception:  # thread top
            logger.exception("job %d: copying %s to %s failed", job.job_id, *self._transfer_type)
            self._report([job], success=False)
        else:
            self._report([job], success=True, transfer_time=self._clock() - start_s)

    def _carry_out_joined(self, jobs: Sequence[_Job], copy: Callable[[], None]) -> None:
        start_s = self._clock()
        try:
            copy()
        except Exception:  # thread top
            logger.exception(
                "copying %s to %s failed for %d jobs at once; each is copied alone",
                *self._transfer_type,
                len(jobs),
            )
            for job in jobs:
                self._carry_out(job)
        else:
            self._report(jobs, success=True, transfer_time=self._clock() - start_s)

    def _report(self, jobs: Sequence[_Job], *, success: bool, transfer_time: float | None = None) -> None:
        sizes = {job.job_id: job.num_bytes for job in jobs}
        results = _make_results(sizes, success, transfer_time, self._transfer_type)
        with self._changed:
            for job_id in sizes:
                del self._open[job_id]
            self._finished += results
            self._changed.notify_all()

    def _fail_open_jobs(self) -> None:
        with self._changed:
            self._is_accepting = False
            unfinished = list(self._open.values())
        self._report(unfinished, success=False)


def _make_results(
    sizes: Mapping[TransferJobId, int],
    success: bool,
    transfer_time: float | None,
    transfer_type: TransferType,
) -> list[TransferResult]:
    """Return the results of jobs that one call copied; each took the time of its share of the bytes. Pure."""
    num_bytes = sum(sizes.values())

    def time_of(size: int) -> float | None:
        if transfer_time is None:
            return None
        return transfer_time * size / num_bytes if num_bytes else transfer_time / len(sizes)

    return [
        TransferResult(job_id, success, size if success else None, time_of(size), transfer_type)
        for job_id, size in sizes.items()
    ]
