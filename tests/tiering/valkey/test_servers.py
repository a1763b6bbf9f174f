"""Requests are made while those before them are on their way, and each is sent whole."""

from collections.abc import Iterator

import pytest

from kvtier.tiering.valkey.servers import gather


class Requests:
    """Requests of two pieces each, and which were made so far."""

    def __init__(self, *sizes: int) -> None:
        self.made: list[int] = []
        self._sizes = sizes

    def __iter__(self) -> Iterator[Iterator[bytes]]:
        return map(self._make, range(len(self._sizes)))

    def _make(self, number: int) -> Iterator[bytes]:
        self.made.append(number)
        yield b"head"
        yield bytes(self._sizes[number] - len(b"head"))


def test_a_request_is_made_when_what_is_before_it_was_taken() -> None:
    requests = Requests(100, 100, 100)
    portions = gather(requests, 100)
    for number in range(3):
        assert [len(piece) for piece in next(portions)] == [4, 96]
        assert requests.made == list(range(number + 1))
    assert next(portions, None) is None


@pytest.mark.parametrize(
    ("sizes", "portions"),
    [
        ((), []),
        ((10,), [10]),
        ((40, 40, 40, 40), [120, 40]),
        ((250, 10), [250, 10]),
        ((10, 250, 10), [260, 10]),
        ((100, 100), [100, 100]),
    ],
)
def test_small_requests_go_together_and_none_is_cut(sizes: tuple[int, ...], portions: list[int]) -> None:
    taken = list(gather(Requests(*sizes), 100))
    assert [sum(map(len, pieces)) for pieces in taken] == portions
    assert all(len(pieces) % 2 == 0 for pieces in taken)
