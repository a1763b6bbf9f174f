"""The thread that keeps up with the other processes of a tier's directory.

Ten times a second while the engine uses the tier, once a second otherwise, it reads what others have appended to their
journals. Once a second it looks whether the directory and its own packs are still there, answers what the notes of
others say (uses, damage, a lack of room), carries out purges that are asked for, drops blocks that are over, and
writes its own notes.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kvtier.base import OffloadKey
from kvtier.departed import Loss
from kvtier.errors import ConfigError, KVTierError, TierError
from kvtier.tiering.fs.catalog import PackCatalog
from kvtier.tiering.fs.documents import PackSiblings
from kvtier.tiering.fs.neighbours import SLOT_BITS, SLOT_MASK, PackNamespace, address_of
from kvtier.tiering.fs.notes import Neighbour, NotesState, OthersNotes, OwnNotes, WantNote
from kvtier.tiering.fs.own_blocks import SlotPin
from kvtier.tiering.fs.purge_requests import (
    ACKNOWLEDGE_S,
    NamedBlock,
    drop_request,
    make_request,
    read_requests,
    write_request,
)
from kvtier.tiering.fs.room import Room, Tail, Want, gives
from kvtier.tiering.kit.purging import Batches, Removed

logger = logging.getLogger(__name__)

TAIL_S = 0.1
"""Seconds between two looks into the journals of others while the engine is at work. Shorter finds their blocks sooner
and costs up to a millisecond each for hundreds of packs; longer lets more readers meet slots that are written over."""

KEEP_S = 1.0
"""Seconds between two rounds of everything else, and of looks into journals while the engine is idle."""

ACTIVE_S = 2.0
"""Seconds for which the engine counts as at work after it has used the tier."""

SIBLINGS_S = 60.0
"""Seconds for which what other namespaces hold is believed."""

MAX_AHEAD_SLOTS = 256
"""Slots that are dropped before they are needed where others read: more than are written in a tail interval and a load.
Fewer let others read slots that are being written; more keep fewer blocks."""

AHEAD_SHARE = 4
"""At most a quarter of a pack's slots are dropped ahead: a small tier would lose most of its blocks otherwise."""

MAX_UNSENT = 4096
"""Uses of others' blocks that wait to be written into the notes; older ones are lost, and cost a few hits at most."""

MAX_DAMAGED = 64
"""Damaged blocks of others that the notes name; each owner looks within a second or two."""

MAX_ANSWERED = 4096
"""Reports of damage and purges that are remembered as answered."""

USE_MARGIN_S = 2
"""A block counts as used since its record was written if it was used later by more than this. Less takes the end of its
store for a use; more removes blocks that were used seconds ago."""

WANT_S = 10.0
"""Seconds for which a lack of room that another process has noted is believed: one that goes on storing notes it again
each second. Longer gives packs to engines that do not store any more; shorter misses one whose thread was late."""

STOP_S = 30.0
"""Seconds for which the thread is waited for when the tier ends: it stops at its next pack."""

NEVER_S = float("-inf")
"""Of what has never been done."""


class Keeper:
    """Keeps a tier up with its directory.

    Mutable is what the notes of others said last, and why the tier cannot be used. ``tick`` is called by one thread,
    its own unless a test calls it; other methods by any thread, and hand values over in queues.

    Args:
        catalog: the packs.
        room: learns how much all packs may take.
        process: name of this tier in notes.
        capacity_bytes: the engine's own.
        siblings: looks for missing blocks in other namespaces.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        catalog: PackCatalog,
        room: Room,
        process: str,
        capacity_bytes: int,
        siblings: PackSiblings,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._directory = catalog.directory
        self._room = room
        self._process = process
        self._capacity_bytes = capacity_bytes
        self._siblings = siblings
        self._clock = clock
        self._wall_clock = wall_clock
        self._root_id = self._read_root_id()
        self._notes = OwnNotes(self._directory.root, process, file_mode=self._directory.file_mode)
        self._others = OthersNotes(self._directory.root, process, file_mode=self._directory.file_mode)
        self._living: list[Neighbour] = []
        self._uses: deque[int] = deque(maxlen=MAX_UNSENT)
        self._damaged: deque[tuple[str, int]] = deque(maxlen=MAX_DAMAGED)
        self._answered: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._granted: dict[str, float] = {}
        self._purged: OrderedDict[str, None] = OrderedDict()
        self._purged_s = float("-inf")
        self._next_keep_s = self._next_siblings_s = NEVER_S
        self._siblings_of_ns = 0
        self._used_s = clock()
        self._is_whole: Callable[[PackNamespace, SlotPin], bool] | None = None
        self._remove_own: Callable[[str, int | None], Batches] | None = None
        self._is_stopped = threading.Event()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._absence = ""
        self._is_refused = False

    def start(
        self,
        is_whole: Callable[[PackNamespace, SlotPin], bool],
        remove_own: Callable[[str, int | None], Batches],
        *,
        has_thread: bool,
    ) -> None:
        """Start the thread.

        Args:
            is_whole: reads an own block that a neighbour calls damaged.
            remove_own: removes own blocks for a purge that another process has asked for.
            has_thread: False: ``tick`` is called by the tier's owner.

        Raises:
            TierError: there is no thread for it.
        """
        self._is_whole, self._remove_own = is_whole, remove_own
        if not has_thread:
            return
        self._thread = threading.Thread(
            target=self._work, name=f"kvtier-{self._catalog.tier}-keeper", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            raise TierError(
                self._catalog.tier, f"no thread to read the journals of others: {error}"
            ) from error

    def wake(self) -> None:
        """Have the next ``tick`` now: the namespace is another."""
        self._used_s = self._clock()
        self._room.try_again()
        self._woken.set()

    def note_use(self) -> None:
        """Note that the engine uses the tier. Thread: any; costs an assignment."""
        self._used_s = self._clock()

    def require_there(self) -> None:
        """Return if the directory can be used.

        Raises:
            TierError: it cannot, and why.
        """
        if self._absence:
            raise TierError(self._catalog.tier, self._absence)

    def look_again(self) -> None:
        """Read what others have appended to their journals, if the directory can be used. Thread: any of the tier's."""
        if not self._absence:
            self._catalog.poll()

    def note_uses(self, namespace: PackNamespace, keys: Sequence[OffloadKey]) -> None:
        """Tell owners that their blocks were used, the first of ``keys`` most. Thread: the scheduler's."""
        neighbours = namespace.neighbours
        if len(neighbours):
            addresses = map(neighbours.find, reversed(keys))
            self._uses.extend(address for address in addresses if address is not None)

    def report_damaged(self, address: int) -> None:
        """Tell an owner that a block is not what its journal says."""
        pack = self._catalog.packs.get(address >> SLOT_BITS)
        if pack is not None:
            self._damaged.append((pack.header.pack_id.hex(), address & SLOT_MASK))

    def request_purge(self, namespace_name: str, tenant: int | None) -> Batches:
        """Have the owners of other packs remove blocks; ends when all living ones have, or in ACKNOWLEDGE_S.

        Raises:
            TierError: the request cannot be written, or an owner has not answered.
        """
        others = {one.process for one in self._living}
        if not others:
            return
        request = make_request(namespace_name, tenant)
        try:
            write_request(self._directory.root, request, self._directory.file_mode)
            end_s = self._clock() + ACKNOWLEDGE_S
            while waiting := self._not_done(request.id, others):
                if self._clock() > end_s:
                    names = ", ".join(sorted(waiting))
                    raise TierError(
                        self._catalog.tier, f"{names} did not answer in {ACKNOWLEDGE_S:.0f} s: purge again"
                    )
                self._is_stopped.wait(TAIL_S)
                yield Removed(0, [])
        except OSError as error:
            raise TierError(self._catalog.tier, f"the purge was not asked for: {error}") from error
        finally:
            with suppress(OSError):
                drop_request(self._directory.root, request.id, self._directory.file_mode)

    def stop(self) -> None:
        """End the thread and remove the notes."""
        self._is_stopped.set()
        self._catalog.stop()
        self._woken.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.warning(
                    "tier %s: the disk hangs: packs stay locked until this process ends", self._catalog.tier
                )
                return
        self._notes.close()
        self._others.close()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the notes, whose lock says that this process lives."""
        self._notes.close_in_child()

    def tick(self, *, is_due: bool = False) -> None:
        """Do what is due.

        Args:
            is_due: whether everything is.
        """
        now_s = self._clock()
        is_due = is_due or now_s >= self._next_keep_s
        if is_due:
            self._next_keep_s = now_s + KEEP_S
            self._check_root()
        if self._absence:
            return
        if is_due and not self._catalog.is_indexed:
            self._write_notes(self._catalog.namespace)  # a process that starts now must not take every pack
        if is_due or now_s - self._used_s < ACTIVE_S:
            self._catalog.poll(adopts=is_due and not self._catalog.is_indexed and self._is_alone())
        if is_due:
            self._keep()
        elif now_s - self._purged_s < ACTIVE_S and self._answer_purges(self._catalog.namespace):
            self._write_notes(self._catalog.namespace)  # a purge of many blocks asks again and again

    def _work(self) -> None:
        while not self._is_stopped.is_set():
            self._woken.clear()
            try:
                self.tick()
            except Exception:  # thread top: the engine goes on without news of others
                logger.exception("tier %s: a round of the keeper has failed", self._catalog.tier)
            is_active = self._clock() - self._used_s < ACTIVE_S
            self._woken.wait(TAIL_S if is_active else KEEP_S)

    def _keep(self) -> None:
        namespace = self._catalog.namespace
        self._living = self._others.poll()
        living = {one.process for one in self._living}
        self._granted = {process: since_s for process, since_s in self._granted.items() if process in living}
        states = [one.state for one in self._living]
        self._room.set_limit(state.capacity_bytes for state in states)
        num_others = sum(state.namespace == namespace.name for state in states)
        ahead_slots = min(MAX_AHEAD_SLOTS, self._directory.geometry.num_slots // AHEAD_SHARE)
        self._catalog.table.set_ahead(ahead_slots if num_others else 0)
        foreign = self._catalog.check_own()
        if foreign is not None:
            self._refuse_locks(str(foreign.path))
            return
        own_packs = self._own_packs()
        for one in self._living:
            for pack_id, slot in one.uses:
                if pack_id in own_packs:
                    self._catalog.table.touch_slots(own_packs[pack_id], (slot,))
            self._answer_damage(namespace, own_packs, one)
        self._give_room()
        self._answer_purges(namespace)
        self._catalog.drop_slots(self._catalog.table.take_overdue(1 + num_others))
        self._look_for_siblings(namespace)
        self._write_notes(namespace)
        self._others.remove_dead(self._directory.locked)

    def _is_alone(self) -> bool:
        """Return whether no other process uses this namespace: then every pack without an owner is this one's share."""
        self._living = self._others.poll()
        return all(one.state.namespace != self._catalog.namespace.name for one in self._living)

    def _own_packs(self) -> dict[bytes, int]:
        """Return the numbers of own packs by the beginning of their ids, as notes have it."""
        packs = (self._catalog.packs.get(number) for number in self._catalog.table.own_packs())
        return {pack.header.pack_id[:8]: pack.number for pack in packs if pack is not None}

    def _give_room(self) -> None:
        """Give a pack to another process that lacks room, if this one's oldest block is the oldest of all."""
        oldest = self._catalog.table.find_oldest()
        if oldest is None:
            return
        own = Tail(self._process, oldest[0])
        now_s = self._wall_clock()
        for one in self._living:
            noted = one.state.wants
            if (
                noted is None
                or now_s - noted.since_s > WANT_S
                or self._granted.get(one.process) == noted.since_s
            ):
                continue
            want = Want(noted.namespace, noted.since_s, noted.oldest_used_s)
            tails = [
                Tail(other.process, other.state.oldest_used_s)
                for other in self._living
                if other.state.oldest_used_s is not None
            ]
            if gives(own, tails, want, now_s):
                is_same = want.namespace == self._catalog.namespace.name
                self._catalog.give(oldest[1], is_first_to_go=not is_same)
                self._granted[one.process] = noted.since_s
                return

    def _answer_damage(self, namespace: PackNamespace, own_packs: dict[bytes, int], one: Neighbour) -> None:
        """Look at own blocks that a neighbour has not been able to use, and drop those that are damaged."""
        for pack_id, slot in one.state.damaged:
            report = one.process, pack_id, slot
            number = own_packs.get(bytes.fromhex(pack_id)[:8])
            if number is None or report in self._answered:
                continue
            self._answered[report] = None
            while len(self._answered) > MAX_ANSWERED:
                self._answered.popitem(last=False)
            pin = self._catalog.table.pin_slot(address_of(number, slot))
            if pin is not None:
                is_whole = self._is_whole is not None and self._is_whole(namespace, pin)
                self._catalog.table.complete_load((pin,), () if is_whole else (pin.key,))
        self._catalog.drop_slots(self._catalog.table.take_undropped(), erases=True)

    def _answer_purges(self, namespace: PackNamespace) -> bool:
        """Carry out the purges that are asked for; return whether there were any."""
        num_before = len(self._purged)
        for request in read_requests(self._directory.root, self._directory.file_mode):
            if request.id in self._purged:
                continue
            try:
                if request.blocks is not None:
                    self._remove_named(namespace, request.blocks)
                elif request.namespace in {None, namespace.name} and self._remove_own is not None:
                    for _ in self._remove_own(namespace.name, request.tenant):
                        pass
            except KVTierError as error:
                logger.warning("tier %s: a purge has failed: %s", self._catalog.tier, error)
                continue
            self._purged[request.id] = None
            self._purged_s = self._used_s = self._clock()
        is_new = len(self._purged) > num_before
        while len(self._purged) > MAX_ANSWERED:
            self._purged.popitem(last=False)
        return is_new

    def _remove_named(self, namespace: PackNamespace, blocks: Iterable[NamedBlock]) -> None:
        """Drop own slots that hold the blocks that a purge names, as far as those were not used meanwhile.

        Raises:
            TierError: a slot could not be dropped.
        """
        table, own_packs = self._catalog.table, self._own_packs()
        times = {number: table.used_times(number) for number in own_packs.values()}
        for pack_id, slot, name, listed_s in blocks:
            number = own_packs.get(bytes.fromhex(pack_id)[:8], 0)
            used_s = times.get(number)
            if used_s is None or slot >= len(used_s):
                continue
            if listed_s is not None and used_s[slot] > listed_s + USE_MARGIN_S:
                continue
            pin = table.pin_slot(address_of(number, slot))
            if pin is not None:
                is_named = namespace.format.name(pin.key).hex() == name
                table.complete_load((pin,), (pin.key,) if is_named else (), Loss.PURGED)
        if failed := self._catalog.drop_slots(table.take_undropped(), erases=True):
            raise TierError(self._catalog.tier, f"{len(failed)} slots could not be dropped: see the log")

    def _not_done(self, request_id: str, asked: set[str]) -> set[str]:
        """Return the processes that live and have not carried out a purge."""
        return {
            one.process for one in self._living if one.process in asked and request_id not in one.state.purges
        }

    def _look_for_siblings(self, namespace: PackNamespace) -> None:
        """Read what other namespaces hold, at the start, and while blocks are missing when there may be others."""
        is_missing = self._catalog.take_missing()
        if is_missing:
            self._used_s = self._clock()  # an engine that announces no request is at work, too
        try:
            changed_ns = self._directory.root.stat().st_mtime_ns
        except OSError:  # removed since the round began
            return
        is_out_of_date = self._clock() >= self._next_siblings_s or changed_ns != self._siblings_of_ns
        if self._next_siblings_s == NEVER_S or (is_missing and is_out_of_date):
            self._next_siblings_s, self._siblings_of_ns = self._clock() + SIBLINGS_S, changed_ns
            is_empty = not self._catalog.stats()["indexed_blocks"]
            self._siblings.refresh(namespace.identity, is_empty=is_empty)

    def _write_notes(self, namespace: PackNamespace) -> None:
        oldest, want = self._catalog.table.find_oldest(), self._room.want
        state = NotesState(
            namespace=namespace.name,
            capacity_bytes=self._capacity_bytes,
            oldest_used_s=None if oldest is None else oldest[0],
            wants=None if want is None else WantNote(*want),
            damaged=tuple(self._damaged),
            purges=tuple(self._purged),
        )
        try:
            self._notes.update(state)
            self._notes.add_uses(list(self._take_uses()))
        except OSError as error:
            logger.warning("tier %s: notes were not written: %s", self._catalog.tier, error)

    def _take_uses(self) -> Iterator[tuple[bytes, int]]:
        """Yield the blocks of others that were used, and touch the packs that they are in."""
        while self._uses:
            address = self._uses.popleft()
            pack = self._catalog.packs.get(address >> SLOT_BITS)
            if pack is not None:
                pack.touch()
                yield pack.header.pack_id[:8], address & SLOT_MASK

    def _read_root_id(self) -> tuple[int, int] | None:
        try:
            found = self._directory.root.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _check_root(self) -> None:
        """Forget everything when the directory was removed, replaced, unmounted or opened to others.

        It is made again where it may be, and used again when it is as it must be.
        """
        refusal = self._directory.find_refusal()
        is_same = self._read_root_id() == self._root_id is not None
        if self._is_refused or (not self._absence and refusal is None and is_same):
            return
        if not self._absence:
            self._catalog.forget_all()
        if refusal is not None:
            self._absence = refusal
            return
        try:
            self._directory.make_ready()
            self._notes.close()  # they are made again where the directory is by now
        except (OSError, ConfigError) as error:
            self._absence = f"{self._directory.root} cannot be used: {error}"
            return
        self._root_id = self._read_root_id()
        if not self._absence:
            logger.warning(
                "tier %s: %s was removed; it is used as it is now", self._catalog.tier, self._directory.root
            )
        self._absence = ""

    def _refuse_locks(self, path: str) -> None:
        """Stop using a directory whose locks do not exclude."""
        self._catalog.forget_all()
        self._absence = (
            f"another process writes {path} too: locks do not exclude on its file system. On a mount that hosts share, "
            f'use {{"type": "obj", "url": "file://{self._directory.root}"}}'
        )
        self._is_refused = True
        logger.error("tier %s: %s", self._catalog.tier, self._absence)
