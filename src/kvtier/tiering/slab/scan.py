"""What a slab holds at the start: the headers in front of its blocks, and a thread that reads all of them once.

Behind the header stands, in 8 bytes, the oldest generation whose write had not ended when this one began. The newest
header of a slab therefore says which slots a crash can have left half written: those of that generation and later
ones. The 8 bytes have no checksum: when they are wrong, too many slots are checked, or a torn one is found by the check
of each load instead.
"""

import logging
import mmap
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.kit.backend import allocate_page
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    HEADER_PAGE_BYTES,
    NAMESPACE_BYTES,
    RAW_CODEC,
    Buffer,
    HeaderCheck,
    check_block,
    unpack,
)
from kvtier.tiering.slab.documents import SlabSiblings
from kvtier.tiering.slab.expiry import NO_TIME, pack_time, unpack_time
from kvtier.tiering.slab.slab_file import SlabFile
from kvtier.tiering.slab.slot_table import Contents, SlabNamespace, SlotTable

logger = logging.getLogger(__name__)

NUM_READERS = 16
"""Threads that read headers. Fewer leave a device idle that does many small reads at a time; more wait for the
interpreter, and keep it from everything else that starts up then."""

STRETCH_SLOTS = 16
"""Neighbouring slots that a thread reads before it takes the next ones. Fewer are taken all the time; more leave
threads without work at the end."""

_OLDEST = struct.Struct("<Q")

TIME_OFFSET = ENVELOPE_BYTES + _OLDEST.size
"""Where the time of the store stands in a header page."""


class Indexer:
    """Scans a slab once, in the background.

    Mutable are two events and the thread; events guard themselves, and only the scheduler's thread starts and stops.

    Args:
        file: the slab; a new one holds nothing and is not scanned.
        slot_table: takes over what is found.

    Attributes:
        siblings: what else was found, of other namespaces.
    """

    def __init__(self, file: SlabFile, slot_table: SlotTable) -> None:
        self.siblings = SlabSiblings(file.path, file.geometry.slot_bytes)
        self._file = file
        self._slot_table = slot_table
        self._ended = threading.Event()
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if file.is_new:
            self._ended.set()

    def start(self, namespace: SlabNamespace) -> None:
        """Begin to look for the blocks of ``namespace``; a new slab has none."""
        if self._ended.is_set() or self._thread is not None:
            return
        self._thread = threading.Thread(
            target=self._work, args=(namespace,), name="kvtier-slab-index", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("tier slab: no thread to read %s, it is not used: %s", self._file.path, error)
            self._thread = None
            self._ended.set()

    @property
    def is_complete(self) -> bool:
        """Whether everything that can be found has been found."""
        return self._ended.is_set()

    def wait_complete(self, timeout_s: float) -> bool:
        """Block until the scan has ended; False when ``timeout_s`` passed first."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """End the scan before its time; does not wait. Lookups that wait for it go on."""
        self._is_stopped.set()
        self._ended.set()

    def join(self, timeout_s: float) -> bool:
        """Block until the thread has ended; False when ``timeout_s`` passed first."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self, namespace: SlabNamespace) -> None:
        try:
            contents = scan(self._file, namespace, self._is_stopped.is_set)
            if not self._is_stopped.is_set():
                self._slot_table.adopt(namespace, contents)
                self.siblings.adopt(namespace.identity, contents.foreign_keys, is_empty=not contents.slot_of)
        except Exception:  # thread top
            logger.exception("tier slab: reading %s failed, it is not used", self._file.path)
        finally:
            self._ended.set()


def write_header(
    page: memoryview, header: bytes, oldest_generation: int, stored_s: float | None = None
) -> None:
    """Fill ``page`` for a block.

    Args:
        page: a header page, format 'B'; what is behind the header stays as it is.
        header: the block's, 128 bytes.
        oldest_generation: of the writes that have not ended, this one included.
        stored_s: the time of the store, seconds since 1970, where blocks have a time to live.
    """
    page[:ENVELOPE_BYTES] = header
    _OLDEST.pack_into(page, ENVELOPE_BYTES, oldest_generation)
    if stored_s is not None:
        pack_time(page, TIME_OFFSET, stored_s)


def oldest_unfinished(page: Buffer) -> int:
    """Return the oldest generation that was being written when the header in ``page`` was. Pure."""
    oldest: int = _OLDEST.unpack_from(page, ENVELOPE_BYTES)[0]
    return oldest


class FoundBlock(NamedTuple):
    """A slot whose header is right.

    Attributes:
        generation: of its write; first, so that blocks sort by age.
        slot: its number.
        namespace: first bytes of its namespace's digest.
        name: what its namespace calls it.
        stored_s: time of its store, where it has one.
    """

    generation: int
    slot: int
    namespace: bytes
    name: bytes
    stored_s: float = NO_TIME


@dataclass(slots=True)
class Headers:
    """What the headers of a slab, or of a part of it, say; slots in any order.

    Attributes:
        blocks: one for each slot whose header is right.
        free: slots that hold nothing.
        unknown: slots with headers of another version or codec, or of encrypted blocks.
        unreadable: slots that the disk did not give, and why.
        newest: the highest generation.
        oldest_unfinished: generation from which on a crash can have left half a block, as the newest header says.
    """

    blocks: list[FoundBlock] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    unreadable: list[tuple[int, OSError]] = field(default_factory=list)
    newest: int = 0
    oldest_unfinished: int = 0

    def add(self, other: "Headers") -> None:
        """Take over what other headers of the same slab say."""
        self.blocks += other.blocks
        self.free += other.free
        self.unknown += other.unknown
        self.unreadable += other.unreadable
        self.note(other.newest, other.oldest_unfinished)

    def note(self, generation: int, oldest_unfinished: int) -> None:
        """Take over what one header says of unfinished writes, if it is the newest."""
        if generation >= self.newest:
            self.newest, self.oldest_unfinished = generation, oldest_unfinished


class HeaderReader:
    """Reads the headers of a slab once.

    Mutable are the stretches to go and the errors of threads; taking from a deque and appending to it are atomic. What
    a thread finds is its own until it has ended.

    Args:
        file: the slab; it is not written meanwhile.
        is_stopped: called before each slot.
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
        found = [Headers() for _ in range(num_threads)]
        threads = self._start_threads(found[1:])
        self._read_stretches(found[0])
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        headers = Headers()
        for of_thread in found:
            headers.add(of_thread)
        return headers

    def _start_threads(self, found: list[Headers]) -> list[threading.Thread]:
        """Start a thread for each of ``found``; what cannot be started is work for the others."""
        threads = []
        for number, of_thread in enumerate(found):
            name = f"kvtier-slab-index-{number}"
            thread = threading.Thread(target=self._read_stretches, args=(of_thread,), name=name, daemon=True)
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
        found = unpack(page) if is_read else HeaderCheck.DAMAGED
        if found is HeaderCheck.OTHER_VERSION:
            headers.unknown.append(slot)
        elif isinstance(found, HeaderCheck) or found.stored_bytes != self._file.geometry.row_bytes:
            headers.free.append(slot)
        elif found.codec != RAW_CODEC:
            headers.unknown.append(slot)
        else:
            stored_s = unpack_time(page, TIME_OFFSET)
            headers.blocks.append(FoundBlock(found.generation, slot, found.namespace, found.key, stored_s))
            headers.note(found.generation, oldest_unfinished(page))


def scan(file: SlabFile, namespace: SlabNamespace, is_stopped: Callable[[], bool]) -> Contents:
    """Return what is in ``file``, as far as a namespace is concerned.

    Args:
        file: the slab; it is not written meanwhile.
        namespace: of the blocks that are ours.
        is_stopped: called before each slot; when it is True the answer is incomplete and must not be used.
    """
    headers = HeaderReader(file, is_stopped).read()
    if headers.unreadable:
        slot, error = min(headers.unreadable)
        num = len(headers.unreadable)
        # Left alone for as long as the tier lives: the disk may give them again to the next one.
        logger.warning("tier slab: %d slots of %s cannot be read, first %d: %s", num, file.path, slot, error)
    torn = {block.slot for block in _torn_blocks(file, headers, namespace, is_stopped)}
    blocks = [block for block in headers.blocks if block.slot not in torn]
    return sort_out(blocks, [*headers.free, *sorted(torn)], headers.unknown, namespace)


def sort_out(
    blocks: list[FoundBlock], free: list[int], unknown: list[int], namespace: SlabNamespace
) -> Contents:
    """Say which slots are ours, which others may use, and which hold nothing; a key's newest block counts.

    Args:
        blocks: whole ones; they are sorted.
        free: slots that hold nothing.
        unknown: slots with headers of another version or codec.
        namespace: of the blocks that are ours. Pure but for the order of ``blocks``.
    """
    own = namespace.identity.digest[:NAMESPACE_BYTES]
    contents = Contents()
    contents.foreign.extend(sorted(unknown))
    blocks.sort()
    for block in blocks:
        if block.namespace != own:
            contents.foreign.append(block.slot)
            contents.foreign_keys.setdefault(block.namespace.hex(), []).append(OffloadKey(block.name))
            continue
        key = namespace.format.key(block.name)
        outdated = contents.slot_of.pop(key, None)
        if outdated is not None:
            free.append(outdated)
        contents.slot_of[key] = block.slot
        contents.stored_s[key] = block.stored_s
    contents.free.extend(sorted(free))
    contents.next_generation = blocks[-1].generation + 1 if blocks else 1
    return contents


def _torn_blocks(
    file: SlabFile, headers: Headers, namespace: SlabNamespace, is_stopped: Callable[[], bool]
) -> Iterator[FoundBlock]:
    """Yield the blocks that a crash left half written, and erase them.

    Encrypted blocks of other namespaces, or whose key is not in the ring, cannot be checked: they are left to the check
    of each load.
    """
    suspects = [block for block in headers.blocks if block.generation >= headers.oldest_unfinished]
    if not suspects:
        return
    slot_bytes = file.geometry.slot_bytes
    scratch = memoryview(mmap.mmap(-1, slot_bytes))
    page, row = scratch[:HEADER_PAGE_BYTES], scratch[HEADER_PAGE_BYTES:]
    for block in suspects:
        if is_stopped():
            return
        try:
            is_read = file.read(block.slot, [page, row]) == slot_bytes
            is_whole = is_read and _is_whole(page, row, block, namespace)
            if not is_whole:
                file.erase(block.slot)
        except OSError as error:
            logger.warning("tier slab: slot %d of %s cannot be checked: %s", block.slot, file.path, error)
            is_whole = False
        if not is_whole:
            yield block


def _is_whole(page: memoryview, row: memoryview, block: FoundBlock, namespace: SlabNamespace) -> bool:
    header = unpack(page)
    if isinstance(header, HeaderCheck) or not header.is_encrypted:
        return check_block(page, row, OffloadKey(block.name), block.namespace) is HeaderCheck.OK
    if block.namespace != namespace.identity.digest[:NAMESPACE_BYTES] or not namespace.format.is_encrypted:
        return True
    found = namespace.format.open(page, row, namespace.format.key(block.name), row)
    return found in (HeaderCheck.OK, HeaderCheck.UNKNOWN_KEY_ID)
