"""Stores and loads blocks of the primary tier in files, and keeps index and counts true.

It decides nothing about when; threads of the tier call it with some blocks of a job. A block that cannot be
stored or loaded costs itself only, and is counted with its reason.
"""

import os
from collections.abc import Callable, Sequence

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.block_store import BlockStore, Rows
from kvtier.tiering.failures import FAULTS
from kvtier.tiering.fs.block_reader import BlockReader
from kvtier.tiering.fs.block_writer import NO_PLACE, BlockWriter
from kvtier.tiering.fs.directory import Directory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.layout import namespace_path
from kvtier.tiering.fs.room import StoreOutcome
from kvtier.tiering.fs.space import Space
from kvtier.tiering.fs.spares import Spares
from kvtier.tiering.io_pool import Moved

CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the evicting thread is waited for. It touches no row: nothing depends on its end."""

ARRIVED = (StoreOutcome.WRITTEN, StoreOutcome.EXISTED)


class FSBlockStore(BlockStore[Space]):
    """Stores and loads some blocks at a time in files; keeps no state of its own.

    Args:
        directory: where to.
        rows: the primary's.
        evictor: makes room.
        spares: files of evicted blocks, to be written over.
        max_keys: blocks of a namespace that are kept in mind.
        tells_evicted: whether anybody will ask what was evicted.
    """

    def __init__(
        self,
        directory: Directory,
        rows: Rows,
        evictor: Evictor,
        spares: Spares,
        max_keys: int,
        tells_evicted: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._row_bytes = rows.row_bytes
        self._files = directory.files
        self._counters = directory.counters
        self._evictor = evictor
        self._writer = BlockWriter(directory, rows, evictor, spares)
        self._reader = BlockReader(directory, rows)
        self._max_keys = max_keys
        self._tells_evicted = tells_evicted

    def open_space(self, namespace: Namespace, *, is_new: bool) -> Space:
        """Return the namespace's folder and what is known to be in it; a new one needs no scan."""
        index = KeyIndex(self._max_keys, is_complete=is_new, tells_evicted=self._tells_evicted)
        return Space(namespace, namespace_path(self._directory.root, namespace.name), index)

    def store(self, space: Space, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Moved:
        """Write blocks; those that are on the disk now have arrived, held before or not.

        Thread: any of the pool's; blocks.
        """
        held = {key for key in keys if key in space.index and self._files.renew(space.block_path(key))}
        todo = [(key, slot) for key, slot in zip(keys, slots, strict=True) if key not in held]
        if not todo:
            return Moved(held)
        outcomes = self._writer.write(space, todo)
        arrived = [key for key, outcome in outcomes.items() if outcome in ARRIVED]
        space.index.add(arrived)
        reached = list(outcomes.values())
        num_written = reached.count(StoreOutcome.WRITTEN)
        num_failed = reached.count(StoreOutcome.FAILED)
        self._counters.add(
            stored_blocks=num_written,
            stored_bytes=num_written * self._row_bytes,
            declined=sum(outcome in NO_PLACE for outcome in reached),
            store_errors=num_failed,
        )
        return Moved([*held, *arrived], is_fault=num_failed > 0)

    def load(self, space: Space, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Moved:
        """Read blocks into slots; those whose bytes are there and right have arrived.

        Thread: any of the pool's; blocks.
        """
        failures = self._reader.read(space, keys, slots)
        arrived = [key for key in keys if key not in failures]
        for failure in failures.values():
            self._counters.add(**{failure.value: 1})
        self._counters.add(hits=len(arrived), loaded_bytes=len(arrived) * self._row_bytes)
        return Moved(arrived, is_fault=not FAULTS.isdisjoint(failures.values()))

    def find(self, space: Space, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return which of ``keys`` the disk has, and remember them. Thread: the lookup's; blocks."""
        # A tenth of what making a Path of each costs; what cannot be looked at cannot be loaded either.
        found = [key for key in keys if os.access(space.block_path(key), os.F_OK)]
        space.index.add(found)
        return found

    def stats(self) -> dict[str, float]:
        """Return counts of loads by outcome, of stores and of evictions."""
        return self._counters.snapshot()

    def close(self) -> None:
        """End the thread that evicts."""
        self._evictor.shutdown(CLOSE_TIMEOUT_S)
