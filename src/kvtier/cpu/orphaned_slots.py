"""The slots that a reset left in use: each waits until the transfers that use it are reported, by key or by slot."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvtier.base import OffloadKey
from kvtier.errors import InvariantError


@dataclass(eq=False, slots=True)
class Orphan:
    """One slot, and the reports that are still to come for it.

    Attributes:
        slot: its number.
        key: what was held in it.
        is_write: True when the transfers write into it.
        num_by_key: reports expected by key.
        num_by_slot: reports expected by slot.
    """

    slot: int
    key: OffloadKey
    is_write: bool
    num_by_key: int
    num_by_slot: int = 0


class OrphanedSlots:
    """The slots that a reset left in use, each until its transfers are reported, by key or by slot.

    Args:
        give_back: called with slots whose last report has arrived.

    Attributes:
        by_slot: the orphans; empty but for a while after a reset.
    """

    def __init__(self, give_back: Callable[[list[int]], None]) -> None:
        self._give_back = give_back
        self.by_slot: dict[int, Orphan] = {}
        self._by_key: dict[tuple[OffloadKey, bool], deque[Orphan]] = {}

    def adopt(self, slot: int, key: OffloadKey, *, is_write: bool, num_reports: int) -> None:
        """Keep ``slot`` until ``num_reports`` reports have come; the newest orphan of its key and kind."""
        orphan = Orphan(slot, key, is_write, num_reports)
        self.by_slot[slot] = orphan
        self._by_key.setdefault((key, is_write), deque()).append(orphan)

    def claim(self, slots: Iterable[int], *, is_write: bool) -> None:
        """Right after a reset: expect one report of each of ``slots`` by slot; other slots are ignored.

        Without this call the report is expected by key, from complete_load or complete_store.
        """
        for slot in slots:
            orphan = self._find(slot, is_write=is_write)
            if orphan is not None and orphan.num_by_key:
                orphan.num_by_slot += 1
                self._take_from_key(orphan)

    def settle_keys(self, keys: Collection[OffloadKey], *, is_write: bool) -> list[OffloadKey]:
        """Take one report for each distinct key that has an orphan; return the keys that have none."""
        others: list[OffloadKey] = []
        for key in dict.fromkeys(keys):
            waiting = self._by_key.get((key, is_write))
            if waiting is None:
                others.append(key)
            else:
                orphan = waiting[0]
                self._take_from_key(orphan)
                self._release_if_settled(orphan)
        return others

    def settle_slots(self, slots: Iterable[int], *, is_write: bool) -> None:
        """Take one report for each of ``slots`` that is an orphan of this kind; others are ignored."""
        for slot in slots:
            orphan = self._find(slot, is_write=is_write)
            if orphan is None:
                continue
            if orphan.num_by_slot:
                orphan.num_by_slot -= 1
            else:
                self._take_from_key(orphan)
            self._release_if_settled(orphan)

    def check(self) -> None:
        """Raise InvariantError when a slot waits for no report or the two indexes differ."""
        expected = [orphan.slot for orphan in self.by_slot.values() if orphan.num_by_key]
        found = [orphan.slot for waiting in self._by_key.values() for orphan in waiting]
        if sorted(expected) != sorted(found) or not all(self._by_key.values()):
            raise InvariantError(f"orphans expect reports by key for slots {expected}, indexed are {found}")
        done = [orphan for orphan in self.by_slot.values() if orphan.num_by_key + orphan.num_by_slot < 1]
        if done:
            raise InvariantError(f"orphans wait for no report: {done}")

    def _find(self, slot: int, *, is_write: bool) -> Orphan | None:
        orphan = self.by_slot.get(slot)
        return orphan if orphan is not None and orphan.is_write is is_write else None

    def _take_from_key(self, orphan: Orphan) -> None:
        orphan.num_by_key -= 1
        if orphan.num_by_key == 0:
            index = (orphan.key, orphan.is_write)
            self._by_key[index].remove(orphan)
            if not self._by_key[index]:
                del self._by_key[index]

    def _release_if_settled(self, orphan: Orphan) -> None:
        if not orphan.num_by_key and not orphan.num_by_slot:
            del self.by_slot[orphan.slot]
            self._give_back([orphan.slot])
