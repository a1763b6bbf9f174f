"""Memory for the envelopes of blocks on their way: the rows have no room for them.

A value in the store is an envelope followed by a row. The client gathers both from, and scatters them to, two places
in one transfer, so a value has its envelope or does not exist. Each call borrows a strip of places and gives it back.
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
    """Places for the envelopes of one call.

    Attributes:
        memory: the places one after another, format 'B'.
        address: where the first one is.
    """

    memory: memoryview
    address: int

    def place(self, number: int) -> memoryview:
        """Return the bytes of place ``number``, writable."""
        return self.memory[number * ENVELOPE_BYTES : (number + 1) * ENVELOPE_BYTES]

    def address_of(self, number: int) -> int:
        """Return the address of place ``number``."""
        return self.address + number * ENVELOPE_BYTES


class HeaderPool:
    """Strips for as many calls as there are threads.

    Args:
        num_strips: calls at the same time; a further one waits.
        places_per_strip: blocks in a call.
    """

    def __init__(self, num_strips: int, places_per_strip: int) -> None:
        strip_bytes = places_per_strip * ENVELOPE_BYTES
        self.memory = memoryview(mmap.mmap(-1, num_strips * strip_bytes))
        self.address = address_of(self.memory)
        self._free: queue.SimpleQueue[HeaderSlots] = queue.SimpleQueue()
        for begin in range(0, len(self.memory), strip_bytes):
            self._free.put(HeaderSlots(self.memory[begin : begin + strip_bytes], self.address + begin))

    @contextmanager
    def borrow(self) -> Iterator[HeaderSlots]:
        """Lend a strip; waits for one when all are lent. Thread: any."""
        strip = self._free.get()
        try:
            yield strip
        finally:
            self._free.put(strip)


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of ``memory``. Pure."""
    return int(np.asarray(memory).ctypes.data)
