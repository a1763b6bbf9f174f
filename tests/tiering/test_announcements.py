"""What routers are told of one tier: what can be loaded, and nothing that is known to be gone."""

import pytest

from kvtier.base import Locality, OffloadKey
from kvtier.cpu.common import EventLog
from kvtier.testing.indexer import BlockIndexer
from kvtier.testing.manager_suite import keys_of
from kvtier.tiering.announcements import MAX_UNKNOWN_KEYS, Announcements


class Bench:
    """The announcements of a tier "fs", and the router that reads them."""

    def __init__(self, max_keys: int = 100) -> None:
        self.announcements = Announcements(EventLog("fs", tier="fs", locality=None), max_keys=max_keys)
        self.router = BlockIndexer()

    def move(self, *numbers: int, arrived: tuple[int, ...] | None = None, is_load: bool = False) -> None:
        """Begin and end a job."""
        keys = keys_of(*numbers)
        self.announcements.begin_job(keys)
        arrived_keys = keys if arrived is None else keys_of(*arrived)
        self.announcements.end_job(keys, arrived_keys, is_load=is_load)

    def believed(self) -> list[OffloadKey]:
        """Return what the router believes now."""
        self.router.apply(self.announcements.take_events())
        return sorted(self.router.held_in("fs", "fs"))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_a_store_wrote_and_what_a_load_brought_is_announced_once(bench: Bench) -> None:
    bench.move(1, 2, arrived=(1,))
    bench.move(3, is_load=True)
    bench.move(1, 3)
    assert bench.believed() == keys_of(1, 3)
    assert bench.router.num_repeated == 0


def test_what_a_load_did_not_bring_and_a_lookup_did_not_find_is_withdrawn(bench: Bench) -> None:
    bench.move(1, 2, 3)
    bench.move(1, 2, arrived=(1,), is_load=True)
    bench.announcements.on_missed(keys_of(3)[0])
    assert bench.believed() == keys_of(1)


def test_a_failed_store_says_nothing_of_a_block_that_was_there(bench: Bench) -> None:
    bench.move(1)
    bench.move(1, arrived=())
    assert bench.believed() == keys_of(1)


def test_a_lookup_that_finds_nothing_is_no_event_of_a_block_that_was_never_announced(bench: Bench) -> None:
    bench.announcements.on_missed(keys_of(1)[0])
    assert bench.announcements.take_events() == []


@pytest.mark.parametrize("is_load", [False, True])
def test_a_block_that_is_evicted_while_its_job_is_open_is_not_announced(bench: Bench, is_load: bool) -> None:
    bench.announcements.begin_job(keys_of(1, 2))
    bench.announcements.on_evicted(keys_of(1))
    bench.announcements.end_job(keys_of(1, 2), keys_of(1, 2), is_load=is_load)
    assert bench.believed() == keys_of(2)
    bench.move(1)
    assert bench.believed() == keys_of(1, 2)


def test_a_tier_that_does_not_know_what_it_has_evicted_has_everything_withdrawn(bench: Bench) -> None:
    bench.move(1, 2)
    bench.announcements.begin_job(keys_of(3))
    bench.announcements.on_evicted(None)
    bench.announcements.end_job(keys_of(3), keys_of(3), is_load=False)
    assert bench.believed() == []


def test_a_hidden_tier_is_announced_again_without_what_it_lost_meanwhile(bench: Bench) -> None:
    bench.move(1, 2, 3)
    bench.announcements.hide(forgets=False)
    assert bench.believed() == []
    bench.announcements.on_evicted(keys_of(2))
    bench.move(4)
    assert bench.believed() == []
    bench.announcements.show()
    assert bench.believed() == keys_of(1, 3, 4)


def test_a_tier_that_may_have_lost_everything_has_to_show_each_block_anew(bench: Bench) -> None:
    bench.move(1, 2)
    bench.announcements.hide(forgets=True)
    bench.announcements.show()
    assert bench.believed() == []
    bench.move(2, is_load=True)
    assert bench.believed() == keys_of(2)


def test_beyond_the_limit_the_block_announced_first_is_withdrawn() -> None:
    bench = Bench(max_keys=3)
    bench.move(1, 2)
    bench.move(3, 4)
    assert bench.believed() == keys_of(2, 3, 4)


def test_a_block_from_before_the_start_is_withdrawn_for_routers_that_remember(bench: Bench) -> None:
    bench.announcements.on_evicted(keys_of(9))
    (event,) = bench.announcements.take_events()
    assert (event.keys, event.removed, event.locality) == (keys_of(9), True, None)


def test_of_blocks_from_before_the_start_no_more_wait_than_fit(bench: Bench) -> None:
    many = [OffloadKey(number.to_bytes(36, "big")) for number in range(MAX_UNKNOWN_KEYS + 1)]
    bench.announcements.on_evicted(many[1:])
    bench.announcements.on_evicted(many[:1])
    assert sum(len(event.keys) for event in bench.announcements.take_events()) == MAX_UNKNOWN_KEYS


def test_a_reset_withdraws_everything_and_forgets_open_jobs(bench: Bench) -> None:
    bench.move(1, 2)
    bench.announcements.begin_job(keys_of(3))
    bench.announcements.on_evicted(keys_of(3))
    bench.announcements.clear()
    assert bench.believed() == []
    bench.move(3)
    assert bench.believed() == keys_of(3)
    assert keys_of(3)[0] in bench.announcements


def test_events_of_a_tier_name_it_and_where_it_is() -> None:
    log = EventLog("obj", tier="obj.1", locality=Locality.REMOTE)
    announcements = Announcements(log)
    announcements.begin_job(keys_of(1))
    announcements.end_job(keys_of(1), keys_of(1), is_load=False)
    (event,) = announcements.take_events()
    assert (event.medium, event.tier, event.locality) == ("obj", "obj.1", Locality.REMOTE)
