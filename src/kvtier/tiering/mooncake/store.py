"""Moves blocks between rows of the primary tier and values of the store, and removes damaged values.

A value that is leased to a reader cannot be removed: its name waits in ``DeferredDeletes`` and is neither looked up nor
stored until its removal succeeds.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows
from kvtier.tiering.kit.block_format import BlockFormat, format_of
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAILURE_OF_CHECK,
    FAULTS,
    HeaderCheck,
)
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.losses import BackendLosses
from kvtier.tiering.kit.purging import Batches
from kvtier.tiering.kit.siblings import SiblingNamespaces
from kvtier.tiering.mooncake.client import MooncakeClient, ScatterLists
from kvtier.tiering.mooncake.descriptions import (
    FIRST_PAUSE_S,
    Describer,
    DescriptionBuffer,
    MooncakeSiblings,
)
from kvtier.tiering.mooncake.errors import ABSENT, HELD, NO_ROOM, Code, is_known, name_of
from kvtier.tiering.mooncake.headers import HeaderPool, HeaderSlots, address_of
from kvtier.tiering.mooncake.native import TIER_TYPE
from kvtier.tiering.mooncake.place import remove_namespace


@dataclass(frozen=True, slots=True)
class MooncakeNamespace:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Attributes:
        identity: what makes its blocks its own: model, layout, epoch.
        is_new: whether a reset made it. Such a one is not described: nothing but its age tells it from that before.
        format: how they are written.
    """

    identity: Namespace
    is_new: bool = False
    format: BlockFormat = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_of(self.identity))

    def name_of(self, key: OffloadKey) -> str:
        """Return the name under which the store keeps the block of ``key``."""
        return f"{self.identity.name}/{self.format.name(key).hex()}"


RETRY_S = 6.0
"""Seconds until a removal is tried again: the store's leases last 5 unless its master says otherwise."""

MAX_NAMES = 4096
"""Names that wait. One that is dropped is found damaged again by the next load."""


class DeferredDeletes:
    """A bounded set of names, each with the time of its next removal.

    Mutable is the set. ``_lock`` guards it.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due_s: OrderedDict[str, float] = OrderedDict()

    def add(self, names: Iterable[str]) -> None:
        """Add ``names``; their next removal is due after a lease."""
        due_s = self._clock() + RETRY_S
        with self._lock:
            for name in names:
                self._due_s[name] = due_s
                self._due_s.move_to_end(name)
            while len(self._due_s) > MAX_NAMES:
                self._due_s.popitem(last=False)

    def discard(self, names: Iterable[str]) -> None:
        """Forget ``names``."""
        with self._lock:
            for name in names:
                self._due_s.pop(name, None)

    def among(self, names: Collection[str]) -> frozenset[str]:
        """Return which of ``names`` wait for their removal."""
        if not self._due_s:  # read without the lock: the usual case, and a late answer costs one lookup
            return frozenset()
        with self._lock:
            return frozenset(name for name in names if name in self._due_s)

    def take_due(self) -> list[str]:
        """Return the names whose removal is due; until the next try they are not due for other threads."""
        now_s = self._clock()
        with self._lock:
            due = [name for name, due_s in self._due_s.items() if due_s <= now_s]
            for name in due:
                self._due_s[name] = now_s + RETRY_S
        return due

    def __len__(self) -> int:
        return len(self._due_s)


logger = logging.getLogger(__name__)

REACHABILITY_NAME = "kvtier/reachable"
"""A name that is never stored: looking it up shows that the master answers."""

COUNTS = ("hits", "loaded_bytes", "stored_blocks", "stored_bytes", "declined", "store_errors")
MORE_COUNTS = (
    "absent",
    "damaged",
    "foreign",
    "io_error",
    "removed_damaged",
    "lookup_errors",
    "unknown_answers",
)


class MooncakeBlockStore(BlockStore[MooncakeNamespace]):
    """Stores and loads some blocks at a time.

    Args:
        client: the connection; the rows, the headers and the descriptions are registered with it.
        rows: the primary's.
        headers: room for envelopes.
        clock: seconds, monotonic.
        descriptions: room for one to write and one to read.
        where: the store, as commands take it.

    Attributes:
        losses: why blocks are gone.
        siblings: the other namespaces there.
    """

    def __init__(
        self,
        client: MooncakeClient,
        rows: Rows,
        headers: HeaderPool,
        clock: Callable[[], float],
        descriptions: tuple[DescriptionBuffer, DescriptionBuffer],
        where: str = "PLACE",
    ) -> None:
        self._describer = Describer(descriptions[0], client, clock)
        place = MooncakeSiblings(descriptions[1], client)
        self.siblings = SiblingNamespaces(TIER_TYPE, place, clock, FIRST_PAUSE_S, where=where)
        self.losses = BackendLosses("mooncake", clock)
        self._client = client
        self._rows = rows
        self._rows_address = address_of(rows.flat)
        self._headers = headers
        self._deferred_deletes = DeferredDeletes(clock)
        self._counters = Counters(*COUNTS, *MORE_COUNTS)
        self._value_bytes = ENVELOPE_BYTES + rows.row_bytes

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> MooncakeNamespace:
        return MooncakeNamespace(identity, is_new)

    def check_reachable(self) -> None:
        self._client.exist([REACHABILITY_NAME])

    def contains_batch(self, namespace: MooncakeNamespace, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        self._remove(self._deferred_deletes.take_due())
        names = {key: namespace.name_of(key) for key in keys}
        deferred = self._deferred_deletes.among(names.values())
        asked = [key for key in keys if names[key] not in deferred]
        if not asked:
            return []
        answers = self._client.exist([names[key] for key in asked])
        self._note_unknown(answers)
        self._counters.add(lookup_errors=sum(answer < 0 for answer in answers))
        held = [key for key, answer in zip(asked, answers, strict=True) if answer == 1]
        if len(held) < len(asked):
            there = frozenset(held)
            self.siblings.look_for(namespace.identity, [key for key in asked if key not in there])
        return held

    def store(
        self, namespace: MooncakeNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        todo = list(zip(keys, slots, [namespace.name_of(key) for key in keys], strict=True))
        if len(self._deferred_deletes):
            self._remove(self._deferred_deletes.among([name for _, _, name in todo]))
            deferred = self._deferred_deletes.among([name for _, _, name in todo])
            todo = [block for block in todo if block[2] not in deferred]
            self._counters.add(declined=len(keys) - len(todo))
        if not todo:
            return TransferOutcome(())
        block_format = namespace.format
        with self._headers.borrow() as header_slots:
            for number, (key, slot, _) in enumerate(todo):
                row, scratch = self._rows.row(slot), header_slots.scratch_row(number)
                header_slots.slot(number)[:] = block_format.seal(key, row, scratch).header
            scatter_lists = self._scatter_lists(
                header_slots, [slot for _, slot, _ in todo], is_scratch=block_format.is_encrypted
            )
            answers = self._client.put([name for _, _, name in todo], scatter_lists)
        outcome = self._count_stored([key for key, _, _ in todo], answers)
        if outcome.succeeded and not namespace.is_new:
            self._describer.describe(namespace.identity)
        return outcome

    def load(
        self, namespace: MooncakeNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        names = [namespace.name_of(key) for key in keys]
        with self._headers.borrow() as header_slots:
            answers = self._client.get(names, self._scatter_lists(header_slots, slots))
            failures = [
                self._check(namespace, key, header_slots.slot(number), self._rows.row(slot), answers[number])
                for number, (key, slot) in enumerate(zip(keys, slots, strict=True))
            ]
        self._note_unknown(answers)
        pairs = zip(answers, failures, strict=True)
        self._log_failed("loaded", Counter(answer for answer, why in pairs if why is TierFailure.IO_ERROR))
        damaged = [key for key, why in zip(keys, failures, strict=True) if why is TierFailure.DAMAGED]
        self.losses.on_damaged(damaged)
        foreign = [key for key, why in zip(keys, failures, strict=True) if why is TierFailure.FOREIGN]
        self.losses.on_foreign(foreign)
        to_remove = [namespace.name_of(key) for key in damaged]
        self._deferred_deletes.add(to_remove)
        self._remove(to_remove)
        return self._count_loaded(keys, failures)

    def remove_all(self, namespace_name: str, tenant: int | None = None) -> Batches:
        """Remove every value of a namespace; see ``remove_namespace``.

        Raises:
            TierError: the values of one tenant are to go.
        """
        if tenant is not None:
            raise TierError("mooncake", "this tier removes only whole namespaces: purge it without --tenant")
        return remove_namespace(self._client, namespace_name)

    def drop(self, namespace: MooncakeNamespace, keys: Sequence[OffloadKey]) -> None:
        names = [namespace.name_of(key) for key in keys]
        self._deferred_deletes.add(names)  # what is leased to a reader is removed later
        self._remove(names)

    def on_purged(self) -> None:
        self.losses.clear()

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot() | {"deferred_deletes": len(self._deferred_deletes)}

    def close(self) -> None:
        self._client.close()

    def _scatter_lists(
        self, header_slots: HeaderSlots, slots: Sequence[int], *, is_scratch: bool = False
    ) -> ScatterLists:
        begin, row_bytes = self._rows_address, self._rows.row_bytes
        addresses = [
            [
                header_slots.address_of(number),
                header_slots.address_of_row(number) if is_scratch else begin + slot * row_bytes,
            ]
            for number, slot in enumerate(slots)
        ]
        return ScatterLists(addresses, [[ENVELOPE_BYTES, row_bytes]] * len(slots))

    def _check(
        self, namespace: MooncakeNamespace, key: OffloadKey, header: memoryview, row: memoryview, answer: int
    ) -> TierFailure | None:
        """Say why a block did not come, or None when it is there and right."""
        # A value whose lease ran out during the transfer may have been overwritten meanwhile: its envelope knows.
        if answer not in (self._value_bytes, Code.LEASE_EXPIRED):
            return self._explain(namespace.name_of(key), answer)
        header_check = namespace.format.open(header, row, key, row)
        if header_check is HeaderCheck.OK:
            return None
        failure = FAILURE_OF_CHECK[header_check]
        name = namespace.name_of(key)
        logger.warning("tier mooncake: block %s is %s (%s)", name, failure.value, header_check.value)
        return failure if answer == self._value_bytes else TierFailure.IO_ERROR

    def _explain(self, name: str, answer: int) -> TierFailure:
        """Say why a value did not come."""
        if answer in ABSENT:
            return TierFailure.ABSENT
        # A value of another length is refused as a bad parameter when it is longer, as a failed transfer when it is
        # shorter; only its length tells it from a provider that is away.
        may_be_damaged = answer in (Code.INVALID_PARAMS, Code.TRANSFER_FAIL) or answer >= 0
        if may_be_damaged and self._has_other_length(name):
            logger.warning("tier mooncake: block %s is damaged (another length)", name)
            return TierFailure.DAMAGED
        return TierFailure.IO_ERROR

    def _has_other_length(self, name: str) -> bool:
        try:
            num_bytes = self._client.size(name)
        except TierError:
            return False
        return num_bytes >= 0 and num_bytes != self._value_bytes

    def _remove(self, names: Collection[str]) -> None:
        """Try to remove damaged values; what is leased to a reader stays for later."""
        asked = list(names)
        if not asked:
            return
        try:
            answers = self._client.remove(asked)
        except TierError as error:
            logger.warning("tier mooncake: %d damaged blocks are not removed yet: %s", len(asked), error)
            return
        gone = (Code.OK, Code.OBJECT_NOT_FOUND)
        self._deferred_deletes.discard(
            name for name, answer in zip(asked, answers, strict=True) if answer in gone
        )
        self._note_unknown(answers)
        self._counters.add(removed_damaged=answers.count(Code.OK))

    def _count_stored(self, keys: Sequence[OffloadKey], answers: Sequence[int]) -> TransferOutcome:
        succeeded = [key for key, answer in zip(keys, answers, strict=True) if answer in HELD]
        self.losses.on_stored(succeeded)
        if self.siblings.found:
            self.siblings.forget(succeeded)
        failed = Counter(answer for answer in answers if answer not in HELD and answer not in NO_ROOM)
        self._log_failed("stored", failed)
        self._note_unknown(answers)
        self._counters.add(
            stored_blocks=len(succeeded),
            stored_bytes=len(succeeded) * self._rows.row_bytes,
            declined=sum(answer in NO_ROOM for answer in answers),
            store_errors=failed.total(),
        )
        fine = HELD | NO_ROOM
        faults = [key for key, answer in zip(keys, answers, strict=True) if answer not in fine]
        return TransferOutcome(succeeded, is_fault=bool(faults), faults=faults)

    def _count_loaded(
        self, keys: Sequence[OffloadKey], failures: Sequence[TierFailure | None]
    ) -> TransferOutcome:
        succeeded = [key for key, failure in zip(keys, failures, strict=True) if failure is None]
        reasons = Counter(failure.value for failure in failures if failure is not None)
        self._counters.add(hits=len(succeeded), loaded_bytes=len(succeeded) * self._rows.row_bytes, **reasons)
        faults = [key for key, failure in zip(keys, failures, strict=True) if failure in FAULTS]
        return TransferOutcome(succeeded, is_fault=bool(faults), faults=faults)

    def _log_failed(self, verb: str, counts: Counter[int]) -> None:
        for answer, count in counts.items():
            logger.warning("tier mooncake: %d blocks were not %s: %s", count, verb, name_of(answer))

    def _note_unknown(self, answers: Sequence[int]) -> None:
        unknown = sum(answer < 0 and not is_known(answer) for answer in answers)
        if unknown:
            self._counters.add(unknown_answers=unknown)
