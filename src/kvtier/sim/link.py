"""A link that blocks move over, as a queue with servers: bandwidth, latency, concurrent transfers.

The model: a link has ``num_streams`` servers and one pipe. A part of a job takes a free server, reads before writes and
each kind in the order of submission, as the threads of a real tier do. It waits for the latency, concurrently with
other parts, then goes through the pipe at full bandwidth, behind the parts that arrived there earlier. So one stream
with latency is slow, many streams hide the latency, and no number of streams is faster than the bandwidth.

Parts end in the order in which they begin, because there is one pipe. So a link keeps the end times of started parts in
its own queue and catches up with them later, when its state is read or when a job may end. The timeline gets one event
for the end of a job and one shortly before it, not one per part.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.sim.timeline import Timeline

ROUNDING_RATIO = 1e-9
"""How much earlier than computed a link catches up with a job, as a share of the time: the rounding error of a million
additions is smaller. Zero could be too late; larger catches up before the end, in vain."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast a link is.

    Attributes:
        read_bytes_per_s: bandwidth of reads when nothing is written.
        write_bytes_per_s: bandwidth of writes when nothing is read.
        latency_s: seconds until a part's first byte moves.
        num_streams: concurrent parts.

    Raises:
        ConfigError: a bandwidth or the number of streams is not above zero, or the latency is negative.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    num_streams: int = 1

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be a finite number above zero")
        if not 0 <= self.latency_s < float("inf"):
            raise ConfigError("latency_s", self.latency_s, "must be a finite number from zero")
        if self.num_streams < 1:
            raise ConfigError("num_streams", self.num_streams, "must be at least 1")


@dataclass(slots=True)
class _Job:
    """Parts of one size that are reported together."""

    is_read: bool
    num_parts: int
    part_bytes: int
    on_end: Callable[[int], object]
    submitted_s: float
    moving_s: float
    num_begun: int = 0
    num_ended: int = 0


@dataclass(slots=True)
class LinkTraffic:
    """Traffic of a link.

    Attributes:
        read_bytes: bytes read.
        written_bytes: bytes written.
        busy_s: seconds in which the pipe moved bytes.
        max_queued_parts: the most parts that waited for a server at once.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    busy_s: float = 0.0
    max_queued_parts: int = 0


class Link:
    """One link. Used from one thread, on simulated time.

    Args:
        timeline: schedules the ends of transfers.
        speed: its bandwidths, latency and streams.

    Attributes:
        traffic: its traffic; parts count from their start.
    """

    def __init__(self, timeline: Timeline, speed: LinkSpeed) -> None:
        self._timeline = timeline
        self._speed = speed
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        # Started parts and their end times. INVARIANT: soonest first.
        self._under_way: deque[tuple[float, _Job]] = deque()
        self._num_queued = 0
        self._pipe_free_s = 0.0
        self._next_catch_up_s: float | None = None
        self._catch_up_number = 0
        self.traffic = LinkTraffic()

    def submit(
        self, *, is_read: bool, num_parts: int, part_bytes: int, on_end: Callable[[int], object]
    ) -> None:
        """Queue a job.

        Args:
            is_read: the direction.
            num_parts: pieces between which parts of other jobs may run; a job without parts ends at once.
            part_bytes: bytes of each.
            on_end: called once with the number of moved parts: all of them, or fewer when the job was dropped.
        """
        if num_parts == 0:
            on_end(0)
            return
        self._catch_up()
        now_s = self._timeline()
        moving_s = self._moving_s(part_bytes, is_read=is_read)
        job = _Job(is_read, num_parts, part_bytes, on_end, now_s, moving_s)
        (self._reads if is_read else self._writes).append(job)
        self._num_queued += num_parts
        self._begin_parts(now_s)
        self._schedule_catch_up()
        self.traffic.max_queued_parts = max(self.traffic.max_queued_parts, self._num_queued)

    def change_speed(self, speed: LinkSpeed) -> None:
        """Use ``speed`` from the next part on; parts in flight end as scheduled."""
        self._catch_up()
        self._speed = speed
        for job in (*self._reads, *self._writes):
            job.moving_s = self._moving_s(job.part_bytes, is_read=job.is_read)
        self._begin_parts(self._timeline())
        self._schedule_catch_up()

    def oldest_wait_s(self) -> float:
        """Return the age in seconds of the oldest job without a started part, 0 when there is none."""
        self._catch_up()
        waiting = [job.submitted_s for job in (*self._reads, *self._writes) if job.num_begun == 0]
        return self._timeline() - min(waiting) if waiting else 0.0

    def drop_older_than(self, age_s: float) -> None:
        """Drop the parts that have not started of jobs of at least that age; parts in flight still end."""
        self._catch_up()
        now_s = self._timeline()
        for queue in (self._reads, self._writes):
            # Oldest first; parts of a started job are at the head.
            while queue and queue[0].submitted_s + age_s <= now_s:
                job = queue.popleft()
                self._num_queued -= job.num_parts - job.num_begun
                job.num_parts = job.num_begun
                for end_s in [end_s for end_s, moving in self._under_way if moving is job][-1:]:
                    self._timeline.at(end_s, self._catch_up_and_schedule)
                if job.num_ended == job.num_parts:
                    job.on_end(job.num_parts)
        self._schedule_catch_up()

    def _moving_s(self, part_bytes: int, *, is_read: bool) -> float:
        return part_bytes / (self._speed.read_bytes_per_s if is_read else self._speed.write_bytes_per_s)

    def _catch_up(self) -> None:
        """Process the parts that have ended until now, and those that started in their places."""
        now_s = self._timeline()
        under_way = self._under_way
        while under_way and under_way[0][0] <= now_s:
            end_s, job = under_way.popleft()
            job.num_ended += 1
            if self._num_queued:
                self._begin_parts(end_s)
            if job.num_ended == job.num_parts:
                job.on_end(job.num_parts)

    def _run_catch_up(self) -> None:
        self._next_catch_up_s = None
        self._catch_up_and_schedule()

    def _catch_up_and_schedule(self) -> None:
        self._catch_up()
        self._schedule_catch_up()

    def _schedule_catch_up(self) -> None:
        """Schedule an event before the next job's last part can end, because its end needs an event."""
        queue = self._reads or self._writes
        if not queue:
            self._cancel_catch_up()
            return
        job, under_way = queue[0], self._under_way
        num_to_begin = job.num_parts - job.num_begun
        # The last part starts when enough others have ended, and ends not before the pipe has moved all of them.
        begins_s = under_way[min(num_to_begin, len(under_way)) - 1][0]
        moved_s = self._pipe_free_s + num_to_begin * job.moving_s
        next_s = max(begins_s, moved_s - ROUNDING_RATIO * moved_s)
        if next_s != self._next_catch_up_s:
            self._cancel_catch_up()
            self._next_catch_up_s = next_s
            self._catch_up_number = self._timeline.at(next_s, self._run_catch_up)

    def _cancel_catch_up(self) -> None:
        if self._next_catch_up_s is not None:
            self._next_catch_up_s = None
            self._timeline.cancel(self._catch_up_number)

    def _begin_parts(self, now_s: float) -> None:
        """Start parts on free servers, reads first; the last part of a job gets an event for its end."""
        traffic, under_way, free_s = self.traffic, self._under_way, self._pipe_free_s
        num_streams, arrives_s = self._speed.num_streams, now_s + self._speed.latency_s
        while len(under_way) < num_streams and (queue := self._reads or self._writes):
            job = queue[0]
            moving_s = job.moving_s
            free_s = max(arrives_s, free_s) + moving_s
            under_way.append((free_s, job))
            traffic.busy_s += moving_s
            if job.is_read:
                traffic.read_bytes += job.part_bytes
            else:
                traffic.written_bytes += job.part_bytes
            self._num_queued -= 1
            num_begun = job.num_begun = job.num_begun + 1
            if num_begun == job.num_parts:
                queue.popleft()
                self._timeline.at(free_s, self._catch_up_and_schedule)
        self._pipe_free_s = free_s
