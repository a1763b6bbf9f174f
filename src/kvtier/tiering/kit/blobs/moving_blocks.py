"""Blocks on their way to and from blobs: sealed when their parts are sent, checked when they have landed."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvtier.base import OffloadKey
from kvtier.tiering.kit.blobs.contract import Lent, Target
from kvtier.tiering.kit.block_format import BlockFormat
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer, HeaderCheck, unpack


class BlockToStore(NamedTuple):
    """A block, its slot, and the name of its blob."""

    key: OffloadKey
    slot: int
    name: str


class SealedBlock:
    """The parts of a block; its header is made when they are iterated, while those before it are on their way."""

    __slots__ = ("_format", "_key", "_lent", "_row")

    def __init__(self, block_format: BlockFormat, key: OffloadKey, row: memoryview, lent: Lent) -> None:
        self._format, self._key, self._row, self._lent = block_format, key, row, lent

    def __iter__(self) -> Iterator[Buffer]:
        """Return header and payload."""
        header, payload = self._format.seal(self._key, self._row, self._lent.scratch)
        if not self._lent.is_registered:
            return iter((header, payload))
        self._lent.header[:] = header
        return iter((self._lent.header, payload))


class BlockTarget(Target):
    """Where the blob of one block goes, and whether it was right."""

    __slots__ = ("check", "format", "key")

    def __init__(
        self, name: str, key: OffloadKey, block_format: BlockFormat, header: memoryview, row: memoryview
    ) -> None:
        super().__init__(name, header, row)
        self.key = key
        self.format = block_format
        self.check = HeaderCheck.DAMAGED

    def landed(self, num_bytes: int, payload: Buffer | None = None) -> bool:
        if num_bytes != ENVELOPE_BYTES + len(self.row):
            self.check = check_header(self.header, num_bytes)
            return False
        own = self.row if payload is None else payload
        self.check = self.format.open(self.header, own, self.key, self.row)
        if self.check is HeaderCheck.OK and payload is not None and not self.format.is_encrypted:
            # numpy, because it lets other threads run while it copies.
            np.copyto(np.frombuffer(self.row, np.uint8), np.frombuffer(payload, np.uint8))
        return self.check is HeaderCheck.OK


def check_header(header: Buffer, num_bytes: int) -> HeaderCheck:
    """Return what is wrong with a blob of another length than ours: of another version, or cut. Pure."""
    found = unpack(header) if num_bytes >= ENVELOPE_BYTES else HeaderCheck.DAMAGED
    return found if isinstance(found, HeaderCheck) else HeaderCheck.DAMAGED
