"""A server that is a dictionary, and a tier on it that does everything right: what the suites are tried on."""

import threading
from collections.abc import Callable, Collection, Sequence

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.namespace import Namespace, make_namespace
from kvtier.testing.tier_server import TierServer
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows, rows_of
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAILURE_OF_CHECK,
    FAULTS,
    HeaderCheck,
    check_block,
    make_header,
)
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions

TIMEOUT_S = 0.02
NUM_SMALL_BLOCKS = 40


class ServerInMemory(TierServer):
    """Keeps values under names; forgets them when it is killed.

    Args:
        max_values: room; None for any number.
    """

    def __init__(self, max_values: int | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.max_values = max_values
        self.is_awake = threading.Event()
        self.is_awake.set()
        self.late_answers: list[Callable[[], None]] = []
        self._is_alive = True

    def start(self) -> None:
        self._is_alive = True

    def kill(self) -> None:
        self._is_alive = False
        self.values.clear()

    def hang(self) -> None:
        self.is_awake.clear()

    def wake(self) -> None:
        self.is_awake.set()
        for answer in self.late_answers:
            answer()
        self.late_answers.clear()

    def read_value(self, config: OffloadingConfig, key: OffloadKey) -> bytes | None:
        return self.values.get(name_of(_namespace_of(config), key))

    def write_value(self, config: OffloadingConfig, key: OffloadKey, value: bytes) -> None:
        self.values[name_of(_namespace_of(config), key)] = value

    @property
    def has_room(self) -> bool:
        """Whether it takes another value."""
        return self.max_values is None or len(self.values) < self.max_values

    def call(self) -> None:
        """Begin what a client asks for.

        Raises:
            TierError: it is away.
        """
        if not self.is_awake.wait(TIMEOUT_S):
            raise TierError("memory", "no answer in time")
        if not self._is_alive:
            raise TierError("memory", "connection refused")


class MemoryBlockStore(BlockStore[Namespace]):
    """Blocks in envelopes on such a server.

    Args:
        server: the server.
        rows: the primary's.
    """

    def __init__(self, server: ServerInMemory, rows: Rows) -> None:
        self.server = server
        self.rows = rows
        self.counters = Counters(*(reason.value for reason in TierFailure))

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> Namespace:
        return identity

    def contains_batch(self, namespace: Namespace, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        self.server.call()
        return [key for key in keys if name_of(namespace, key) in self.server.values]

    def store(
        self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        self.server.call()
        succeeded = []
        for key, slot in zip(keys, slots, strict=True):
            if self.server.has_room:
                row = bytes(self.rows.row(slot))
                self.server.values[name_of(namespace, key)] = make_header(key, namespace.digest, row) + row
                succeeded.append(key)
        return TransferOutcome(succeeded)

    def drop(self, namespace: Namespace, keys: Sequence[OffloadKey]) -> None:
        self.server.call()
        for key in keys:
            self.server.values.pop(name_of(namespace, key), None)

    def load(self, namespace: Namespace, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        self.server.call()
        reasons = [
            self.land(namespace, key, self.rows.row(slot)) for key, slot in zip(keys, slots, strict=True)
        ]
        for reason in filter(None, reasons):
            self.counters.add(**{reason.value: 1})
        succeeded = [key for key, reason in zip(keys, reasons, strict=True) if reason is None]
        return TransferOutcome(succeeded, is_fault=not FAULTS.isdisjoint(reasons))

    def land(self, namespace: Namespace, key: OffloadKey, row: memoryview) -> TierFailure | None:
        """Read a block into its row; return why it did not come, None when it did."""
        name = name_of(namespace, key)
        value = self.server.values.get(name)
        if value is None:
            return TierFailure.ABSENT
        header_check = self.judge(namespace, key, value, row)
        if header_check is HeaderCheck.OK:
            row[:] = value[ENVELOPE_BYTES:]
            return None
        reason = FAILURE_OF_CHECK[header_check]
        if reason is TierFailure.DAMAGED:
            self.remove(name)
        return reason

    def judge(self, namespace: Namespace, key: OffloadKey, value: bytes, row: memoryview) -> HeaderCheck:
        """Return whether a value is the block."""
        if len(value) != ENVELOPE_BYTES + len(row):
            return HeaderCheck.DAMAGED
        return check_block(value[:ENVELOPE_BYTES], value[ENVELOPE_BYTES:], key, namespace.digest)

    def remove(self, name: str) -> None:
        """Remove a damaged value."""
        self.server.values.pop(name, None)

    def check_reachable(self) -> None:
        self.server.call()

    def stats(self) -> dict[str, float]:
        return self.counters.snapshot()


class MemoryTier(ThreadedTier[Namespace]):
    """A tier on such a server.

    Args:
        config: the engine.
        rows: the primary's.
        block_store: the place.
    """

    def __init__(self, config: OffloadingConfig, rows: memoryview, block_store: MemoryBlockStore) -> None:
        self.server = block_store.server
        options = ThreadOptions(2, max_task_blocks=4, positive_ttl_s=2.0)
        super().__init__(config, rows, block_store=block_store, options=options)

    @staticmethod
    def get_tier_type() -> str:
        return "memory"


def build(config: OffloadingConfig, rows: memoryview, server: ServerInMemory) -> MemoryTier:
    """Return a tier that does everything right."""
    return MemoryTier(config, rows, MemoryBlockStore(server, rows_of(rows)))


def name_of(namespace: Namespace, key: OffloadKey) -> str:
    """Return the name under which a block is kept. Pure."""
    return f"{namespace.name}/{key.hex()}"


def _namespace_of(config: OffloadingConfig) -> Namespace:
    return make_namespace(config, config.groups[0].page_size_bytes)
