"""The kernel that copies pieces of memory by address, written in Triton.

``KernelLauncher`` cuts the pieces and builds their table. Host memory is read and written through its address: under
unified addressing pinned memory has the same address on the device.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pieces"])
def copy_pieces(
    table: tl.tensor, num_pieces: tl.tensor, ALIGNED_BYTES: tl.constexpr, LANES: tl.constexpr
) -> None:
    """Copy the pieces; each program copies every n-th.

    Args:
        table: sources, then destinations, then sizes in bytes; shape (3, num_pieces), int64.
        num_pieces: its length.
        ALIGNED_BYTES: 16 divides each address and size; 8 divides each address; or 1.
        LANES: words copied at a time.
    """
    lanes = tl.arange(0, LANES)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        source = tl.load(table + piece)
        destination = tl.load(table + num_pieces + piece)
        num_bytes = tl.load(table + 2 * num_pieces + piece)
        num_copied = num_bytes * 0
        if ALIGNED_BYTES >= 8:
            # The compiler joins two words into one instruction if it knows that they are neighbours on 16 bytes.
            PAIR: tl.constexpr = ALIGNED_BYTES // 8
            source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), ALIGNED_BYTES)
            destination_words = tl.multiple_of(destination.to(tl.pointer_type(tl.int64)), ALIGNED_BYTES)
            num_words = tl.multiple_of(num_bytes // 8, PAIR)
            for first in range(0, num_words, LANES):
                words = first + lanes
                values = tl.load(source_words + words, mask=words < num_words)
                tl.store(destination_words + words, values, mask=words < num_words)
            num_copied = num_words * 8
        if ALIGNED_BYTES < 16:
            source_bytes = source.to(tl.pointer_type(tl.int8))
            destination_bytes = destination.to(tl.pointer_type(tl.int8))
            for first in range(num_copied, num_bytes, LANES):
                places = first + lanes
                values = tl.load(source_bytes + places, mask=places < num_bytes)
                tl.store(destination_bytes + places, values, mask=places < num_bytes)
