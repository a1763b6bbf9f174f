"""Pending events: taken once, and bounded when nobody takes them."""

from kvtier.base import OffloadingEvent
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


def test_the_oldest_are_dropped_and_counted_when_nobody_takes_them() -> None:
    log = EventLog("CPU", max_untaken_keys=4)
    for number in range(5):
        log.record(keys_of(number, number + 100), removed=False)
    assert log.num_dropped == 3
    assert [event.keys[0] for event in log.take()] == keys_of(3, 4)


def test_the_newest_event_is_kept_whatever_its_size() -> None:
    log = EventLog("CPU", max_untaken_keys=2)
    log.record(keys_of(9), removed=False)
    log.record(keys_of(*range(5)), removed=True)
    assert [event.keys for event in log.take()] == [keys_of(*range(5))]
    log.record(keys_of(1, 2), removed=False)
    assert len(log.take()) == 1
