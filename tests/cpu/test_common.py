"""Pending events: taken once, and merged without loss when they are not taken."""

from kvtier.base import Locality, OffloadingEvent, OffloadKey
from kvtier.cpu.common import EventLog
from kvtier.testing.manager_suite import keys_of


def test_events_are_taken_once_in_order() -> None:
    log = EventLog("CPU")
    log.record(keys_of(1, 2), removed=False)
    log.record(keys_of(1), removed=True)
    assert log.take() == [
        OffloadingEvent(keys_of(1, 2), "CPU", removed=False),
        OffloadingEvent(keys_of(1), "CPU", removed=True),
    ]
    assert log.take() == []


def test_no_keys_are_no_event() -> None:
    log = EventLog("CPU")
    log.record([], removed=True)
    assert log.take() == []


def test_an_event_is_not_changed_by_its_caller() -> None:
    log = EventLog("CPU")
    keys = keys_of(1)
    log.record(keys, removed=False)
    keys.clear()
    assert log.take()[0].keys == keys_of(1)


def applied(events: list[OffloadingEvent], known: set[OffloadKey]) -> set[OffloadKey]:
    """Return what a reader that knew of some blocks believes after the events."""
    for event in events:
        known = known - set(event.keys) if event.removed else known | set(event.keys)
    return known


def test_events_that_are_not_taken_are_merged_and_lose_nothing() -> None:
    log = EventLog("CPU", max_untaken_keys=4)
    log.record(keys_of(1, 2), removed=False)
    known = applied(log.take(), set())
    log.record(keys_of(2), removed=True)
    for number in range(10, 20):
        log.record(keys_of(number), removed=False)
        log.record(keys_of(number), removed=True)
    log.record(keys_of(3), removed=False)
    assert log.num_merges > 0
    events = log.take()
    assert sum(len(event.keys) for event in events) <= 6
    assert applied(events, known) == set(keys_of(1, 3))


def test_a_block_that_came_back_is_held_after_a_merge() -> None:
    log = EventLog("CPU", max_untaken_keys=2)
    log.record(keys_of(1), removed=True)
    log.record(keys_of(1), removed=False)
    log.record(keys_of(2), removed=False)
    assert log.num_merges == 1
    assert applied(log.take(), set(keys_of(1))) == set(keys_of(1, 2))


def test_a_log_that_is_never_taken_names_at_most_what_is_held() -> None:
    log = EventLog("CPU", max_untaken_keys=8)
    for number in range(1000):
        log.record(keys_of(number), removed=False)
        if number >= 5:
            log.record(keys_of(number - 5), removed=True)
    events = log.take()
    assert sum(len(event.keys) for event in events) <= 2 * 8
    assert applied(events, set()) == set(keys_of(*range(995, 1000)))


def test_one_event_is_kept_whatever_its_size() -> None:
    log = EventLog("CPU", max_untaken_keys=2)
    log.record(keys_of(*range(5)), removed=True)
    assert [event.keys for event in log.take()] == [keys_of(*range(5))]


def test_events_name_the_tier_and_where_it_is() -> None:
    log = EventLog("obj", tier="obj.1", locality=Locality.REMOTE)
    log.record(keys_of(1), removed=False)
    (event,) = log.take()
    assert (event.medium, event.tier, event.locality) == ("obj", "obj.1", Locality.REMOTE)
