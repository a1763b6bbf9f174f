"""The removal of single blocks from packs by a process without an engine.

A pack without an owner is adopted until its blocks are dropped. The owner of any other is asked by a request, which it
carries out within a second or two, and names in its notes. An owner that does not answer keeps its packs, unless they
are to go by force: then they are cut, and it finds them gone when it goes on.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from kvtier.errors import TierError
from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.documents import NAMES_BESIDE
from kvtier.tiering.fs.notes import NotesState, OthersNotes
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.pack_files import NAMESPACE_NAME
from kvtier.tiering.fs.pack_view import PackReader, PackView, by_pack, stamp_of
from kvtier.tiering.fs.purge_requests import (
    ACKNOWLEDGE_S,
    MAX_BLOCKS,
    NamedBlock,
    PurgeRequest,
    drop_request,
    make_request,
    write_request,
)
from kvtier.tiering.fs.records import Change, Kind, Records, last_of_each
from kvtier.tiering.kit.place import NOTHING, Amount, PlaceBlock

MAX_ATTEMPTS = 3
"""Tries to remove a block whose pack gets another owner meanwhile. More would go on for ever."""

POLL_S = 0.1
"""Seconds between two looks whether an owner has answered."""


class BlockRemoval:
    """Removes blocks. Mutable is the pack that is adopted just now, and whether it was changed; one thread.

    Args:
        tier: type of the tier, for messages.
        directory: where the packs are.
        reader: opens packs of others.
        notes: what living engines say.
        clock: seconds, monotonic.
        pause: waits so many seconds.
    """

    def __init__(
        self,
        tier: str,
        directory: PackDirectory,
        reader: PackReader,
        notes: OthersNotes,
        clock: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self._tier = tier
        self._directory = directory
        self._reader = reader
        self._notes = notes
        self._clock = clock
        self._pause = pause
        self._own: PackView | None = None
        self._is_changed = False

    def remove(
        self, blocks: Sequence[PlaceBlock], *, unless_changed: bool, is_forced: bool = False
    ) -> Amount:
        """Remove blocks; return how many and how much.

        Args:
            blocks: as they were listed.
            unless_changed: leave those that were used or replaced since then.
            is_forced: whether packs whose owner does not answer go as a whole, with whatever they hold.

        Raises:
            TierError: an owner does not answer.
            OSError: the system refused.
        """
        removed, left = NOTHING, list(blocks)
        for _ in range(MAX_ATTEMPTS):
            owned: list[PlaceBlock] = []
            for group in by_pack(left):
                view = self._adopt(group[0])
                if view is None:
                    owned += group
                else:
                    removed = removed.plus(*self._drop(view, group, unless_changed=unless_changed))
            left = []
            for start in range(0, len(owned), MAX_BLOCKS):
                batch = owned[start : start + MAX_BLOCKS]
                gone, unanswered = self._ask_owners(batch, unless_changed=unless_changed, is_forced=is_forced)
                removed = removed.plus(*gone)
                left += unanswered
            if not left:
                return removed
        raise TierError(
            self._tier, f"no engine that lives owns {left[0].address}, and it is locked: purge again"
        )

    def remove_namespace(self, name: str) -> None:
        """Remove the folder of a namespace and its packs, unless there are packs with an owner or with blocks.

        Raises:
            OSError: the system refused.
        """
        self.close()
        assert NAMESPACE_NAME.fullmatch(name), "a namespace has a name of 32 hex digits"
        for pack_name in sorted(self._directory.names(name)):
            pack = self._directory.adopt(name, pack_name, has_own_rows=False)
            if pack is None:
                continue
            # Of a pack without a journal an engine would find the blocks again: nothing is to stay.
            if pack.journal.is_lost or not PackView(pack).count():
                self._directory.remove(pack)
            else:
                _give_back(pack)
        with suppress(FileNotFoundError):
            self._directory.remove_folder(name, NAMES_BESIDE)

    def close(self) -> None:
        """Give back the pack that is adopted; idempotent.

        Raises:
            OSError: what was removed may be there again after a loss of power.
        """
        own, is_changed = self._own, self._is_changed
        self._own, self._is_changed = None, False
        if own is not None:
            try:
                if is_changed:
                    own.pack.journal.sync()
                    own.pack.sync()
            finally:
                _give_back(own.pack)

    def _adopt(self, block: PlaceBlock) -> PackView | None:
        """Own the pack of a block until another one is adopted; None where it is gone or has an owner."""
        name = stamp_of(block).pack_name
        if self._own is None or self._own.pack.path != self._directory.folder_of(block.namespace) / name:
            self.close()
            pack = self._directory.adopt(block.namespace, name, has_own_rows=False)
            self._own = None if pack is None else PackView(pack)
        return self._own

    def _drop(self, view: PackView, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        """Drop blocks in an own pack, which goes as well when it holds no others."""
        pack, gone = view.pack, view.held(blocks, unless_changed=unless_changed)
        slots = [stamp_of(block).slot for block in gone]
        if len(slots) == view.count():
            self._own, self._is_changed = None, False
            self._directory.remove(pack)
        elif slots:
            if pack.journal.is_lost:
                pack.journal.append(view.stored())  # the others would not be found any more
                pack.journal.is_lost = False
            if pack.journal.is_long:
                pack.journal.rewrite(_held_in, is_durable=True)
            pack.journal.append([Change(Kind.DROPPED, slot, b"") for slot in slots])
            pack.punch(slots)
            view.refresh()
            self._is_changed = True
        return _amount_of(gone)

    def _ask_owners(
        self, blocks: Sequence[PlaceBlock], *, unless_changed: bool, is_forced: bool
    ) -> tuple[Amount, list[PlaceBlock]]:
        """Have engines drop blocks in their packs; by force packs are cut whose engines do not.

        Returns:
            What is gone by now, and the blocks that are there and whose packs have no living owner.
        """
        asked: list[tuple[PlaceBlock, str | None]] = []
        named: list[NamedBlock] = []
        for pack, held in self._reader.held(blocks, unless_changed=unless_changed):
            owner, pack_id = pack.read_owner(), pack.header.pack_id.hex()
            for block in held:
                stamp = stamp_of(block)
                used_s = stamp.used_s if unless_changed else None
                asked.append((block, owner))
                named.append(NamedBlock(pack_id, stamp.slot, (block.name or b"").hex(), used_s))
        if not named:
            return NOTHING, []
        owners = {owner for _, owner in asked}
        answered, silent = self._await_answers(make_request(None, None, named), owners)
        cut = NOTHING
        if silent:
            of_silent = by_pack([block for block, owner in asked if owner in silent])
            if not is_forced:
                raise TierError(self._tier, self._describe_silent(of_silent, silent.values()))
            cut = self._cut(of_silent, silent)
            asked = [(block, owner) for block, owner in asked if owner not in silent]
        listed = [block for block, _ in asked]
        left = {block for _, held in self._reader.held(listed, unless_changed=False) for block in held}
        gone = _amount_of([block for block in listed if block not in left])
        return gone.plus(*cut), [block for block, owner in asked if block in left and owner not in answered]

    def _cut(self, packs: Sequence[Sequence[PlaceBlock]], owners: Collection[str]) -> Amount:
        """Remove whole packs, each given by blocks that it holds, unless they have other owners by now."""
        removed = NOTHING
        for blocks in packs:
            view = self._reader.find(blocks[0])
            if view is not None and view.pack.read_owner() in owners:
                view.refresh()
                num, slot_bytes = view.count(), view.pack.geometry.slot_bytes
                self._directory.remove(view.pack)
                removed = removed.plus(num, num * slot_bytes)
        return removed

    def _describe_silent(self, packs: Sequence[Sequence[PlaceBlock]], owners: Collection[NotesState]) -> str:
        """Return which engines did not answer, and what to do."""
        first, more = packs[0][0], f" and {len(packs) - 1} more" if len(packs) > 1 else ""
        path = self._directory.folder_of(first.namespace) / stamp_of(first).pack_name
        return (
            f"{', '.join(sorted(map(describe_process, owners)))} did not answer in {ACKNOWLEDGE_S:.0f} s: an engine "
            f"alone empties the slots of its packs, here {path}{more}. Try again, or end it before, or have kvtier "
            "purge --force remove such packs with all that they hold"
        )

    def _await_answers(
        self, request: PurgeRequest, owners: Collection[str | None]
    ) -> tuple[Collection[str], Mapping[str, NotesState]]:
        """Wait until the owners that live have carried out a request; return which have, and which have not.

        Raises:
            OSError: the request cannot be written.
        """
        root, file_mode = self._directory.root, self._directory.file_mode
        write_request(root, request, file_mode)
        end_s = self._clock() + ACKNOWLEDGE_S
        try:
            while True:
                living = {one.process: one.state for one in self._notes.poll() if one.process in owners}
                waiting = {name: state for name, state in living.items() if request.id not in state.purges}
                if not waiting or self._clock() >= end_s:
                    return living.keys() - waiting.keys(), waiting
                self._pause(POLL_S)
        finally:
            with suppress(OSError):
                drop_request(root, request.id, file_mode)


def describe_process(state: NotesState) -> str:
    """Return an engine's process in words. Pure but for the name of this host."""
    is_here = state.host == os.uname().nodename
    return f"process {state.pid}" + ("" if is_here else f" on another host ({state.host})")


def _amount_of(blocks: Collection[PlaceBlock]) -> Amount:
    return Amount(len(blocks), sum(block.num_bytes for block in blocks))


def _held_in(records: Records) -> Records:
    last = last_of_each(records)
    held: Records = last[last["kind"] == Kind.STORED]
    return held


def _give_back(pack: Pack) -> None:
    """Close an adopted pack; one that its last owner did not close is still looked through by the next one."""
    pack.close(unlock=pack.was_closed and pack.same_boot)
