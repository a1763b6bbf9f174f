"""How a block is written in one namespace: its name, its header, and its payload as it is or encrypted.

A store asks ``format_of`` for the format of a namespace that it opens, and names, seals and opens blocks with it. Above
the store a block is its ``OffloadKey`` everywhere; a name is what stands in a path, an object's name or a header.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.envelope import Buffer, HeaderCheck, check_block, make_header

BlockName = bytes
"""What a tier calls a block: the bytes of its key, or keyed bytes of the same length."""


class Sealed(NamedTuple):
    """A block that is ready to be written.

    Attributes:
        header: 128 bytes.
        payload: what stands behind it: the row itself, or the scratch memory.
    """

    header: bytes
    payload: memoryview


class BlockFormat(ABC):
    """Names, seals and opens the blocks of one namespace. Thread: any.

    Attributes:
        is_encrypted: whether payloads are encrypted, so that ``seal`` needs scratch memory.
        name: returns what the tier calls the block of a key; an attribute, because it is called several times a block.
    """

    is_encrypted: ClassVar[bool]
    name: Callable[[OffloadKey], BlockName]

    @abstractmethod
    def key(self, name: BlockName) -> OffloadKey:
        """Return the block that is called ``name``; the inverse of ``name``."""

    @abstractmethod
    def serves(self, key: OffloadKey) -> bool:
        """Return whether blocks of the tenant of ``key`` can be stored and loaded now. Does not block."""

    @abstractmethod
    def refresh(self) -> None:
        """Notice what has changed since the last call; a call of a second ago is enough. May read a small file."""

    @abstractmethod
    def seal(
        self,
        key: OffloadKey,
        row: memoryview,
        scratch: memoryview | None,
        *,
        generation: int = 0,
    ) -> Sealed:
        """Return the header and the payload of a block.

        Args:
            key: the block.
            row: its bytes, format 'B'; they are not changed.
            scratch: where an encrypted payload goes, as long as the row; not used by a plain one.
            generation: of the write, where slots are written again and again.

        Raises:
            TierError: the key of its tenant has just been dropped.
        """

    @abstractmethod
    def open(self, header: Buffer, payload: Buffer, key: OffloadKey, row: memoryview) -> HeaderCheck:
        """Check a block, and decrypt it into ``row``; what is wrong with it leaves no byte of it there.

        Args:
            header: what stood in front of the payload.
            payload: the stored bytes, no more and no fewer; may be ``row``. A plain payload that is not is not copied.
            key: the block that was to be read.
            row: where the decrypted bytes go, as long as the payload.
        """


class PlainFormat(BlockFormat):
    """Blocks as they are, under their keys, with a checksum.

    Args:
        namespace_digest: the namespace's.
    """

    is_encrypted: ClassVar[bool] = False

    def __init__(self, namespace_digest: bytes) -> None:
        self._digest = namespace_digest
        # No frame of Python for each block of a tier that does not encrypt: bytes of bytes are the same object.
        self.name = bytes

    def key(self, name: BlockName) -> OffloadKey:
        return OffloadKey(name)

    def serves(self, key: OffloadKey) -> bool:
        del key
        return True

    def refresh(self) -> None:
        return

    def seal(
        self,
        key: OffloadKey,
        row: memoryview,
        scratch: memoryview | None,
        *,
        generation: int = 0,
    ) -> Sealed:
        del scratch
        return Sealed(make_header(key, self._digest, row, generation=generation), row)

    def open(self, header: Buffer, payload: Buffer, key: OffloadKey, row: memoryview) -> HeaderCheck:
        del row
        return check_block(header, payload, key, self._digest)


@dataclass(frozen=True, slots=True)
class EncryptedNamespace(Namespace):
    """The identity of encrypted blocks.

    Attributes:
        format: how they are written.
    """

    format: BlockFormat = field(compare=False, repr=False)


def format_of(identity: Namespace) -> BlockFormat:
    """Return how the blocks of a namespace are written. Pure."""
    return identity.format if isinstance(identity, EncryptedNamespace) else PlainFormat(identity.digest)
