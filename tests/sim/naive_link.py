"""A link as its model says: one event for the end of each part, and no queue of what is under way."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.sim.link import LinkSpeed
from kvtier.sim.timeline import Timeline


@dataclass
class NaiveJob:
    """Parts that are reported together."""

    is_read: bool
    num_parts: int
    part_bytes: int
    on_end: Callable[[int], object]
    submitted_s: float
    num_begun: int = 0
    num_running: int = 0


class NaiveLink:
    """What tests ask of a Link."""

    def __init__(self, timeline: Timeline, speed: LinkSpeed) -> None:
        self.timeline, self.speed = timeline, speed
        self.reads: deque[NaiveJob] = deque()
        self.writes: deque[NaiveJob] = deque()
        self.num_busy = 0
        self.pipe_free_s = 0.0
        self.moved_bytes = {True: 0, False: 0}

    def submit(
        self, *, is_read: bool, num_parts: int, part_bytes: int, on_end: Callable[[int], object]
    ) -> None:
        if num_parts == 0:
            on_end(0)
            return
        job = NaiveJob(is_read, num_parts, part_bytes, on_end, self.timeline())
        (self.reads if is_read else self.writes).append(job)
        self.begin()

    def oldest_wait_s(self) -> float:
        waiting = [job.submitted_s for job in (*self.reads, *self.writes) if job.num_begun == 0]
        return self.timeline() - min(waiting) if waiting else 0.0

    def drop_older_than(self, age_s: float) -> None:
        for queue in (self.reads, self.writes):
            while queue and queue[0].submitted_s + age_s <= self.timeline():
                job = queue.popleft()
                job.num_parts = job.num_begun
                self.report(job)

    def begin(self) -> None:
        while self.num_busy < self.speed.num_streams and (queue := self.reads or self.writes):
            job = queue[0]
            job.num_begun += 1
            job.num_running += 1
            self.num_busy += 1
            if job.num_begun == job.num_parts:
                queue.popleft()
            rate = self.speed.read_bytes_per_s if job.is_read else self.speed.write_bytes_per_s
            begins_s = max(self.timeline() + self.speed.latency_s, self.pipe_free_s)
            self.pipe_free_s = begins_s + job.part_bytes / rate
            self.moved_bytes[job.is_read] += job.part_bytes
            self.timeline.at(self.pipe_free_s, lambda job=job: self.end(job))  # type: ignore[misc]

    def end(self, job: NaiveJob) -> None:
        job.num_running -= 1
        self.num_busy -= 1
        self.begin()
        self.report(job)

    def report(self, job: NaiveJob) -> None:
        if job.num_running == 0 and job.num_begun == job.num_parts:
            job.on_end(job.num_parts)
