"""Memory that the client moves bytes from and to.

A value in the store is a header followed by a row. The client gathers both from, and scatters them to, two pieces of
registered memory in one transfer, so a value has its header or does not exist. Rows are registered, and have no room
for headers: each call borrows header slots, and rows to encrypt into, and returns them.
"""

import ctypes
import mmap
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.tiering.kit.blobs import Lent
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES


class HeaderPool:
    """Header slots for as many calls as there are threads, each with room for an encrypted row.

    The rows stand behind all headers and are not touched where blocks are plain: then they cost addresses, and memory
    only with RDMA, which pins what is registered.

    Args:
        num_calls: calls at the same time; a further one waits.
        slots_per_call: blocks in a call.
        row_bytes: length of a row.

    Attributes:
        memory: all of it, to register.
    """

    def __init__(self, num_calls: int, slots_per_call: int, row_bytes: int) -> None:
        num_slots = num_calls * slots_per_call
        self.memory = allocate(num_slots * (ENVELOPE_BYTES + row_bytes))
        rows = self.memory[num_slots * ENVELOPE_BYTES :]
        headers = [
            self.memory[begin : begin + ENVELOPE_BYTES]
            for begin in range(0, num_slots * ENVELOPE_BYTES, ENVELOPE_BYTES)
        ]
        # Made here once, for plain blocks and for encrypted ones, and not for each block of each call.
        plain = [Lent(header, is_registered=True) for header in headers]
        encrypted = [
            Lent(header, rows[number * row_bytes : (number + 1) * row_bytes], is_registered=True)
            for number, header in enumerate(headers)
        ]
        self._free: queue.SimpleQueue[tuple[list[Lent], list[Lent]]] = queue.SimpleQueue()
        for begin in range(0, num_slots, slots_per_call):
            of_call = slice(begin, begin + slots_per_call)
            self._free.put((plain[of_call], encrypted[of_call]))

    @contextmanager
    def lend(self, num_blocks: int, *, has_scratch: bool) -> Iterator[Sequence[Lent]]:
        """Lend slots for the blocks of one call; waits when all are lent. Thread: any.

        Args:
            num_blocks: at most ``slots_per_call``.
            has_scratch: whether with room for encrypted rows.
        """
        slots = self._free.get()
        try:
            yield slots[has_scratch][:num_blocks]
        finally:
            self._free.put(slots)


def allocate(num_bytes: int) -> memoryview:
    """Return zeroed memory, at least a byte of it, format 'B'; it is given back with its last view."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of ``memory``, which is writable. Pure."""
    return _addressof(_from_buffer(memory)) if len(memory) else 0


_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer
