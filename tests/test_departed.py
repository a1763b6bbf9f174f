"""The memory of what left: what is found, what is forgotten first, and how much it takes."""

import random
import threading

from kvtier.base import OffloadKey
from kvtier.departed import MAX_WAITING_BATCHES, MAX_WAITING_KEYS, RECENT_SHARE, DepartedBlocks
from kvtier.misses import Miss, MissCause, NotStored, not_stored
from kvtier.testing.clock import ManualClock

EVICTED = Miss(MissCause.EVICTED, "host")
DECLINED = not_stored(NotStored.DECLINED, "fs")


def make_keys(num: int, first: int = 0) -> list[OffloadKey]:
    return [OffloadKey(b"block %16d" % number) for number in range(first, first + num)]


def test_a_block_that_left_is_found_with_its_reason_and_age() -> None:
    clock = ManualClock()
    departed = DepartedBlocks(100, clock)
    evicted, declined = departed.add_kind(EVICTED), departed.add_kind(DECLINED)
    first, second = make_keys(2)
    departed.add([first], evicted)
    clock.advance(30.0)
    departed.add([second], declined)
    clock.advance(12.5)

    assert departed.explain(first) == Miss(MissCause.EVICTED, "host", {"ago_s": 42.5})
    assert departed.explain(second) == Miss(MissCause.NOT_STORED, "fs", {"reason": "declined", "ago_s": 12.5})
    assert departed.explain(make_keys(1, first=7)[0]) is None


def test_the_last_departure_of_a_block_counts() -> None:
    clock = ManualClock()
    departed = DepartedBlocks(100, clock)
    evicted, declined = departed.add_kind(EVICTED), departed.add_kind(DECLINED)
    keys = make_keys(3)
    departed.add(keys, evicted)
    departed.add(keys, declined)

    found = departed.find(keys[1])
    assert found is not None
    assert found.miss is DECLINED


def test_the_oldest_are_forgotten_first_and_as_many_stay_as_fit() -> None:
    for size in (1, 2, 3, 7, 64, 1000):
        departed = DepartedBlocks(size, ManualClock())
        kind = departed.add_kind(EVICTED)
        keys = make_keys(3 * size + 1)
        for key in keys:
            departed.add([key], kind)
            departed.fold()

        assert [key for key in keys if departed.find(key)] == keys[-size:]


def test_random_batches_are_found_as_in_a_dictionary() -> None:
    rng = random.Random(5)
    clock = ManualClock()
    departed = DepartedBlocks(256, clock)
    kinds = [departed.add_kind(miss) for miss in (EVICTED, DECLINED)]
    every_key, order = make_keys(400), list[OffloadKey]()
    latest: dict[OffloadKey, tuple[int, float]] = {}
    for _ in range(300):
        batch, kind = rng.choices(every_key, k=rng.randint(0, 40)), rng.choice(kinds)
        departed.add(batch, kind)
        order += batch
        latest |= dict.fromkeys(batch, (kind, clock()))
        clock.advance(1.0)
        if rng.random() < 0.3:
            remembered, at_most = set(order[-256 + 256 // RECENT_SHARE :]), set(order[-2 * 256 :])
            for key in every_key:
                found = departed.find(key)
                assert (found is not None) or (key not in remembered)
                assert (found is None) or (key in at_most)
                if found is not None:
                    kind, left_s = latest[key]
                    assert found == ((EVICTED, DECLINED)[kind], clock() - left_s)


def test_a_batch_larger_than_the_memory_leaves_its_last_blocks() -> None:
    departed = DepartedBlocks(10, ManualClock())
    kind = departed.add_kind(EVICTED)
    keys = make_keys(25)
    departed.add(keys, kind)

    assert [key for key in keys if departed.find(key)] == keys[-10:]


def test_nothing_is_held_before_a_block_leaves_and_sixteen_bytes_a_block_afterwards() -> None:
    departed = DepartedBlocks(2**30, ManualClock())
    assert departed.num_bytes == 0

    departed.add(make_keys(1), departed.add_kind(EVICTED))
    departed.fold()

    assert departed.num_bytes == 16 * 2**20
    small = DepartedBlocks(1000, ManualClock())
    small.add(make_keys(1), small.add_kind(EVICTED))
    small.fold()
    assert small.num_bytes <= 16 * 1000


def test_keys_wait_in_bounded_number_where_nobody_folds() -> None:
    departed = DepartedBlocks(10, ManualClock())
    kind = departed.add_kind(EVICTED)
    for begin in range(0, 3 * MAX_WAITING_KEYS, 1000):
        departed.add(make_keys(1000, first=begin), kind)
        assert departed.num_waiting < MAX_WAITING_KEYS


def test_with_a_stride_a_run_is_found_by_any_of_its_blocks_and_takes_a_part_of_the_memory() -> None:
    clock = ManualClock()
    departed = DepartedBlocks(8000, clock, [EVICTED], stride=8)
    keys = make_keys(200)
    rng, begin = random.Random(1), 0
    while begin < len(keys):  # in batches of any size
        end = begin + rng.randint(1, 11)
        departed.add(keys[begin:end], 0)
        begin = end
    clock.advance(3.0)

    num_alone = sum(departed.explain(key) is not None for key in keys)
    runs = [departed.explain(key, keys[number + 1 :]) for number, key in enumerate(keys[:-8])]
    assert num_alone == len(keys) / 8
    assert runs == [Miss(MissCause.EVICTED, "host", {"ago_s": 3.0})] * len(runs)
    assert departed.explain(make_keys(1, first=900)[0], make_keys(20, first=901)) is None
    assert departed.num_bytes <= 16 * 8000 / 8


def test_threads_report_while_the_owner_looks() -> None:
    departed = DepartedBlocks(100_000, ManualClock(), [EVICTED])
    keys = make_keys(20_000)

    def report(first: int) -> None:
        for number in range(first, len(keys), 4):
            departed.report((keys[number],), 0)
            while departed.num_batches > MAX_WAITING_BATCHES // 2:
                pass

    threads = [threading.Thread(target=report, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        departed.explain(keys[0])
    for thread in threads:
        thread.join()

    assert all(departed.explain(key) for key in keys)


def test_where_nothing_looks_reports_are_bounded() -> None:
    departed = DepartedBlocks(100_000, ManualClock(), [EVICTED])
    for key in make_keys(3 * MAX_WAITING_BATCHES):
        departed.report((key,), 0)

    assert departed.num_batches == MAX_WAITING_BATCHES


def test_after_clear_nothing_is_remembered() -> None:
    departed = DepartedBlocks(10, ManualClock())
    keys = make_keys(4)
    departed.add(keys, departed.add_kind(EVICTED))
    departed.clear()

    assert not any(map(departed.find, keys))
