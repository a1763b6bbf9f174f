"""The packs of one namespace: which are open, which are own, and what they hold.

Own packs are in the slot table, all others among the namespace's neighbours; a pack changes sides when it is adopted or
given away. Jobs, the keeper's thread and a purge call this at the same time.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

from kvtier.base import OffloadKey
from kvtier.departed import Loss
from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.documents import write_document
from kvtier.tiering.fs.neighbours import (
    NO_CONTENTS,
    SLOT_BITS,
    SLOT_MASK,
    Difference,
    PackNamespace,
    SlotContent,
)
from kvtier.tiering.fs.open_packs import OpenPacks
from kvtier.tiering.fs.own_blocks import SlotPin, SlotReservation
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.pack_contents import Times, contents_of, in_order_of_use, take_over
from kvtier.tiering.fs.records import Change, Kind
from kvtier.tiering.fs.slot_table import SlotTable

logger = logging.getLogger(__name__)

MAX_GIVEN = 4
"""Packs given away last, which this process does not adopt: they are for the one that lacks room."""


class PackCatalog:
    """Packs and their blocks. Thread: any.

    Mutable are the namespace, whether its packs have been listed, and those to be closed. ``_changing`` is held while
    packs are made, adopted, given away, listed or forgotten, with I/O, because two such changes of one pack must not
    meet. Jobs take it where they lack slots or have met a block that left; the scheduler's thread never does.

    Args:
        tier: type of the tier, for the log.
        directory: where the packs are.
        table: the own slots.
        wall_clock: seconds since 1970.
        is_durable: whether what is reported outlives a loss of power.

    Attributes:
        packs: the open ones.
        is_indexed: whether what was there at the start is known.
    """

    def __init__(
        self,
        tier: str,
        directory: PackDirectory,
        table: SlotTable,
        wall_clock: Callable[[], float],
        *,
        is_durable: bool,
    ) -> None:
        self.tier = tier
        self.directory = directory
        self.table = table
        self.packs = OpenPacks()
        self._wall_clock = wall_clock
        self._is_durable = is_durable
        self._changing = threading.RLock()
        self._namespace: PackNamespace | None = None
        self._released: deque[tuple[int, Callable[[Pack], None]]] = deque()
        self._is_drawn = False  # whether this process has drawn the namespace's epoch: no other has it
        self._indexed = threading.Event()
        self.is_indexed = False
        self._is_missing = self._is_stopped = False
        self._given: deque[str] = deque(maxlen=MAX_GIVEN)

    # The namespace

    @property
    def namespace(self) -> PackNamespace:
        """The namespace of now."""
        assert self._namespace is not None, "a tier opens one before anything else"
        return self._namespace

    def wait_indexed(self, timeout_s: float) -> bool:
        """Block until what was there at the start is known; False when ``timeout_s`` passed first."""
        return self._indexed.wait(timeout_s)

    def open_namespace(self, namespace: PackNamespace, *, is_new: bool) -> None:
        """Go over to another namespace; the next ``poll`` lists its packs, and closes those of the one before.

        Args:
            namespace: the other one.
            is_new: whether its epoch has just been drawn, so that nothing can be there.

        Thread: the scheduler's, which waits for no disk.
        """
        before, self._namespace = self._namespace, namespace
        numbers = self.table.open_namespace(namespace)
        if before is not None:
            numbers += before.neighbours.clear()
        end = partial(Pack.close, is_first_to_go=self._is_drawn)
        self._released.extend((number, end) for number in numbers)
        self._is_drawn = is_new
        if is_new:
            self._note_indexed()
        else:
            self._forget_index()

    def _note_indexed(self) -> None:
        self.is_indexed = True
        self._indexed.set()

    def _forget_index(self) -> None:
        self.is_indexed = False
        self._indexed.clear()

    def is_held(self, namespace: PackNamespace, key: OffloadKey) -> bool:
        """Return whether a block is in any pack, as far as this process knows."""
        return self.table.is_held(namespace, key) or namespace.neighbours.find(key) is not None

    # What other processes do

    def poll(self, *, adopts: bool = False) -> None:
        """Learn what other processes have made, removed, stored and dropped since the last call.

        Args:
            adopts: whether new packs without an owner become own ones at once.
        """
        namespace = self.namespace
        with self._changing:
            self._close_released()
            if not self.is_indexed or self.directory.changed(namespace.name):
                known = {pack.name for pack in self._packs_of(namespace)}
                for name in sorted(self.directory.names(namespace.name) - known):
                    if self._is_stopped:
                        break
                    if not (adopts and self._adopt(namespace, name)):
                        self._open(namespace, name)
            for number in namespace.neighbours.numbers():
                pack = self.packs.get(number)
                if pack is not None:
                    self._forget(namespace, pack) if pack.is_lost() else self._tail(namespace, pack)
            if namespace is self._namespace:
                self._note_indexed()
            else:
                self._released.extend((number, Pack.close) for number in namespace.neighbours.clear())

    def stop(self) -> None:
        """Have a ``poll`` that lists packs end at its next one."""
        self._is_stopped = True

    def check_own(self) -> Pack | None:
        """Forget own packs that were removed, cut or overwritten; return one that another process writes as well."""
        namespace = self.namespace
        with self._changing:
            for number in self.table.own_packs():
                pack = self.packs.get(number)
                if pack is None:
                    continue
                if pack.is_lost() or pack.is_overwritten():
                    self._forget(namespace, pack)
                elif pack.has_other_owner():
                    return pack
        return None

    def forget_all(self) -> None:
        """Forget every pack: the directory is gone. The next ``poll`` lists what is there by then."""
        namespace = self.namespace
        with self._changing:
            for pack in self._packs_of(namespace):
                self._forget(namespace, pack, is_alone=False)
            self._forget_index()

    # Own packs

    def adopt_all(self) -> bool:
        """Become the owner of packs without one; return whether there were any."""
        namespace = self.namespace
        with self._changing:
            packs = [self.packs.get(number) for number in namespace.neighbours.numbers()]
            names = [pack.name for pack in packs if pack is not None and pack.name not in self._given]
            return bool([name for name in names if self._adopt(namespace, name)])

    def create(self, limit_bytes: int, *, may_remove: bool) -> bool:
        """Make an own pack; False where there is no room.

        Args:
            limit_bytes: what all packs below the directory may take.
            may_remove: whether packs without an owner may go for it, those unused for longest first.

        Raises:
            OSError: the system refused.
        """
        namespace = self.namespace
        with self._changing:
            self._close_released()
            write_document(self.directory, namespace.identity)
            pack = self.directory.create(namespace.name, limit_bytes, may_remove=may_remove)
            if pack is None:
                return False
            self.packs.add(pack)
            if not self.table.add_pack(namespace, pack.number, pack.geometry.num_slots, NO_CONTENTS):
                self.packs.retire(pack.number, Pack.close)
            return True

    def give(self, number: int, *, is_first_to_go: bool) -> None:
        """Give an own pack up. Its blocks stay readable, for this process too.

        Args:
            number: the pack's.
            is_first_to_go: whether it is the first that is removed where room is needed.
        """
        namespace = self.namespace
        with self._changing:
            pack = self.packs.get(number)
            used_s = self.table.used_times(number)
            if pack is None or used_s is None:
                return
            self._given.append(pack.name)
            blocks = self.table.remove_pack(number) or []
            reader = self.directory.open(namespace.name, pack.name)
            if reader is None:
                self.table.report_gone([block.key for block in blocks if block.key is not None], Loss.REMOVED)
            else:
                self._add_reader(namespace, reader, blocks)
            end = partial(self._release, used_s=used_s, is_first_to_go=is_first_to_go)
            self.packs.retire(number, end)

    # Journals

    def drop_slots(self, reservation: SlotReservation, *, erases: bool = False) -> Collection[int]:
        """Have the journals say that slots hold nothing; return the addresses for which that failed.

        Args:
            reservation: the slots to drop, which are free afterwards unless they are pinned.
            erases: whether the bytes go, too.
        """
        failed: list[int] = []
        if reservation.drops:
            with self.packs.use({address >> SLOT_BITS for address in reservation.drops}) as packs:
                for number, addresses in _by_pack(reservation.drops):
                    slots = [address & SLOT_MASK for address in addresses]
                    if number in packs and not self._drop_in(packs[number], slots, erases=erases):
                        failed += addresses
            self.table.complete_drops(reservation, failed)
        return failed

    def record(
        self, namespace: PackNamespace, packs: Mapping[int, Pack], pins: Sequence[SlotPin]
    ) -> set[OffloadKey]:
        """Have the journals say which blocks were written; return those for which they do.

        Args:
            namespace: of the blocks.
            packs: those of the pins, in use.
            pins: slots that were written.
        """
        recorded: set[OffloadKey] = set()
        now_s = int(self._wall_clock())
        key_of = {pin.address: pin.key for pin in pins}
        for number, addresses in _by_pack(key_of):
            pack, name = packs[number], namespace.format.name
            changes = [
                Change(Kind.STORED, address & SLOT_MASK, name(key_of[address]), now_s, now_s)
                for address in addresses
            ]
            if self._append(pack, changes):
                recorded.update(map(key_of.__getitem__, addresses))
        return recorded

    # Reads of other packs

    def has_left(self, namespace: PackNamespace, key: OffloadKey, address: int) -> bool:
        """Return whether a block that was not read is not there any more, as its pack's journal says by now."""
        pack = self.packs.get(address >> SLOT_BITS)
        if pack is not None and not pack.is_lost():
            with self._changing:
                self._tail(namespace, pack)
        elif pack is not None:
            with self._changing:
                self._forget(namespace, pack)
        return namespace.neighbours.key_at(address) != key

    def note_missing(self) -> None:
        """Note that a block is missing. Thread: the scheduler's."""
        self._is_missing = True

    def take_missing(self) -> bool:
        """Return whether any block was missing since the last call."""
        is_missing, self._is_missing = self._is_missing, False
        return is_missing

    def describe(self, address: int) -> str:
        """Return a slot in words."""
        pack = self.packs.get(address >> SLOT_BITS)
        return f"slot {address & SLOT_MASK} of {'a pack that is gone' if pack is None else pack.path}"

    def stats(self) -> dict[str, float]:
        """Return how many packs and blocks there are."""
        neighbours = self.namespace.neighbours
        counts = self.table.stats()
        counts["neighbour_packs"] = len(neighbours.numbers())
        counts["indexed_blocks"] = counts["own_blocks"] + len(neighbours)
        return counts

    def close(self) -> None:
        """Write the order of use into the journals, and close the packs for others to adopt."""
        namespace = self.namespace
        with self._changing:
            for number in self.table.own_packs():
                used_s = self.table.used_times(number)
                self.table.remove_pack(number)
                end = partial(Pack.close, is_first_to_go=self._is_drawn)
                if used_s is not None:
                    end = partial(self._release, used_s=used_s, is_first_to_go=self._is_drawn)
                self.packs.retire(number, end)
            self._released.extend((number, Pack.close) for number in namespace.neighbours.clear())
            self._close_released()

    # Below, ``_changing`` is held.

    def _packs_of(self, namespace: PackNamespace) -> list[Pack]:
        numbers = {*self.table.own_packs(), *namespace.neighbours.numbers()}
        return [pack for pack in self.packs.all() if pack.number in numbers]

    def _close_released(self) -> None:
        while self._released:
            self.packs.retire(*self._released.popleft())

    def _open(self, namespace: PackNamespace, name: str) -> None:
        pack = self.directory.open(namespace.name, name)
        if pack is not None:
            self._add_reader(namespace, pack)

    def _add_reader(self, namespace: PackNamespace, pack: Pack, blocks: Sequence[SlotContent] = ()) -> None:
        self.packs.add(pack)
        namespace.neighbours.add_pack(pack.number, pack.geometry.num_slots)
        self._note(namespace, namespace.neighbours.apply(pack.number, blocks))
        self._tail(namespace, pack)

    def _tail(self, namespace: PackNamespace, pack: Pack) -> None:
        try:
            is_new, records = pack.journal.tail()
        except OSError:
            self._forget(namespace, pack)
            return
        if is_new or len(records):
            contents = list(contents_of(records, namespace))
            self._note(namespace, namespace.neighbours.apply(pack.number, contents, is_all=is_new))

    def _note(self, namespace: PackNamespace, difference: Difference, loss: Loss = Loss.EVICTED) -> None:
        if namespace is self._namespace and (difference.added or difference.removed):
            self.table.count_neighbours(*difference, loss)

    def _forget(self, namespace: PackNamespace, pack: Pack, *, is_alone: bool = True) -> None:
        """Forget a pack that is not there any more; the log names one that is gone alone."""
        blocks = self.table.remove_pack(pack.number)
        if blocks is None:
            _, difference = namespace.neighbours.remove_pack(pack.number)
            # A single pack of others may have made room for another one.
            self._note(namespace, difference, Loss.EVICTED if is_alone else Loss.REMOVED)
        else:
            if is_alone:
                logger.warning(
                    "tier %s: %s was removed: its %d blocks are misses", self.tier, pack.path, len(blocks)
                )
            self.table.report_gone([block.key for block in blocks if block.key is not None], Loss.REMOVED)
        self.packs.retire(pack.number, Pack.close)

    def _adopt(self, namespace: PackNamespace, name: str) -> bool:
        """Become the owner of a pack; False where it has one, is gone or is damaged."""
        pack = self.directory.adopt(namespace.name, name)
        if pack is None:
            return False
        try:
            contents = take_over(namespace, pack)
        except OSError as error:
            logger.warning("tier %s: %s cannot be adopted: %s", self.tier, pack.path, error)
            pack.close()
            return False
        self.packs.add(pack)
        if not self.table.add_pack(namespace, pack.number, pack.geometry.num_slots, contents):
            self.packs.retire(pack.number, Pack.close)
        for other in self.packs.all():
            if other.name == name and other.number != pack.number:
                _, difference = namespace.neighbours.remove_pack(other.number)
                self._note(namespace, difference)
                self.packs.retire(other.number, Pack.close)
        return True

    def _drop_in(self, pack: Pack, slots: Sequence[int], *, erases: bool) -> bool:
        if not self._append(pack, [Change(Kind.DROPPED, slot, b"") for slot in slots]):
            return False
        if erases:
            with suppress(OSError):
                pack.punch(slots)
        return True

    def _append(self, pack: Pack, changes: Sequence[Change]) -> bool:
        """Append to a journal; durable where that is asked for, data and records in either order."""
        try:
            # Before it: a journal at its limit takes no more, and records that are written stand whatever fails then.
            used_s = self.table.used_times(pack.number) if pack.journal.is_long else None
            if used_s is not None:
                with suppress(OSError):  # a full disk: there may be room for these records yet
                    self._compact(pack, used_s)
            pack.journal.append(changes)
            if self._is_durable:
                pack.sync()
                pack.journal.sync()
        except OSError as error:
            logger.warning("tier %s: the journal of %s was not written: %s", self.tier, pack.path, error)
            return False
        return True

    def _compact(self, pack: Pack, used_s: Times) -> None:
        """Write a journal again: what its slots hold, used longest ago first.

        It is made of the journal itself, not of the table: what another job has recorded and not completed stays.
        """
        pack.journal.rewrite(partial(in_order_of_use, used_s=used_s), is_durable=self._is_durable)

    def _release(self, pack: Pack, *, used_s: Times, is_first_to_go: bool = False) -> None:
        with suppress(OSError):
            if not pack.is_lost():
                self._compact(pack, used_s)
        pack.close(is_first_to_go=is_first_to_go)


def _by_pack(addresses: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
    for number, group in groupby(sorted(addresses), key=lambda address: address >> SLOT_BITS):
        yield number, list(group)
