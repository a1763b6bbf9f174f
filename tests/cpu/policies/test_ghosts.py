"""Ghost lists: an ordered dictionary's answers at a fraction of its memory."""

import random
import tracemalloc
from collections import OrderedDict

import pytest

from kvtier.cpu.policies.ghosts import GhostList
from kvtier.testing.policy_suite import key_of


def test_it_answers_like_an_ordered_dictionary() -> None:
    draw = random.Random(5)
    ghosts, reference = GhostList(), OrderedDict[bytes, bool]()
    for _ in range(20_000):
        key = key_of(draw.randrange(600))
        choice = draw.random()
        if choice < 0.5:
            ghosts[key] = reference[key] = draw.random() < 0.5
        elif choice < 0.8 and key in reference:
            del ghosts[key], reference[key]
        elif reference:
            assert ghosts.pop_oldest() == reference.popitem(last=False)[0]
        assert len(ghosts) == len(reference)
    assert list(ghosts.items()) == list(reference.items())


def test_a_key_that_comes_back_is_the_newest() -> None:
    ghosts = GhostList()
    for number in (1, 2):
        ghosts[key_of(number)] = False
    del ghosts[key_of(1)]
    ghosts[key_of(1)] = False
    assert [ghosts.pop_oldest(), ghosts.pop_oldest()] == [key_of(2), key_of(1)]


def test_the_oldest_of_none_is_an_error() -> None:
    ghosts = GhostList()
    ghosts[key_of(1)] = False
    del ghosts[key_of(1)]
    with pytest.raises(KeyError, match="empty"):
        ghosts.pop_oldest()


def test_clear_forgets_stale_entries_too() -> None:
    ghosts = GhostList()
    ghosts[key_of(1)] = False
    del ghosts[key_of(1)]
    ghosts.clear()
    ghosts[key_of(1)] = True
    assert ghosts.pop_oldest() == key_of(1)
    assert repr(ghosts) == "GhostList(0 keys, 0 stale)"


@pytest.mark.parametrize("length", [9_000, 10_000, 16_384, 17_500])
def test_a_ghost_costs_at_most_150_bytes_beyond_its_key(length: int) -> None:
    keys = [key_of(number) for number in range(4 * length)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    ghosts = GhostList()
    worst = 0
    for number, key in enumerate(keys):
        ghosts[key] = False
        if len(ghosts) > length:
            if number % 3:
                ghosts.pop_oldest()
            else:
                del ghosts[keys[number - length // 2]]
            if number % 509 == 0:
                worst = max(worst, tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    assert worst / length <= 150
