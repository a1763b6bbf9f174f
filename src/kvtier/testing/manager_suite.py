"""The contract of an OffloadingManager over one primary tier, as tests to inherit.

A manager with secondary tiers inherits it with an empty list of tiers. A manager's test is a class that makes one::

    class TestMine(ManagerSuite):
        def make_manager(self, num_blocks: int, *, enable_events: bool = False) -> OffloadingManager:
            return MyManager(num_blocks, enable_events=enable_events)

``check()`` of the manager, if it has one, runs after every test's last step and where an invariant is at stake.
"""

from collections.abc import Sequence

import pytest

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvtier.errors import BlockNotReadyError
from kvtier.testing.policy_suite import key_of

REQUEST = ReqContext("request")


class ManagerSuite:
    """The contract of every manager. Inherit it and implement make_manager."""

    def make_manager(self, num_blocks: int, *, enable_events: bool = False) -> OffloadingManager:
        """Return an empty manager with LRU order.

        Args:
            num_blocks: slots of its primary tier.
            enable_events: whether it records events.
        """
        raise NotImplementedError

    def test_a_block_is_absent_then_in_flight_then_ready(self) -> None:
        """Lookup returns False, None, True in the course of a store."""
        manager = self.make_manager(2)
        (key,) = keys_of(1)
        answers = [manager.lookup(key, REQUEST)]
        prepared(manager, [key])
        answers.append(manager.lookup(key, REQUEST))
        manager.complete_store([key], REQUEST)
        answers.append(manager.lookup(key, REQUEST))
        assert answers == [False, None, True]
        check(manager)

    def test_slots_are_fresh_and_ascending_then_last_freed_first(self) -> None:
        """Slot numbers are deterministic."""
        manager = self.make_manager(4)
        assert slots_of(store(manager, keys_of(1, 2)).store_spec) == [0, 1]
        output = store(manager, keys_of(3, 4, 5, 6))
        assert output.evicted_keys == keys_of(1, 2)
        assert slots_of(output.store_spec) == [2, 3, 1, 0]
        check(manager)

    def test_held_keys_and_repeats_take_no_slot(self) -> None:
        """Only missing keys are stored, each once, whether the held ones are ready or in flight."""
        manager = self.make_manager(4)
        store(manager, keys_of(1))
        prepared(manager, keys_of(2))
        output = prepared(manager, keys_of(3, 1, 3, 2, 3))
        assert output.keys_to_store == keys_of(3)
        assert slots_of(output.store_spec) == [2]
        check(manager)

    def test_nothing_missing_is_an_empty_output(self) -> None:
        """A store of held keys is not refused, even in a full tier."""
        manager = self.make_manager(1)
        store(manager, keys_of(1))
        output = prepared(manager, keys_of(1))
        assert (output.keys_to_store, slots_of(output.store_spec), output.evicted_keys) == ([], [], [])
        assert prepared(manager, []).keys_to_store == []
        check(manager)

    def test_a_store_evicts_exactly_what_is_missing(self) -> None:
        """Free slots are used first."""
        manager = self.make_manager(4)
        store(manager, keys_of(1, 2, 3))
        assert store(manager, keys_of(4, 5)).evicted_keys == keys_of(1)
        check(manager)

    def test_a_key_of_the_call_is_never_evicted_for_it(self) -> None:
        """Held keys named in the call stay, even if they are the oldest."""
        manager = self.make_manager(3)
        store(manager, keys_of(1, 2, 3))
        assert store(manager, keys_of(1, 4)).evicted_keys == keys_of(2)
        assert manager.prepare_store(keys_of(1, 3, 5, 6), REQUEST) is None
        assert manager.lookup(key_of(1), REQUEST) is True
        check(manager)

    def test_no_room_is_none_and_changes_nothing(self) -> None:
        """A refused store leaves blocks, order and events unchanged."""
        manager = self.make_manager(3, enable_events=True)
        store(manager, keys_of(1, 2, 3))
        manager.prepare_load(keys_of(1), REQUEST)
        list(manager.take_events())
        assert manager.prepare_store(keys_of(4, 5, 6), REQUEST) is None
        assert list(manager.take_events()) == []
        assert [manager.lookup(key, REQUEST) for key in keys_of(1, 2, 3, 4)] == [True, True, True, False]
        assert store(manager, keys_of(4, 5)).evicted_keys == keys_of(2, 3)
        check(manager)

    def test_more_keys_than_slots_are_refused(self) -> None:
        """A store larger than the tier finds no room, empty or not."""
        manager = self.make_manager(2)
        assert manager.prepare_store(keys_of(1, 2, 3), REQUEST) is None
        assert store(manager, keys_of(1, 2)).keys_to_store == keys_of(1, 2)
        check(manager)

    def test_a_failed_store_frees_its_slots_and_spares_ready_keys(self) -> None:
        """success=False drops in-flight keys only, and their slots are reused."""
        manager = self.make_manager(3)
        store(manager, keys_of(1))
        prepared(manager, keys_of(2, 3))
        manager.complete_store(keys_of(1, 2, 3, 9), REQUEST, success=False)
        assert [manager.lookup(key, REQUEST) for key in keys_of(1, 2, 3)] == [True, False, False]
        assert slots_of(store(manager, keys_of(4, 5)).store_spec) == [2, 1]
        check(manager)

    def test_completing_what_nobody_prepared_does_nothing(self) -> None:
        """Reports for unknown, ready or unpinned keys change no answer and no pin."""
        manager = self.make_manager(2)
        store(manager, keys_of(1))
        manager.complete_store(keys_of(1, 8), REQUEST)
        manager.complete_load(keys_of(1, 1, 8), REQUEST)
        check(manager)
        manager.prepare_load(keys_of(1), REQUEST)
        assert manager.prepare_store(keys_of(2, 3), REQUEST) is None
        check(manager)

    def test_a_load_names_slots_in_the_order_of_its_keys(self) -> None:
        """``block_ids[i]`` belongs to ``keys[i]``."""
        manager = self.make_manager(3)
        store(manager, keys_of(1, 2, 3))
        assert slots_of(manager.prepare_load(keys_of(3, 1, 2), REQUEST)) == [2, 0, 1]
        check(manager)

    def test_a_loaded_block_stays_until_every_load_is_complete(self) -> None:
        """Two loads pin twice."""
        manager = self.make_manager(1)
        store(manager, keys_of(1))
        for _ in range(2):
            manager.prepare_load(keys_of(1), REQUEST)
        for _ in range(2):
            assert manager.prepare_store(keys_of(2), REQUEST) is None
            manager.complete_load(keys_of(1), REQUEST)
        assert store(manager, keys_of(2)).evicted_keys == keys_of(1)
        check(manager)

    def test_a_repeated_key_in_one_load_pins_once(self) -> None:
        """The slots repeat with the keys; one complete_load unpins."""
        manager = self.make_manager(1)
        store(manager, keys_of(1))
        assert slots_of(manager.prepare_load(keys_of(1, 1), REQUEST)) == [0, 0]
        manager.complete_load(keys_of(1), REQUEST)
        assert store(manager, keys_of(2)).evicted_keys == keys_of(1)
        check(manager)

    @pytest.mark.parametrize("offender", ["absent", "in flight"])
    def test_a_load_of_a_key_that_is_not_ready_pins_nothing(self, offender: str) -> None:
        """The error names the key, and the ready keys of the call can still be evicted."""
        manager = self.make_manager(2)
        store(manager, keys_of(1))
        if offender == "in flight":
            prepared(manager, keys_of(2))
        with pytest.raises(BlockNotReadyError, match=offender) as caught:
            manager.prepare_load(keys_of(1, 2), REQUEST)
        assert caught.value.key == key_of(2)
        assert store(manager, keys_of(3)).keys_to_store == keys_of(3)
        if offender == "in flight":
            assert manager.lookup(key_of(1), REQUEST) is False
        check(manager)

    def test_the_tail_of_a_touched_prefix_is_evicted_first(self) -> None:
        """The first key of a touch ends up most recent."""
        manager = self.make_manager(3)
        store(manager, keys_of(1, 2, 3))
        manager.touch(keys_of(1, 2, 3, 9), REQUEST)
        assert store(manager, keys_of(4, 5)).evicted_keys == keys_of(3, 2)
        check(manager)

    def test_events_say_what_was_stored_and_evicted(self) -> None:
        """Evicted keys are announced at prepare, stored ones at complete; each event is drained once."""
        manager = self.make_manager(2, enable_events=True)
        store(manager, keys_of(1, 2))
        prepared(manager, keys_of(3))
        assert list(manager.take_events()) == [
            OffloadingEvent(keys_of(1, 2), "CPU", removed=False),
            OffloadingEvent(keys_of(1), "CPU", removed=True),
        ]
        manager.complete_store(keys_of(2, 3), REQUEST)
        manager.complete_store(keys_of(3), REQUEST)
        assert list(manager.take_events()) == [OffloadingEvent(keys_of(3), "CPU", removed=False)]
        assert list(manager.take_events()) == []

    def test_a_failed_store_is_no_event(self) -> None:
        """Blocks that never became ready are not announced."""
        manager = self.make_manager(2, enable_events=True)
        prepared(manager, keys_of(1))
        manager.complete_store(keys_of(1), REQUEST, success=False)
        assert list(manager.take_events()) == []

    def test_events_are_off_unless_asked_for(self) -> None:
        """Without enable_events nothing is recorded."""
        manager = self.make_manager(1)
        store(manager, keys_of(1))
        store(manager, keys_of(2))
        assert list(manager.take_events()) == []

    def test_a_reset_forgets_every_block(self) -> None:
        """No block is found afterwards, and every slot is free."""
        manager = self.make_manager(3)
        store(manager, keys_of(1, 2, 3))
        manager.reset()
        check(manager)
        assert [manager.lookup(key, REQUEST) for key in keys_of(1, 2, 3)] == [False] * 3
        assert store(manager, keys_of(4, 5, 6)).evicted_keys == []
        check(manager)

    def test_a_reset_keeps_slots_in_use_from_others_until_reported(self) -> None:
        """A slot that is being written or read stays reserved; its report frees it and makes nothing visible."""
        manager = self.make_manager(3)
        store(manager, keys_of(1, 2))
        manager.prepare_load(keys_of(1), REQUEST)
        prepared(manager, keys_of(3))
        manager.reset()
        check(manager)
        assert slots_of(store(manager, keys_of(4)).store_spec) == [1]
        assert store(manager, keys_of(5)).evicted_keys == keys_of(4)
        manager.complete_store(keys_of(3), REQUEST, success=True)
        manager.complete_load(keys_of(1), REQUEST)
        check(manager)
        assert [manager.lookup(key, REQUEST) for key in keys_of(1, 3, 5)] == [False, False, True]
        assert set(slots_of(store(manager, keys_of(6, 7)).store_spec)) == {0, 2}
        check(manager)

    def test_an_old_report_does_not_complete_a_new_block_of_the_same_key(self) -> None:
        """After a reset the first report of a key is for the old slot, the next for the new one."""
        manager = self.make_manager(2)
        prepared(manager, keys_of(1))
        manager.reset()
        prepared(manager, keys_of(1))
        manager.complete_store(keys_of(1), REQUEST)
        assert manager.lookup(key_of(1), REQUEST) is None
        manager.complete_store(keys_of(1), REQUEST)
        assert manager.lookup(key_of(1), REQUEST) is True
        check(manager)

    def test_the_default_abilities_answer(self) -> None:
        """A plain manager never reports waiting, has counters, and can be shut down twice."""
        manager = self.make_manager(2)
        manager.end_step()
        manager.request_finished(REQUEST)
        assert not manager.has_pending_work()
        assert not manager.is_waiting(REQUEST)
        assert all(isinstance(number, float) for number in manager.stats().values())
        manager.shutdown()
        manager.shutdown()


def keys_of(*numbers: int) -> list[OffloadKey]:
    """Return short keys. Pure."""
    return [key_of(number) for number in numbers]


def slots_of(spec: LoadStoreSpec) -> list[int]:
    """Return the slots that a spec names. Pure."""
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(slot) for slot in spec.block_ids]


def prepared(manager: OffloadingManager, keys: Sequence[OffloadKey]) -> PrepareStoreOutput:
    """Prepare a store for which there must be room."""
    output = manager.prepare_store(keys, REQUEST)
    assert output is not None, f"no room for {len(keys)} keys"
    return output


def store(manager: OffloadingManager, keys: Sequence[OffloadKey]) -> PrepareStoreOutput:
    """Store ``keys`` completely; there must be room."""
    output = prepared(manager, keys)
    manager.complete_store(keys, REQUEST)
    return output


def check(manager: OffloadingManager) -> None:
    """Run the manager's own check, if it has one."""
    recount = getattr(manager, "check", None)
    if recount is not None:
        recount()
