"""The index holds what it was told, and no more than it may."""

from kvtier.base import OffloadKey
from kvtier.tiering.fs.index import KeyIndex


def key(number: int) -> OffloadKey:
    """Return the key of block ``number``."""
    return OffloadKey(number.to_bytes(36, "big"))


def test_keys_are_added_and_discarded() -> None:
    index = KeyIndex(10, is_complete=True)
    index.add([key(1), key(2)])
    index.discard([key(2), key(3)])
    assert key(1) in index
    assert key(2) not in index
    assert len(index) == 1


def test_beyond_its_limit_the_first_key_added_goes() -> None:
    index = KeyIndex(2, is_complete=True)
    index.add(key(number) for number in range(5))
    assert [number for number in range(5) if key(number) in index] == [3, 4]


def test_beyond_its_limit_a_key_that_was_added_again_stays() -> None:
    index = KeyIndex(2, is_complete=True)
    index.add(map(key, (0, 1, 0, 2)))
    assert [number for number in range(3) if key(number) in index] == [0, 2]


def test_completeness_is_said_and_waited_for() -> None:
    index = KeyIndex(2, is_complete=False)
    assert not index.wait_complete(0.0)
    assert not index.is_complete
    index.set_complete()
    assert index.wait_complete(0.0)
    assert index.is_complete
    assert KeyIndex(2, is_complete=True).is_complete
