"""A link that blocks move over, as a queue with servers: bandwidth, latency, transfers at the same time.

It moves no byte and knows no tier. The model: a link has ``num_streams`` servers and one pipe. A part of a job takes a
free server, reads before writes and each kind in the order of submission, as the threads of a real tier do. It waits
out the latency, which overlaps with that of the others, then goes through the pipe at full bandwidth behind whoever was
there before. So one stream with latency is slow, many streams hide the latency, and no number of streams is faster than
the bandwidth.

Parts end in the order in which they begin, for there is one pipe. So a link keeps the ends of what is under way in a
queue of its own and follows them later, with what began at each, when somebody looks or when a job may end. The
timeline gets one event for the end of a job and one shortly before it, not one for a part.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.sim.timeline import Timeline

ROUNDING_RATIO = 1e-9
"""How much earlier than computed a link looks after a job, as a share of the time: a sum of a million times is off by
less. Zero could come too late; larger looks again before the end, for nothing."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast a link is.

    Attributes:
        read_bytes_per_s: bandwidth of reads when nothing is written.
        write_bytes_per_s: bandwidth of writes when nothing is read.
        latency_s: seconds until a part's first byte moves.
        num_streams: parts that are under way at the same time.

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
                raise ConfigError(name, getattr(self, name), "a bandwidth is a finite number above zero")
        if not 0 <= self.latency_s < float("inf"):
            raise ConfigError("latency_s", self.latency_s, "a latency is a finite number from zero")
        if self.num_streams < 1:
            raise ConfigError("num_streams", self.num_streams, "a link has at least one stream")


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
    """What has gone over a link.

    Attributes:
        read_bytes: bytes read.
        written_bytes: bytes written.
        busy_s: seconds in which the pipe moved bytes.
        max_queued_parts: the most parts that have waited for a server at once.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    busy_s: float = 0.0
    max_queued_parts: int = 0


class Link:
    """One link. Used from one thread, on simulated time.

    Args:
        timeline: where the ends of transfers are planned.
        speed: how fast it is.

    Attributes:
        traffic: what has gone over it; parts count from their beginning.
    """

    def __init__(self, timeline: Timeline, speed: LinkSpeed) -> None:
        self._timeline = timeline
        self._speed = speed
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        # Parts under way and when each ends. INVARIANT: soonest first.
        self._under_way: deque[tuple[float, _Job]] = deque()
        self._num_queued = 0
        self._pipe_free_s = 0.0
        self._next_look_s: float | None = None
        self._look_number = 0
        self.traffic = LinkTraffic()

    def submit(
        self, *, is_read: bool, num_parts: int, part_bytes: int, on_end: Callable[[int], object]
    ) -> None:
        """Queue a job.

        Args:
            is_read: which way.
            num_parts: pieces that other jobs may come between; a job of none ends at once.
            part_bytes: bytes of each.
            on_end: told, once, how many parts have moved: all of them, or fewer when the job was given up.
        """
        if num_parts == 0:
            on_end(0)
            return
        self._follow()
        now_s = self._timeline()
        moving_s = self._moving_s(part_bytes, is_read=is_read)
        job = _Job(is_read, num_parts, part_bytes, on_end, now_s, moving_s)
        (self._reads if is_read else self._writes).append(job)
        self._num_queued += num_parts
        self._begin_parts(now_s)
        self._plan_to_follow()
        self.traffic.max_queued_parts = max(self.traffic.max_queued_parts, self._num_queued)

    def change_speed(self, speed: LinkSpeed) -> None:
        """Be as fast as ``speed`` from the next part on; those under way end when they were to end."""
        self._follow()
        self._speed = speed
        for job in (*self._reads, *self._writes):
            job.moving_s = self._moving_s(job.part_bytes, is_read=job.is_read)
        self._begin_parts(self._timeline())
        self._plan_to_follow()

    def oldest_wait_s(self) -> float:
        """Return the age in seconds of the oldest job none of whose parts has begun, 0 when there is none."""
        self._follow()
        waiting = [job.submitted_s for job in (*self._reads, *self._writes) if job.num_begun == 0]
        return self._timeline() - min(waiting) if waiting else 0.0

    def give_up_older_than(self, age_s: float) -> None:
        """Drop the parts of jobs of at least that age that have not begun; those under way still end."""
        self._follow()
        now_s = self._timeline()
        for queue in (self._reads, self._writes):
            # Oldest first, and a part of a job that has begun is at the head.
            while queue and queue[0].submitted_s + age_s <= now_s:
                job = queue.popleft()
                self._num_queued -= job.num_parts - job.num_begun
                job.num_parts = job.num_begun
                for end_s in [end_s for end_s, moving in self._under_way if moving is job][-1:]:
                    self._timeline.at(end_s, self._follow_on)
                if job.num_ended == job.num_parts:
                    job.on_end(job.num_parts)
        self._plan_to_follow()

    def _moving_s(self, part_bytes: int, *, is_read: bool) -> float:
        return part_bytes / (self._speed.read_bytes_per_s if is_read else self._speed.write_bytes_per_s)

    def _follow(self) -> None:
        """Catch up with the parts that have ended until now, and with those that began in their places."""
        now_s = self._timeline()
        under_way = self._under_way
        while under_way and under_way[0][0] <= now_s:
            end_s, job = under_way.popleft()
            job.num_ended += 1
            if self._num_queued:
                self._begin_parts(end_s)
            if job.num_ended == job.num_parts:
                job.on_end(job.num_parts)

    def _look(self) -> None:
        self._next_look_s = None
        self._follow_on()

    def _follow_on(self) -> None:
        self._follow()
        self._plan_to_follow()

    def _plan_to_follow(self) -> None:
        """Plan to look again before the next job's last part can have ended, for its end needs an event."""
        queue = self._reads or self._writes
        if not queue:
            self._cancel_look()
            return
        job, under_way = queue[0], self._under_way
        num_to_begin = job.num_parts - job.num_begun
        # The last part begins when so many have ended, and ends when the pipe has moved all of them: no sooner.
        begins_s = under_way[min(num_to_begin, len(under_way)) - 1][0]
        moved_s = self._pipe_free_s + num_to_begin * job.moving_s
        next_s = max(begins_s, moved_s - ROUNDING_RATIO * moved_s)
        if next_s != self._next_look_s:
            self._cancel_look()
            self._next_look_s = next_s
            self._look_number = self._timeline.at(next_s, self._look)

    def _cancel_look(self) -> None:
        if self._next_look_s is not None:
            self._next_look_s = None
            self._timeline.cancel(self._look_number)

    def _begin_parts(self, now_s: float) -> None:
        """Give free servers the next parts, reads first; the last part of a job gets an event for its end."""
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
                self._timeline.at(free_s, self._follow_on)
        self._pipe_free_s = free_s
