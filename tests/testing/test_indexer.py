"""The model of a router's index believes each event, medium by medium."""

from kvtier.base import OffloadingEvent
from kvtier.testing.indexer import BlockIndexer
from kvtier.testing.manager_suite import keys_of


def test_a_block_that_leaves_one_tier_stays_in_the_others() -> None:
    router = BlockIndexer()
    router.apply(
        [
            OffloadingEvent(keys_of(1, 2), "CPU", removed=False),
            OffloadingEvent(keys_of(1), "fs", removed=False, tier="fs"),
            OffloadingEvent(keys_of(1), "fs", removed=False, tier="fs.1"),
            OffloadingEvent(keys_of(1), "fs", removed=True, tier="fs"),
            OffloadingEvent(keys_of(2, 3), "CPU", removed=True),
        ]
    )
    assert router.held_in("CPU") == set(keys_of(1))
    assert router.held_in("fs", "fs") == set()
    assert router.held_in("fs", "fs.1") == set(keys_of(1))
    assert (len(router), router.num_repeated) == (2, 0)


def test_repeated_announcements_are_counted_and_a_dead_engine_is_forgotten() -> None:
    router = BlockIndexer()
    stored = OffloadingEvent(keys_of(1, 2), "CPU", removed=False)
    router.apply([stored, stored])
    assert router.num_repeated == 2
    router.forget()
    assert len(router) == 0
