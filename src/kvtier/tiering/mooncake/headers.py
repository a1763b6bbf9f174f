"""Memory for the headers of blocks on their way, which rows have no room for, and for encrypted rows.

A value in the store is a header followed by a row. The client gathers both from, and scatters them to, two pieces of
memory in one transfer, so a value has its header or does not exist. Each call borrows header slots and returns them.
"""

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvtier.tiering.kit.envelope import ENVELOPE_BYTES


@dataclass(frozen=True, slots=True)
class HeaderSlots:
    """Room for the headers of one call.

    Attributes:
        memory: the slots one after another, format 'B'.
        address: of the first one.
        rows: room for as many encrypted rows; empty where blocks are plain.
        rows_address: of the first one.
    """

    memory: memoryview
    address: int
    rows: memoryview
    rows_address: int

    def slot(self, number: int) -> memoryview:
        """Return the bytes of slot ``number``, writable."""
        return self.memory[number * ENVELOPE_BYTES : (number + 1) * ENVELOPE_BYTES]

    def address_of(self, number: int) -> int:
        """Return the address of slot ``number``."""
        return self.address + number * ENVELOPE_BYTES

    def scratch_row(self, number: int) -> memoryview | None:
        """Return room for encrypted row ``number``; None where blocks are plain."""
        row_bytes = self._row_bytes
        return self.rows[number * row_bytes : (number + 1) * row_bytes] if row_bytes else None

    def address_of_row(self, number: int) -> int:
        """Return the address of encrypted row ``number``."""
        return self.rows_address + number * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return len(self.rows) * ENVELOPE_BYTES // len(self.memory)


class HeaderPool:
    """Header slots for as many calls as there are threads.

    Args:
        num_calls: calls at the same time; a further one waits.
        slots_per_call: blocks in a call.
        scratch_row_bytes: length of a row where blocks are encrypted; 0 where they are plain.
    """

    def __init__(self, num_calls: int, slots_per_call: int, scratch_row_bytes: int = 0) -> None:
        call_bytes = slots_per_call * ENVELOPE_BYTES
        rows_bytes = slots_per_call * scratch_row_bytes
        headers_bytes = num_calls * call_bytes
        self.memory = memoryview(mmap.mmap(-1, headers_bytes + num_calls * rows_bytes))
        self.address = address_of(self.memory)
        self._free: queue.SimpleQueue[HeaderSlots] = queue.SimpleQueue()
        for number in range(num_calls):
            begin, rows_begin = number * call_bytes, headers_bytes + number * rows_bytes
            self._free.put(
                HeaderSlots(
                    self.memory[begin : begin + call_bytes],
                    self.address + begin,
                    self.memory[rows_begin : rows_begin + rows_bytes],
                    self.address + rows_begin,
                )
            )

    @contextmanager
    def borrow(self) -> Iterator[HeaderSlots]:
        """Lend header slots; waits when all are lent. Thread: any."""
        header_slots = self._free.get()
        try:
            yield header_slots
        finally:
            self._free.put(header_slots)


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of ``memory``. Pure."""
    return int(np.asarray(memory).ctypes.data)
