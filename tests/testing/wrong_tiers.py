"""A suite over a tier that is right, and over tiers and servers each of which is wrong in one way."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from tests.testing.server_in_memory import (
    NUM_SMALL_BLOCKS,
    MemoryBlockStore,
    MemoryTier,
    ServerInMemory,
    name_of,
)

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.testing.server_tier_suite import ServerTierSuite
from kvtier.tiering.base import JobResult, TierFailure
from kvtier.tiering.kit.backend import Rows, rows_of
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, HeaderCheck
from kvtier.tiering.kit.io_pool import TransferOutcome

SHORT_GUARD_S = 0.3
"""Long enough for a tier in memory; a test that is to fail by its guard takes as long."""


class RightSuite(ServerTierSuite):
    """Over a tier that does everything right."""

    _Server: ClassVar[type[ServerInMemory]] = ServerInMemory
    _Store: ClassVar[type[MemoryBlockStore]] = MemoryBlockStore
    _Tier: ClassVar[type[MemoryTier]] = MemoryTier

    @pytest.fixture(autouse=True)
    def _start_servers(self) -> None:
        self.server = self._Server()
        self.small_server = self._Server(NUM_SMALL_BLOCKS)

    def get_server(self) -> ServerInMemory:
        return self.server

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> MemoryTier:
        return self._Tier(config, rows, self._Store(self.server, rows_of(rows)))

    def make_tier_on_small_server(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> MemoryTier:
        return self._Tier(config, rows, self._Store(self.small_server, rows_of(rows)))


class WrongSuite(RightSuite):
    """Over something wrong, which need not be waited for long."""

    hang_guard_s = SHORT_GUARD_S


class RepeatsFaults(WrongSuite):
    """Reports a job that failed a second time."""

    class _Tier(MemoryTier):
        def get_finished(self) -> Iterable[JobResult]:
            results = list(super().get_finished())
            return results + [result for result in results if not result.success]


class DropsFaults(WrongSuite):
    """Never reports a job that failed."""

    class _Tier(MemoryTier):
        def get_finished(self) -> Iterable[JobResult]:
            return [result for result in super().get_finished() if result.success]


class DropsWhatIsOpen(WrongSuite):
    """Forgets at shutdown what was open."""

    class _Tier(MemoryTier):
        def shutdown(self, timeout_s: float) -> bool:
            has_ended = super().shutdown(timeout_s)
            list(super().get_finished())
            return has_ended


class ClaimsSuccess(WrongSuite):
    """Says that a load has succeeded when nobody answered."""

    class _Store(MemoryBlockStore):
        def load(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            try:
                return super().load(namespace, keys, slots)
            except TierError:
                return TransferOutcome(keys)


class HidesFaults(WrongSuite):
    """Lets the circuit breaker know nothing."""

    class _Store(MemoryBlockStore):
        def load(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            try:
                return super().load(namespace, keys, slots)
            except TierError:
                return TransferOutcome(())


class StaysAway(WrongSuite):
    """Tries a server that failed once never again."""

    class _Store(MemoryBlockStore):
        has_failed = False

        def store(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            try:
                if not self.has_failed:
                    return super().store(namespace, keys, slots)
            except TierError:
                self.has_failed = True
            return TransferOutcome((), is_fault=True)


class WritesLate(WrongSuite):
    """Reports a load as failed whose bytes land when the server goes on."""

    class _Store(MemoryBlockStore):
        def load(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            try:
                return super().load(namespace, keys, slots)
            except TierError:
                self.server.late_answers.append(lambda: self._land_all(namespace, keys, slots))
                raise

        def _land_all(self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
            for key, slot in zip(keys, slots, strict=True):
                self.land(namespace, key, self.rows.row(slot))


class AsksInTheStep(WrongSuite):
    """Asks the server on the engine's own thread."""

    class _Tier(MemoryTier):
        def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
            self.server.is_awake.wait()
            return super().lookup(key, req_context)


class EndsWhenItLikes(WrongSuite):
    """Ignores how long a shutdown may take."""

    class _Tier(MemoryTier):
        def shutdown(self, timeout_s: float) -> bool:
            self.server.is_awake.wait()
            return super().shutdown(timeout_s)


class LoadsWhatDoesNotFit(WrongSuite):
    """Writes half a block where a whole one has no room, and serves that."""

    class _Store(MemoryBlockStore):
        def store(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            if self.server.has_room:
                return super().store(namespace, keys, slots)
            self.server.values.update({name_of(namespace, key): b"half" for key in keys})
            return TransferOutcome(keys)

        def land(self, namespace: Namespace, key: OffloadKey, row: memoryview) -> TierFailure | None:
            is_half = self.server.values.get(name_of(namespace, key)) == b"half"
            return None if is_half else super().land(namespace, key, row)


class DropsWhatDoesNotFit(WrongSuite):
    """Forgets old blocks for new ones, and does not count what it then misses."""

    class _Store(MemoryBlockStore):
        def store(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            while not self.server.has_room:
                self.server.values.pop(next(iter(self.server.values)))
            return super().store(namespace, keys, slots)

        def stats(self) -> dict[str, float]:
            return {}


class KnowsNoNamespace(WrongSuite):
    """Keeps blocks under their keys alone."""

    class _Store(MemoryBlockStore):
        def __init__(self, server: ServerInMemory, rows: Rows) -> None:
            super().__init__(server, rows)
            self.first_namespace: Namespace | None = None

        def open_namespace(self, identity: Namespace, *, is_new: bool) -> Namespace:
            self.first_namespace = self.first_namespace or identity
            return self.first_namespace


class SharesOneNamespace(WrongSuite):
    """Gives every engine the names and the digest of one."""

    class _Store(MemoryBlockStore):
        def open_namespace(self, identity: Namespace, *, is_new: bool) -> Namespace:
            return identity if is_new else Namespace("one for all", bytes(32))


class BelievesAnything(WrongSuite):
    """Checks no value."""

    class _Store(MemoryBlockStore):
        def judge(self, namespace: Namespace, key: OffloadKey, value: bytes, row: memoryview) -> HeaderCheck:
            header_check = super().judge(namespace, key, value, row)
            has_length = len(value) == ENVELOPE_BYTES + len(row)
            return HeaderCheck.OK if has_length else header_check


class HasNoChecksum(WrongSuite):
    """Believes every row under the right key and namespace."""

    class _Store(MemoryBlockStore):
        def judge(self, namespace: Namespace, key: OffloadKey, value: bytes, row: memoryview) -> HeaderCheck:
            header_check = super().judge(namespace, key, value, row)
            has_length = len(value) == ENVELOPE_BYTES + len(row)
            return HeaderCheck.OK if has_length and header_check is HeaderCheck.DAMAGED else header_check


class StaysInItsEpoch(WrongSuite):
    """Serves old blocks after a reset."""

    class _Tier(MemoryTier):
        def reset(self, epoch: bytes) -> None:
            """Do not."""


class CountsNothing(WrongSuite):
    """Says nothing of why a block did not come."""

    class _Store(MemoryBlockStore):
        def stats(self) -> dict[str, float]:
            return dict.fromkeys(super().stats(), 0.0)


class KeepsDamage(WrongSuite):
    """Leaves damaged values where they are, and writes over nothing."""

    class _Store(MemoryBlockStore):
        def store(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            new = [
                (k, s)
                for k, s in zip(keys, slots, strict=True)
                if k not in self.contains_batch(namespace, keys)
            ]
            super().store(namespace, [key for key, _ in new], [slot for _, slot in new])
            return TransferOutcome(keys)

        def remove(self, name: str) -> None:
            """Do not."""


class RemovesForeign(WrongSuite):
    """Removes whatever it cannot use."""

    class _Store(MemoryBlockStore):
        def land(self, namespace: Namespace, key: OffloadKey, row: memoryview) -> TierFailure | None:
            reason = super().land(namespace, key, row)
            if reason is not None:
                self.remove(name_of(namespace, key))
            return reason


class StripsZeros(WrongSuite):
    """Takes a row for a string that ends with its zeros."""

    class _Store(MemoryBlockStore):
        def land(self, namespace: Namespace, key: OffloadKey, row: memoryview) -> TierFailure | None:
            before = bytes(row)
            reason = super().land(namespace, key, row)
            kept = bytes(row).rstrip(b"\0")
            row[len(kept) :] = before[len(kept) :]
            return reason


class KeepsTheSlot(WrongSuite):
    """Writes from the slot again after the report."""

    class _Store(MemoryBlockStore):
        def __init__(self, server: ServerInMemory, rows: Rows) -> None:
            super().__init__(server, rows)
            self.slot_of: dict[OffloadKey, int] = {}

        def store(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            self.slot_of |= dict(zip(keys, slots, strict=True))
            return super().store(namespace, keys, slots)

        def load(
            self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
        ) -> TransferOutcome:
            known = [key for key in keys if key in self.slot_of]
            self.store(namespace, known, [self.slot_of[key] for key in known])
            return super().load(namespace, keys, slots)


class NobodyIsKilled(WrongSuite):
    """A server that survives."""

    class _Server(ServerInMemory):
        def kill(self) -> None:
            """Do not."""


class NobodyHangs(WrongSuite):
    """A server that goes on."""

    class _Server(ServerInMemory):
        def hang(self) -> None:
            """Do not."""


class NothingIsFull(WrongSuite):
    """A small server that is large."""

    class _Server(ServerInMemory):
        @property
        def has_room(self) -> bool:
            return True


class NobodyLooks(WrongSuite):
    """A server into which the suite cannot look."""

    class _Server(ServerInMemory):
        def read_value(self, config: OffloadingConfig, key: OffloadKey) -> bytes | None:
            return None
