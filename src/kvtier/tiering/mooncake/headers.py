"""Memory for the headers of blocks on their way: the rows have no room for them.

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
    """

    memory: memoryview
    address: int

    def slot(self, number: int) -> memoryview:
        """Return the bytes of slot ``number``, writable."""
        return self.memory[number * ENVELOPE_BYTES : (number + 1) * ENVELOPE_BYTES]

    def address_of(self, number: int) -> int:
        """Return the address of slot ``number``."""
        return self.address + number * ENVELOPE_BYTES


class HeaderPool:
    """Header slots for as many calls as there are threads.

    Args:
        num_calls: calls at the same time; a further one waits.
        slots_per_call: blocks in a call.
    """

    def __init__(self, num_calls: int, slots_per_call: int) -> None:
        call_bytes = slots_per_call * ENVELOPE_BYTES
        self.memory = memoryview(mmap.mmap(-1, num_calls * call_bytes))
        self.address = address_of(self.memory)
        self._free: queue.SimpleQueue[HeaderSlots] = queue.SimpleQueue()
        for begin in range(0, len(self.memory), call_bytes):
            self._free.put(HeaderSlots(self.memory[begin : begin + call_bytes], self.address + begin))

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
