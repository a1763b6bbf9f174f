"""The primary tier: the tiers' words for load and store, beside the engine's."""

import pytest

from kvtier.base import ReqContext
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.errors import BlockNotReadyError
from kvtier.testing.manager_suite import keys_of
from kvtier.testing.tiering_driver import ArrayRegion

REQUEST = ReqContext("a")


def make_primary(num_blocks: int = 2, store_threshold: int = 1) -> CPUPrimaryTierOffloadingManager:
    return CPUPrimaryTierOffloadingManager(
        num_blocks, ArrayRegion(num_blocks), store_threshold=store_threshold
    )


def promote(primary: CPUPrimaryTierOffloadingManager, *numbers: int) -> None:
    assert primary.prepare_write(keys_of(*numbers), REQUEST) is not None
    primary.complete_write(keys_of(*numbers), REQUEST)
    primary.check()


def test_what_a_tier_reads_is_pinned_and_not_counted_as_a_load() -> None:
    primary = make_primary()
    promote(primary, 1, 2)

    assert primary.prepare_read(keys_of(2, 1), REQUEST).block_ids.tolist() == [1, 0]
    assert primary.prepare_write(keys_of(3), REQUEST) is None
    primary.complete_read(keys_of(2, 1), REQUEST)

    assert primary.prepare_write(keys_of(3), REQUEST) is not None
    assert primary.stats()["primary.loaded"] == 0


def test_what_is_not_ready_cannot_be_read() -> None:
    primary = make_primary()
    promote(primary, 1)
    with pytest.raises(BlockNotReadyError):
        primary.prepare_read(keys_of(1, 2), REQUEST)
    assert primary.num_evictable == 1


def test_the_reuse_filter_keeps_a_store_out_and_no_promotion() -> None:
    primary = make_primary(store_threshold=2)
    output = primary.prepare_store(keys_of(1), REQUEST)
    assert output is not None
    assert output.keys_to_store == []
    promote(primary, 1)
    assert primary.is_ready(keys_of(1)[0])


def test_a_prepared_write_names_what_was_evicted_for_it_and_spares_what_is_protected() -> None:
    primary = make_primary()
    promote(primary, 1, 2)
    (first, second) = keys_of(1, 2)

    assert primary.prepare_write(keys_of(3, 4), REQUEST, (first,)) is None
    output = primary.prepare_write(keys_of(3), REQUEST, (first,))
    assert output is not None
    assert output.evicted_keys == [second]


def test_a_hold_of_a_block_in_flight_begins_when_it_is_ready() -> None:
    primary = make_primary(num_blocks=1)
    (key,) = keys_of(1)
    assert primary.prepare_write([key], REQUEST) is not None
    for _ in range(2):
        primary.table.hold(key)
    primary.complete_write([key], REQUEST)
    primary.table.check_holds({key: 2})

    primary.table.release_each([key])
    assert primary.prepare_store(keys_of(2), REQUEST) is None
    primary.table.release_each([key])
    assert primary.prepare_store(keys_of(2), REQUEST) is not None
    primary.check()
