"""A link hides latency behind streams, is never faster than its bandwidth, and lets reads pass."""

import random

import pytest
from tests.sim.naive_link import NaiveLink

from kvtier.errors import ConfigError
from kvtier.sim.link import Link, LinkSpeed
from kvtier.sim.timeline import Timeline


class Watched:
    """A link of 100 bytes a second whose jobs of parts of 100 bytes note when they end.

    Attributes:
        ends: name, time and number of parts moved of each ended job.
    """

    def __init__(
        self, latency_s: float = 0.0, num_streams: int = 1, write_bytes_per_s: float = 100.0
    ) -> None:
        self.timeline = Timeline()
        self.link = Link(self.timeline, LinkSpeed(100.0, write_bytes_per_s, latency_s, num_streams))
        self.ends: list[tuple[str, float, int]] = []

    def submit(self, name: str, num_parts: int, *, is_read: bool = True) -> None:
        self.link.submit(
            is_read=is_read,
            num_parts=num_parts,
            part_bytes=100,
            on_end=lambda num_moved: self.ends.append((name, self.timeline(), num_moved)),
        )

    def run(self) -> list[tuple[str, float, int]]:
        """Let everything end."""
        while self.timeline.next_s is not None:
            self.timeline.advance_to(self.timeline.next_s)
        return self.ends


def test_one_stream_pays_the_latency_of_each_part() -> None:
    watched = Watched(latency_s=1.0)
    watched.submit("a", 3)

    assert watched.run() == [("a", 6.0, 3)]


def test_streams_overlap_their_latencies_and_share_the_bandwidth() -> None:
    watched = Watched(latency_s=1.0, num_streams=3)
    watched.submit("a", 3)

    assert watched.run() == [("a", 1.0 + 3.0, 3)]


def test_streams_beyond_the_bandwidth_make_nothing_faster() -> None:
    watched = Watched(num_streams=8)
    watched.submit("a", 2)
    watched.submit("b", 2)

    assert watched.run() == [("a", 2.0, 2), ("b", 4.0, 2)]


def test_a_read_passes_the_writes_that_have_not_begun() -> None:
    watched = Watched()
    watched.submit("write", 3, is_read=False)
    watched.timeline.advance_to(0.5)
    watched.submit("read", 1)

    assert watched.run() == [("read", 2.0, 1), ("write", 4.0, 3)]


def test_writes_have_a_bandwidth_of_their_own() -> None:
    watched = Watched(write_bytes_per_s=50.0)
    watched.submit("write", 2, is_read=False)

    assert watched.run() == [("write", 4.0, 2)]
    assert watched.link.traffic.written_bytes == 200
    assert watched.link.traffic.busy_s == 4.0


def test_a_job_without_parts_ends_at_once() -> None:
    watched = Watched()
    watched.submit("none", 0)

    assert watched.ends == [("none", 0.0, 0)]


def test_parts_that_nobody_has_begun_are_given_up_after_their_time_and_the_others_end() -> None:
    watched = Watched()
    watched.submit("begun", 3)
    watched.submit("waiting", 2, is_read=False)
    watched.timeline.advance_to(0.5)

    watched.link.drop_older_than(0.5)

    assert watched.ends == [("waiting", 0.5, 0)]
    assert watched.run() == [("waiting", 0.5, 0), ("begun", 1.0, 1)]


def test_younger_jobs_are_not_given_up() -> None:
    watched = Watched()
    watched.submit("a", 2)
    watched.timeline.advance_to(0.5)

    watched.link.drop_older_than(0.6)

    assert watched.run() == [("a", 2.0, 2)]


def test_the_oldest_wait_is_of_jobs_that_have_not_begun() -> None:
    watched = Watched()
    watched.submit("begun", 5)
    assert watched.link.oldest_wait_s() == 0.0
    watched.timeline.advance_to(0.5)
    watched.submit("waiting", 1)
    watched.timeline.advance_to(0.75)

    assert watched.link.oldest_wait_s() == 0.25


def test_the_longest_queue_is_remembered() -> None:
    watched = Watched(num_streams=2)
    watched.submit("a", 5)
    watched.run()

    assert watched.link.traffic.max_queued_parts == 3


@pytest.mark.parametrize(
    "values", [(0, 1), (1, 0), (float("inf"), 1), (1, float("nan")), (1, 1, -1), (1, 1, 0, 0)]
)
def test_a_speed_that_cannot_be_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        LinkSpeed(*values)  # type: ignore[arg-type]


def test_a_job_that_is_given_up_is_reported_when_its_last_part_under_way_has_ended() -> None:
    watched = Watched(num_streams=2)
    watched.submit("a", 9)
    watched.timeline.advance_to(1.5)

    watched.link.drop_older_than(1.0)

    assert watched.ends == []
    assert watched.run() == [("a", 3.0, 3)]


@pytest.mark.parametrize("seed", range(60))
def test_a_link_ends_jobs_when_one_does_that_follows_each_part(seed: int) -> None:
    assert play(Link, seed) == play(NaiveLink, seed)


def play(make: type[Link | NaiveLink], seed: int) -> tuple[list[tuple[int, float, float]], int, int]:
    """Return what ended when, and the bytes read and written, of a random run."""
    rng = random.Random(seed)
    timeline = Timeline()
    speed = LinkSpeed(
        rng.choice([100.0, 130.0]), 100.0, rng.choice([0.0, 0.3, 2.0]), rng.choice([1, 2, 3, 8])
    )
    link = make(timeline, speed)
    seen: list[tuple[int, float, float]] = []
    for number in range(60):
        timeline.advance_to(timeline() + rng.choice([0.0, 0.0, 0.1, 0.5, 1.0, 3.0, 10.0]))
        choice = rng.random()
        if choice < 0.8:
            link.submit(
                is_read=rng.random() < 0.5,
                num_parts=rng.randrange(12),
                part_bytes=rng.choice([10, 100]),
                on_end=lambda num_moved, number=number: seen.append((number, timeline(), num_moved)),  # type: ignore[misc]
            )
        elif choice < 0.9:
            seen.append((number, timeline(), link.oldest_wait_s()))
        else:
            link.drop_older_than(rng.choice([1.0, 5.0, 20.0]))
    while timeline.next_s is not None:
        timeline.advance_to(timeline.next_s)
    if isinstance(link, Link):
        return seen, link.traffic.read_bytes, link.traffic.written_bytes
    return seen, link.moved_bytes[True], link.moved_bytes[False]


def test_parts_too_short_for_the_clock_to_show_end_all_the_same() -> None:
    timeline, ended = Timeline(), list[int]()
    link = Link(timeline, LinkSpeed(1e18, 1e18))
    timeline.advance_to(1000.0)
    for _ in range(2):
        link.submit(is_read=True, num_parts=3, part_bytes=1, on_end=ended.append)
        while timeline.next_s is not None:
            timeline.advance_to(timeline.next_s)

    assert (ended, timeline()) == ([3, 3], 1000.0)


def test_a_new_speed_counts_for_parts_that_wait_and_not_for_those_under_way() -> None:
    watched = Watched()
    watched.submit("a", 3)
    watched.timeline.advance_to(0.5)
    watched.link.change_speed(LinkSpeed(50.0, 50.0))

    assert watched.run() == [("a", 1.0 + 2.0 + 2.0, 3)]
