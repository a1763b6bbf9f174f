"""Reads the header of every slot, by several threads at once.

It changes no slot and judges no block. What takes the time is that the device answers one small read after another,
so many are on their way together. The threads are no executor's: those are waited for when the process ends, which a
disk that hangs would then keep alive.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvtier.tiering.aligned import allocate_page
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import Verdict, unpack
from kvtier.tiering.slab.headers import FoundBlock, Headers
from kvtier.tiering.slab.slab_file import SlabFile
from kvtier.tiering.slab.slot_header import oldest_unfinished

logger = logging.getLogger(__name__)

NUM_READERS = 16
"""Threads that read headers. Fewer leave a device idle that does many small reads at a time; more wait for the
interpreter, and keep it from everything else that starts up then."""

STRETCH_SLOTS = 16
"""Neighbouring slots that a thread reads before it takes the next ones. Fewer are taken all the time; more leave
threads without work at the end."""


class HeaderReader:
    """Reads the headers of a slab once.

    Mutable are the stretches to go and the errors of threads; taking from a deque and appending to it are atomic. What
    a thread finds is its own until it has ended.

    Args:
        file: the slab; nobody writes to it meanwhile.
        is_stopped: asked before each slot.
    """

    def __init__(self, file: SlabFile, is_stopped: Callable[[], bool]) -> None:
        self._file = file
        self._is_stopped = is_stopped
        self._num_slots = file.geometry.num_slots
        self._stretches = deque(range(0, self._num_slots, STRETCH_SLOTS))
        self._errors: deque[Exception] = deque()

    def read(self) -> Headers:
        """Return what the headers say, of fewer slots once the reading is stopped; its threads have ended then.

        Raises:
            Exception: whatever stopped one of the threads, but for slots that cannot be read.
        """
        num_threads = max(1, min(NUM_READERS, len(self._stretches)))
        parts = [Headers() for _ in range(num_threads)]
        threads = self._start_threads(parts[1:])
        self._read_stretches(parts[0])
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        headers = Headers()
        for part in parts:
            headers.add(part)
        return headers

    def _start_threads(self, parts: list[Headers]) -> list[threading.Thread]:
        """Start a thread for each of ``parts``; what cannot be started is work for the others."""
        threads = []
        for number, part in enumerate(parts):
            name = f"kvtier-slab-index-{number}"
            thread = threading.Thread(target=self._read_stretches, args=(part,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("tier slab: only %d threads read %s: %s", number + 1, self._file.path, error)
                break
            threads.append(thread)
        return threads

    def _read_stretches(self, headers: Headers) -> None:
        page = allocate_page()
        try:
            while (first := self._take_stretch()) is not None:
                for slot in range(first, min(first + STRETCH_SLOTS, self._num_slots)):
                    if self._is_stopped():
                        return
                    self._read_header(slot, page, headers)
        except Exception as error:  # noqa: BLE001  # thread top: raised where the threads are waited for
            self._errors.append(error)

    def _take_stretch(self) -> int | None:
        try:
            return self._stretches.popleft()
        except IndexError:
            return None

    def _read_header(self, slot: int, page: memoryview, headers: Headers) -> None:
        try:
            is_read = self._file.read_header(slot, page)
        except OSError as error:
            headers.unreadable.append((slot, error))
            return
        found = unpack(page) if is_read else Verdict.DAMAGED
        if found is Verdict.OTHER_VERSION:
            headers.unknown.append(slot)
        elif isinstance(found, Verdict) or found.stored_bytes != self._file.geometry.row_bytes:
            headers.free.append(slot)
        elif found.codec != RAW_NUMBER:
            headers.unknown.append(slot)
        else:
            headers.blocks.append(FoundBlock(found.generation, slot, found.namespace, found.key))
            headers.note(found.generation, oldest_unfinished(page))
