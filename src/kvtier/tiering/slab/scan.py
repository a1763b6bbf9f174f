"""Finds out at the start what a slab holds, from the headers of its slots.

It changes no slot but torn ones, which it erases. A header counts when its own checksum is right. Of a crash, the
newest header says which writes had not ended then; the payloads of those, a few, are checked too, so that what is
found is whole. Every other payload is checked when it is loaded.
"""

import logging
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.base import OffloadKey
from kvtier.tiering.aligned import allocate_page
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import HEADER_PAGE_BYTES, NAMESPACE_BYTES, Envelope, Verdict, check, unpack
from kvtier.tiering.slab.contents import Contents
from kvtier.tiering.slab.slab_file import SlabFile
from kvtier.tiering.slab.slot_header import oldest_unfinished

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A slot whose header is right.

    Attributes:
        generation: of its write; first, so that blocks sort by age.
        slot: its number.
        namespace: first bytes of its namespace's digest.
        key: the block.
    """

    generation: int
    slot: int
    namespace: bytes
    key: OffloadKey


@dataclass(slots=True)
class Headers:
    """What the headers of a slab say.

    Attributes:
        blocks: one for each slot whose header is right.
        free: slots that hold nothing.
        unknown: slots with headers of another version or codec.
        oldest_unfinished: generation from which on a crash can have left half a block.
    """

    blocks: list[FoundBlock]
    free: list[int]
    unknown: list[int]
    oldest_unfinished: int = 0


def scan(file: SlabFile, namespace_digest: bytes, is_stopped: Callable[[], bool]) -> Contents:
    """Return what is in ``file``, as far as a namespace is concerned.

    Args:
        file: the slab; nobody writes to it meanwhile.
        namespace_digest: of the blocks that are ours.
        is_stopped: asked before each slot; the answer is then incomplete and must not be used.
    """
    headers = read_headers(file, is_stopped)
    torn = {block.slot for block in _torn_blocks(file, headers, is_stopped)}
    blocks = [block for block in headers.blocks if block.slot not in torn]
    return sort_out(blocks, [*headers.free, *sorted(torn)], headers.unknown, namespace_digest)


def read_headers(file: SlabFile, is_stopped: Callable[[], bool]) -> Headers:
    """Read the header of every slot; one that cannot be read is left alone for as long as the tier lives."""
    headers = Headers([], [], [])
    page = allocate_page()
    newest, num_unreadable = 0, 0
    for slot in range(file.geometry.num_slots):
        if is_stopped():
            break
        try:
            is_read = file.read_header(slot, page)
        except OSError as error:
            num_unreadable += 1
            if num_unreadable == 1:
                logger.warning("tier slab: slot %d of %s cannot be read: %s", slot, file.path, error)
            continue
        found = unpack(page) if is_read else Verdict.DAMAGED
        if found is Verdict.OTHER_VERSION:
            headers.unknown.append(slot)
        elif isinstance(found, Verdict) or found.stored_bytes != file.geometry.row_bytes:
            headers.free.append(slot)
        elif found.codec != RAW_NUMBER:
            headers.unknown.append(slot)
        else:
            headers.blocks.append(_found_block(found, slot))
            if found.generation >= newest:
                newest = found.generation
                headers.oldest_unfinished = oldest_unfinished(page)
    return headers


def sort_out(blocks: list[FoundBlock], free: list[int], unknown: list[int], namespace: bytes) -> Contents:
    """Say which slots are ours, which others may use, and which hold nothing; a key's newest block counts.

    Args:
        blocks: whole ones; they are sorted.
        free: slots that hold nothing.
        unknown: slots of which nobody here can make use.
        namespace: digest of the blocks that are ours. Pure but for the order of ``blocks``.
    """
    contents = Contents()
    contents.foreign.extend(unknown)
    blocks.sort(key=lambda block: block.generation)
    for block in blocks:
        if block.namespace != namespace[:NAMESPACE_BYTES]:
            contents.foreign.append(block.slot)
            continue
        outdated = contents.slot_of.pop(block.key, None)
        if outdated is not None:
            free.append(outdated)
        contents.slot_of[block.key] = block.slot
    contents.free.extend(sorted(free))
    contents.next_generation = blocks[-1].generation + 1 if blocks else 1
    return contents


def _found_block(envelope: Envelope, slot: int) -> FoundBlock:
    return FoundBlock(envelope.generation, slot, envelope.namespace, envelope.key)


def _torn_blocks(file: SlabFile, headers: Headers, is_stopped: Callable[[], bool]) -> Iterator[FoundBlock]:
    """Yield the blocks that a crash left half written, and erase them."""
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
            is_whole = (
                is_read and check(page, row, block.key, block.namespace, codec=RAW_NUMBER) is Verdict.OK
            )
            if not is_whole:
                file.erase(block.slot)
        except OSError as error:
            logger.warning("tier slab: slot %d of %s cannot be checked: %s", block.slot, file.path, error)
            is_whole = False
        if not is_whole:
            yield block
