"""Blocks go for good from packs with and without an owner, and nothing else does."""

import os
import signal
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import bytes_of_packs
from tests.tiering.fs.packed import Clock, used_on_disk
from tests.tiering.fs.peer import Peer
from tests.tiering.fs.placed import (
    NAMESPACE,
    SLOT_BYTES,
    Living,
    abandon,
    end,
    fill,
    numbers_of,
    pack_of,
    remove,
    remove_all,
)

from kvtier.errors import TierError
from kvtier.testing.place_suite import MODELS
from kvtier.testing.tier_driver import key_of
from kvtier.tiering.fs import FSTier, removal
from kvtier.tiering.fs.pack_header import OwnerMark
from kvtier.tiering.fs.pack_view import stamp_of
from kvtier.tiering.fs.place import PackPlace
from kvtier.tiering.fs.purge_requests import ACKNOWLEDGE_S, read_requests
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.place import BlockState, PlaceBlock


def remove_by_force(place: PackPlace, blocks: list[PlaceBlock], *, is_forced: bool = True) -> int:
    place.begin_removal(is_forced=is_forced)
    return place.remove(blocks, unless_changed=False).num


def test_the_room_of_what_is_removed_is_given_back(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, list(range(8)))
    before = used_on_disk(root)
    blocks = list(place.blocks())
    first = [block for block in blocks if stamp_of(block).stem == stamp_of(blocks[0]).stem]
    assert remove(place, first[:2]) == 2
    assert used_on_disk(root) == before - 2 * SLOT_BYTES
    assert remove(place, first[2:]) == 2
    assert used_on_disk(root) < before - 4 * SLOT_BYTES
    assert remove_all(place) == 4
    assert {path.name for path in root.iterdir()} == {".lock"}


def test_a_block_that_was_used_since_it_was_listed_stays_where_only_old_ones_go(
    start_tier: StartTier, place: PackPlace
) -> None:
    clock = Clock()
    fill(start_tier, [1, 2, 3], wall_clock=clock)
    listed = list(place.blocks())
    clock.now_s += 100
    driver = start_tier(wall_clock=clock)
    driver.tier.touch([key_of(2)], driver.request)
    end(driver)
    assert remove(place, listed, unless_changed=True) == 2
    assert numbers_of(list(place.blocks())) == {2}
    assert remove(place, listed) == 1


def test_a_pack_that_its_owner_did_not_close_is_still_one_after_a_removal(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    abandon(driver)
    blocks = list(place.blocks())
    assert remove(place, [block for block in blocks if block.key == key_of(1)]) == 1
    (path,) = root.glob("*/*.pack")
    mark = OwnerMark.unpack(path.read_bytes()[HEADER_PAGE_BYTES:])
    assert mark is not None
    assert not mark.is_closed
    assert start_tier().load_right([1, 2]) == {2}


def test_blocks_go_from_a_pack_whose_journal_is_as_long_as_it_may_be(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1, 2])
    (journal,) = root.glob("*/*.index")
    os.truncate(journal, 2**30)
    assert remove(place, [block for block in place.blocks() if block.key == key_of(1)]) == 1
    assert start_tier().load_right([1, 2]) == {2}


def test_what_a_dead_process_left_of_a_pack_goes_with_its_namespace(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1])
    for suffix in (".new", ".index", ".index.tmp"):
        (root / NAMESPACE / f"{7:016x}{suffix}").write_bytes(b"left")
    (root / NAMESPACE / f"{8:016x}.index").write_bytes(b"left")
    remove_all(place)
    assert not (root / NAMESPACE).exists()


def test_a_file_that_is_not_the_tier_s_keeps_its_namespace(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1])
    (root / NAMESPACE / "readme").write_text("mine")
    assert remove_all(place) == 1
    assert {path.name for path in (root / NAMESPACE).iterdir()} == {"readme", "namespace.json"}


def test_a_pack_without_a_journal_goes_where_nothing_is_to_stay(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1, 2])
    (journal,) = root.glob("*/*.index")
    journal.unlink()
    place.begin_removal()
    place.end_removal([NAMESPACE])
    assert place.namespaces() == []


def test_what_was_stored_since_the_removal_stays(start_tier: StartTier, place: PackPlace) -> None:
    fill(start_tier, [1])
    place.begin_removal()
    place.remove(list(place.blocks()), unless_changed=False)
    fill(start_tier, [2])
    place.end_removal([NAMESPACE])
    assert start_tier().load_right([1, 2]) == {2}


def test_two_that_remove_at_a_time_remove_each_block_once(root: Path, start_tier: StartTier) -> None:
    fill(start_tier, list(range(12)))
    first, second = PackPlace(root), PackPlace(root)
    listed = list(second.blocks())
    counts = [
        one.remove(listed[start : start + 3], unless_changed=False).num
        for start in range(0, 12, 3)
        for one in (first, second)
    ]
    assert counts == 4 * [3, 0]
    first.close()
    second.close()
    assert list(second.blocks()) == []


def test_an_owner_drops_what_it_is_asked_for_and_nothing_else(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    driver = start_tier()
    living.tiers.append(driver.tier)
    driver.store([1, 2, 3, 4, 5])
    before = used_on_disk(root)
    chosen = [block for block in place.blocks() if block.key in {key_of(2), key_of(5)}]
    assert remove(place, chosen) == 2
    assert used_on_disk(root) <= before - 2 * SLOT_BYTES
    assert numbers_of(list(place.blocks())) == {1, 3, 4}
    assert {place.check(block) for block in chosen} == {BlockState.GONE}
    assert driver.load_right([1, 2, 3, 4, 5]) == {1, 3, 4}
    assert driver.store([2, 5]).success
    assert read_requests(root) == []
    end(driver)
    assert start_tier().load_right([1, 2, 3, 4, 5]) == {1, 2, 3, 4, 5}


def test_each_owner_of_a_namespace_is_asked(start_tier: StartTier, place: PackPlace, living: Living) -> None:
    drivers = [start_tier(), start_tier(), start_tier(MODELS[1])]
    living.tiers += [driver.tier for driver in drivers]
    for number, driver in enumerate(drivers):
        assert driver.store([10 * number + 1, 10 * number + 2]).success
    place.begin_removal()
    assert place.remove(list(place.blocks()), unless_changed=False).num == 6
    assert list(place.blocks()) == []
    for driver in drivers:
        assert driver.load_right([1, 2, 11, 12, 21, 22]) == set()


def test_blocks_with_and_without_an_owner_go_at_once(
    start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    fill(start_tier, [1, 2, 3, 4])
    driver = start_tier(MODELS[1])
    living.tiers.append(driver.tier)
    driver.store([1, 2])
    assert remove(place, list(place.blocks())) == 6
    assert list(place.blocks()) == []


def test_more_blocks_than_a_request_names_take_several(
    start_tier: StartTier, place: PackPlace, living: Living, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "MAX_BLOCKS", 3)
    driver = start_tier()
    living.tiers.append(driver.tier)
    driver.store(list(range(8)))
    assert remove(place, list(place.blocks())) == 8
    assert living.num_waits == 3


def test_an_owner_that_has_just_removed_some_looks_for_more_ten_times_a_second(
    root: Path, start_tier: StartTier
) -> None:
    clock, is_due = Clock(), True
    tier = (driver := start_tier(clock=clock)).tier
    assert isinstance(tier, FSTier)

    def pause(seconds: float) -> None:
        clock.pause(seconds)
        tier.keeper.tick(is_due=is_due)

    place = PackPlace(root, clock=clock, pause=pause)
    driver.store([1, 2])
    first, second = place.blocks()
    assert remove(place, [first]) == 1
    is_due = False
    assert remove(place, [second]) == 1
    assert clock.num_pauses == 2
    place.close()


def test_what_the_owner_has_used_since_stays_although_its_journal_does_not_say_so(
    start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    clock = Clock()
    driver = start_tier(wall_clock=clock)
    living.tiers.append(driver.tier)
    driver.store([1, 2, 3])
    clock.now_s += 100
    driver.tier.touch([key_of(2)], driver.request)
    assert remove(place, list(place.blocks()), unless_changed=True) == 2
    assert driver.load_right([1, 2, 3]) == {2}


def test_an_owner_that_does_not_answer_is_named_and_its_blocks_stay(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    before_s = living.clock()
    with pytest.raises(TierError, match=f"process {os.getpid()} did not answer in 10 s"):
        remove(place, list(place.blocks()))
    assert living.clock() - before_s < ACKNOWLEDGE_S + 1
    assert read_requests(root) == []
    assert driver.load_right([1, 2]) == {1, 2}


@pytest.mark.slow
def test_by_force_the_packs_of_a_stopped_engine_go_and_it_goes_on_without_them(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    peer = Peer(root, bytes_of_packs(16), "--pack-bytes", str(bytes_of_packs(1)))
    try:
        assert peer.store(*range(6)) == list(range(6))
        driver = start_tier(MODELS[1])
        living.tiers.append(driver.tier)
        assert driver.store([1, 2]).success
        os.kill(peer.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)
        first = [block for block in place.blocks() if block.key == key_of(0)]
        with pytest.raises(TierError, match=f"process {peer.process.pid} did not answer in 10 s") as refused:
            remove_by_force(place, first, is_forced=False)
        assert str(pack_of(first[0], root)) in str(refused.value)
        assert len(list(place.blocks())) == 8
        assert remove_by_force(place, first) == 4  # with what is in its pack
        assert remove_by_force(place, list(place.blocks())) == 4
        assert list(place.blocks()) == []
        assert not list((root / NAMESPACE).glob("*.pack"))
        os.kill(peer.process.pid, signal.SIGCONT)
        assert [peer.call("load", number) for number in range(6)] == [False] * 6
        while not peer.store(7):
            pass  # until it notices, it has its packs
        assert peer.call("load", 7)
        assert driver.load_right([1, 2]) == set()
    finally:
        os.kill(peer.process.pid, signal.SIGCONT)
        peer.close()


def test_force_takes_nothing_from_an_engine_that_answers(
    start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    driver = start_tier()
    living.tiers.append(driver.tier)
    assert driver.store([1, 2, 3]).success
    assert remove_by_force(place, [block for block in place.blocks() if block.key == key_of(2)]) == 1
    assert driver.load_right([1, 2, 3]) == {1, 3}


def test_blocks_of_an_owner_that_ends_when_it_is_asked_are_removed_without_it(
    root: Path, start_tier: StartTier
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    place = PackPlace(root, clock=Clock(), pause=lambda _: end(driver))
    assert remove(place, list(place.blocks())) == 2
    assert list(place.blocks()) == []
    place.close()


def test_blocks_of_an_owner_that_was_killed_are_removed(start_tier: StartTier, place: PackPlace) -> None:
    driver = start_tier()
    driver.store([1, 2])
    abandon(driver)
    assert remove_all(place) == 2
    assert place.namespaces() == []


def test_a_namespace_that_was_removed_under_a_living_engine_is_no_fault(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    driver = start_tier()
    living.tiers.append(driver.tier)
    driver.store([1, 2])
    listed = list(place.blocks())
    for path in (root / NAMESPACE).iterdir():
        path.unlink()
    (root / NAMESPACE).rmdir()
    assert remove(place, listed) == 0
    assert {place.check(block) for block in listed} == {BlockState.GONE}
    living.pause(0.1)
    assert driver.store([1, 2]).success
    assert numbers_of(list(place.blocks())) == {1, 2}


def test_while_engines_store_and_others_purge_nothing_is_damaged_and_nothing_is_left(
    start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    drivers = [start_tier(), start_tier()]
    living.tiers += [driver.tier for driver in drivers]
    for begin in range(0, 96, 8):
        driver = drivers[begin // 8 % 2]
        job = driver.submit(list(range(begin, begin + 8)), list(range(8)), is_promotion=False)
        states = {place.check(block) for block in place.blocks()}
        assert states <= {BlockState.WHOLE, BlockState.GONE, BlockState.BEING_WRITTEN}
        place.begin_removal()
        place.remove(list(place.blocks()), unless_changed=False)
        place.end_removal([NAMESPACE])
        driver.wait(job)
    for driver in drivers:
        end(driver)
    living.tiers.clear()
    remove_all(place)
    assert place.namespaces() == []
