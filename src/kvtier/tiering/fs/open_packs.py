"""The packs that are open, by number: one that is retired is closed when the last job that uses it has ended."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from kvtier.tiering.fs.pack import Pack


class OpenPacks:
    """Open packs and their users.

    Mutable are the packs, those that are retired and the number of their users. ``_lock`` guards them; files are
    closed outside it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: dict[int, Pack] = {}
        self._retired: dict[int, tuple[Pack, Callable[[Pack], None]]] = {}
        self._num_users: Counter[int] = Counter()

    def add(self, pack: Pack) -> None:
        """Add an open pack."""
        with self._lock:
            self._packs[pack.number] = pack

    def get(self, number: int) -> Pack | None:
        """Return a pack that is not retired. Who reads or writes it uses ``use``."""
        return self._packs.get(number)

    def all(self) -> list[Pack]:
        """Return the packs that are not retired."""
        with self._lock:
            return list(self._packs.values())

    @contextmanager
    def use(self, numbers: Collection[int]) -> Iterator[Mapping[int, Pack]]:
        """Give those of some packs that are not retired; they stay open meanwhile. Thread: any."""
        with self._lock:
            taken = {number: pack for number in set(numbers) if (pack := self._packs.get(number)) is not None}
            self._num_users.update(taken.keys())
        try:
            yield taken
        finally:
            with self._lock:
                ended = []
                for number in taken:
                    self._num_users[number] -= 1
                    if not self._num_users[number]:
                        del self._num_users[number]
                        if number in self._retired:
                            ended.append(self._retired.pop(number))
            for pack, end in ended:
                end(pack)

    def retire(self, number: int, end: Callable[[Pack], None]) -> None:
        """Take a pack out; ``end``, which closes it, is called now or by its last user."""
        with self._lock:
            pack = self._packs.pop(number, None)
            if pack is None:
                return
            if self._num_users[number]:
                self._retired[number] = pack, end
                return
        end(pack)

    def close_in_child(self) -> None:
        """Close a forked child's copies, which would keep the locks of its parent. No lock is taken here."""
        for pack in [*self._packs.values(), *(pack for pack, _ in self._retired.values())]:
            pack.close(unlock=False)
