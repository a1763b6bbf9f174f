"""Blocks on their way between rows of the primary tier and objects: sealed when they go, checked before they land."""

from collections.abc import Sequence

import numpy as np

from kvtier.base import OffloadKey
from kvtier.tiering.block_store import Rows
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import ENVELOPE_BYTES, Buffer, Verdict, check, pack, seal

Block = tuple[OffloadKey, int]
"""A key and the slot of its row."""


class SealedRows:
    """The primary's rows as the store sees them, an envelope in front of each.

    Args:
        rows: the primary's.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.row_bytes = rows.row_bytes
        self.block_bytes = ENVELOPE_BYTES + rows.row_bytes

    def seal(self, blocks: Sequence[Block], digest: bytes) -> list[Buffer]:
        """Return the bytes of an object that holds ``blocks``: envelope, row, envelope, row; rows are not copied."""
        buffers: list[Buffer] = []
        for key, slot in blocks:
            row = self._rows.row(slot)
            buffers += [pack(seal(key, digest, row, codec=RAW_NUMBER)), row]
        return buffers

    def land(self, body: memoryview, block: Block, digest: bytes) -> Verdict:
        """Copy what was read into the block's row if it is what was stored under its key.

        Effects: the row is written when the verdict is OK, and only then.
        """
        key, slot = block
        payload, row = body[ENVELOPE_BYTES:], self._rows.row(slot)
        verdict = check(body, payload, key, digest, codec=RAW_NUMBER)
        if verdict is not Verdict.OK:
            return verdict
        if len(payload) != len(row):
            return Verdict.DAMAGED
        # numpy, because it lets other threads run while it copies.
        np.copyto(np.frombuffer(row, np.uint8), np.frombuffer(payload, np.uint8))
        return Verdict.OK
