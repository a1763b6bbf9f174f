"""Finds out at the start what a slab holds, from the headers of its slots.

It changes no slot but torn ones, which it erases. A header counts when its own checksum is right. Of a crash, the
newest header says which writes had not ended then; the payloads of those, a few, are checked too, so that what is
found is whole. Every other payload is checked when it is loaded.
"""

import logging
import mmap
from collections.abc import Callable, Iterator

from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import HEADER_PAGE_BYTES, NAMESPACE_BYTES, Verdict, check
from kvtier.tiering.slab.contents import Contents
from kvtier.tiering.slab.header_reader import HeaderReader
from kvtier.tiering.slab.headers import FoundBlock, Headers
from kvtier.tiering.slab.slab_file import SlabFile

logger = logging.getLogger(__name__)


def scan(file: SlabFile, namespace_digest: bytes, is_stopped: Callable[[], bool]) -> Contents:
    """Return what is in ``file``, as far as a namespace is concerned.

    Args:
        file: the slab; nobody writes to it meanwhile.
        namespace_digest: of the blocks that are ours.
        is_stopped: asked before each slot; the answer is then incomplete and must not be used.
    """
    headers = HeaderReader(file, is_stopped).read()
    if headers.unreadable:
        slot, error = min(headers.unreadable)
        num = len(headers.unreadable)
        # Left alone for as long as the tier lives: the disk may give them again to the next one.
        logger.warning("tier slab: %d slots of %s cannot be read, first %d: %s", num, file.path, slot, error)
    torn = {block.slot for block in _torn_blocks(file, headers, is_stopped)}
    blocks = [block for block in headers.blocks if block.slot not in torn]
    return sort_out(blocks, [*headers.free, *sorted(torn)], headers.unknown, namespace_digest)


def sort_out(blocks: list[FoundBlock], free: list[int], unknown: list[int], namespace: bytes) -> Contents:
    """Say which slots are ours, which others may use, and which hold nothing; a key's newest block counts.

    Args:
        blocks: whole ones; they are sorted.
        free: slots that hold nothing.
        unknown: slots of which nobody here can make use.
        namespace: digest of the blocks that are ours. Pure but for the order of ``blocks``.
    """
    contents = Contents()
    contents.foreign.extend(sorted(unknown))
    blocks.sort()
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
