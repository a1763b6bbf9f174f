"""The contract of a place: where a tier keeps its blocks, as the commands see it that need no engine.

``kvtier inspect``, ``verify`` and ``purge`` know this contract and no tier. A tier implements it in a file ``place.py``
of its folder, and offers it with ``PlaceTier``. A place may be in use by living engines all the while: what an engine
writes, renews or evicts meanwhile is never called damaged, and what is removed costs it that block and nothing else.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol

from kvtier.base import OffloadKey
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, RAW_CODEC, Buffer, HeaderCheck, check_block, unpack


class BlockState(Enum):
    """What a whole read of a block found."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    MOVED = "moved"
    UNREADABLE = "unreadable"
    OTHER_FORMAT = "other_format"
    ENCRYPTED = "encrypted"
    NO_KEY = "no_key"
    BEING_WRITTEN = "being_written"
    GONE = "gone"


DAMAGE = frozenset({BlockState.DAMAGED, BlockState.MOVED})
"""States in which the bytes are not what was stored under the name: such a block can be no hit, and may be removed."""

FAULTS_OF_PLACE = DAMAGE | {BlockState.UNREADABLE}
"""States that are a fault of the place. A block of another version or encoding is none: its own engine reads it."""

STATE_OF_CHECK = {
    HeaderCheck.OK: BlockState.WHOLE,
    HeaderCheck.DAMAGED: BlockState.DAMAGED,
    HeaderCheck.OTHER_KEY: BlockState.MOVED,
    HeaderCheck.OTHER_NAMESPACE: BlockState.MOVED,
    HeaderCheck.OTHER_VERSION: BlockState.OTHER_FORMAT,
    HeaderCheck.OTHER_CODEC: BlockState.OTHER_FORMAT,
    HeaderCheck.ENCRYPTED: BlockState.OTHER_FORMAT,
    HeaderCheck.NOT_ENCRYPTED: BlockState.DAMAGED,
    HeaderCheck.UNKNOWN_KEY_ID: BlockState.NO_KEY,
    HeaderCheck.DROPPED_KEY_ID: BlockState.NO_KEY,
}


@dataclass(frozen=True, slots=True)
class PlaceNamespace:
    """A namespace that has something in a place.

    Attributes:
        name: 32 hex digits.
        document: its identity in words, as ``Namespace.document``; empty where the place has none.
    """

    name: str
    document: str = ""


@dataclass(frozen=True, slots=True)
class PlaceBlock:
    """Something that holds blocks: a file, a slot, an object or a value.

    Attributes:
        namespace: the name of its namespace.
        address: where in the place it is, as text that people can use.
        num_bytes: what it takes there, header included.
        used_s: when it was last used, or written where uses leave no trace, seconds since 1970; None when unknown.
        num_blocks: blocks that can be found by it; 0 for an object that other objects point into.
        stamp: what changes when it is replaced or used; only its own place understands it.
        tenant: number of the tenant in the block's name, 0 for none; None where the place cannot tell. The name of an
            encrypted block tells nothing: its number means nothing.
        key: the block, where its name tells it.
        name: what its namespace calls it, a keyed name where it is encrypted; None where the place does not show it.
    """

    namespace: str
    address: str
    num_bytes: int
    used_s: float | None
    num_blocks: int = 1
    stamp: tuple[int, ...] = ()
    tenant: int | None = None
    key: OffloadKey | None = None
    name: bytes | None = None


class Amount(NamedTuple):
    """How many things, and how many bytes they take."""

    num: int = 0
    num_bytes: int = 0

    def plus(self, num: int, num_bytes: int) -> "Amount":
        """Return the sum. Pure."""
        return Amount(self.num + num, self.num_bytes + num_bytes)


NOTHING = Amount()


@dataclass(frozen=True, slots=True)
class PlaceSummary:
    """What a place says of itself beside its blocks.

    Attributes:
        capacity_bytes: the most that it may take, None where it has no limit or does not know it.
        temporary: files of writes that have not ended, or that a crash has left.
        foreign: what lies there and is not kvtier's; it is never touched.
        other_format: what another version of kvtier has written.
        users: living engines that use it, in words; empty where that cannot be known.
    """

    capacity_bytes: int | None = None
    temporary: Amount = NOTHING
    foreign: Amount = NOTHING
    other_format: Amount = NOTHING
    users: tuple[str, ...] = ()


def name_place(tier: str, setting: str, own: Mapping[str, object]) -> str:
    """Return a place as commands take it: its address alone where that says everything, else the tier's entry. Pure.

    Args:
        tier: type of the tier.
        setting: the tier's setting that says where its blocks are.
        own: the settings that it takes to reach them, without credentials.
    """
    if set(own) == {setting}:
        return str(own[setting])
    return json.dumps({"type": tier, **own}, default=str)


class TierFinding(NamedTuple):
    """What a probe found.

    Attributes:
        is_good: whether an engine could work with it.
        text: what was found and, if it is not good, what to do.
        is_note: whether it is worth a look although it works.
    """

    is_good: bool
    text: str
    is_note: bool = False


class Opener(Protocol):
    """What opens encrypted blocks for a place."""

    def open(self, header: Buffer, payload: Buffer) -> HeaderCheck:
        """Check an encrypted block of any tenant; leave nothing of it."""

    def key_of(self, namespace: bytes, name: bytes) -> OffloadKey:
        """Return the block that an encrypted namespace calls so, random bytes where it is of another ring.

        Args:
            namespace: 16 bytes.
            name: a keyed name.
        """

    def is_of_ring(self, namespace: bytes, name: bytes) -> bool:
        """Return whether the ring made a name; of another ring's names one in millions seems to be.

        Args:
            namespace: 16 bytes.
            name: a keyed name, of a block of a tenant that the ring knows, in an engine without ``tenant_salt``, or of
                no tenant; for others the answer is no.
        """


class Place(ABC):
    """Where a tier keeps its blocks. Used by one thread.

    Args:
        where: the place as messages name it, without credentials.

    Attributes:
        tier: the type of the tier.
        has_times: whether its blocks have a time, by which ``purge --older-than`` chooses.
        opener: what opens encrypted blocks; None: their headers alone are checked.
    """

    tier: ClassVar[str]
    has_times: ClassVar[bool] = True

    def __init__(self, where: str) -> None:
        self.where = where
        self.opener: Opener | None = None

    def unlock(self, opener: Opener) -> None:
        """Check encrypted blocks with ``opener`` from now on."""
        self.opener = opener

    @abstractmethod
    def namespaces(self) -> list[PlaceNamespace]:
        """Return the namespaces that have something here, or a document.

        Raises:
            TierError: the place cannot be read.
        """

    @abstractmethod
    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        """Yield what holds blocks, in no order, without reading it; what comes meanwhile may be missed.

        Args:
            namespaces: names of those that count; None: all.

        Raises:
            TierError: the place cannot be read.
        """

    @abstractmethod
    def summary(self) -> PlaceSummary:
        """Return what else there is; called after a call of ``blocks`` for all namespaces was read to its end.

        Raises:
            TierError: the place cannot be read.
        """

    @abstractmethod
    def check(self, block: PlaceBlock) -> BlockState:
        """Read a block wholly and compare it with its header; one that is replaced meanwhile is read again.

        Raises:
            TierError: the place as a whole cannot be read.
        """

    def begin_removal(self, *, is_forced: bool = False) -> None:
        """Get ready for calls of ``remove``.

        Args:
            is_forced: whether blocks go that an engine alone removes and does not remove in time, with others that lie
                with them. Nothing changes where no engine owns blocks.

        Raises:
            TierError: nothing can be removed now, and what to do.
        """

    @abstractmethod
    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        """Remove blocks; return how many and how much this call has removed.

        Args:
            blocks: as ``blocks`` gave them.
            unless_changed: leave those that were used or replaced since then, as far as the place can tell.

        Raises:
            TierError: the place cannot be changed.
        """

    def end_removal(self, namespaces: Collection[str]) -> None:
        """Finish what ``begin_removal`` began.

        Args:
            namespaces: names of those of which nothing is to stay, documents included, unless an engine has written
                into them meanwhile.

        Raises:
            TierError: the place cannot be changed.
        """
        del namespaces

    def remove_older_formats(self, *, is_dry_run: bool) -> Amount:
        """Remove what older versions of kvtier wrote into files that no tier reads any more; return how much that was.

        Args:
            is_dry_run: only count it.

        Raises:
            TierError: the place cannot be changed.
        """
        del is_dry_run
        return NOTHING

    def close(self) -> None:
        """Close connections and files; idempotent."""


def check_bytes(
    header: Buffer, payload: Buffer, namespace_name: str, key: bytes | None, opener: Opener | None = None
) -> BlockState:
    """Compare a block with its header.

    Args:
        header: at least the 128 bytes of the envelope.
        payload: the stored bytes, no more and no fewer.
        namespace_name: of the namespace that it was found in.
        key: the block that its name says, a keyed name where it is encrypted; None: whichever the header says.
        opener: opens encrypted blocks; without it one whose header is right is ``ENCRYPTED``.
    """
    envelope = unpack(header)
    if isinstance(envelope, HeaderCheck):
        return STATE_OF_CHECK[envelope]
    if envelope.is_encrypted:
        if envelope.namespace.hex() != namespace_name or (key is not None and envelope.key != key):
            return BlockState.MOVED
        if envelope.codec != RAW_CODEC:
            return BlockState.OTHER_FORMAT
        if envelope.stored_bytes != len(payload):
            return BlockState.DAMAGED
        return BlockState.ENCRYPTED if opener is None else STATE_OF_CHECK[opener.open(header, payload)]
    own_key = envelope.key if key is None else OffloadKey(key)
    return STATE_OF_CHECK[check_block(header, payload, own_key, bytes.fromhex(namespace_name))]


def check_value(
    value: memoryview, namespace_name: str, key: bytes, opener: Opener | None = None
) -> BlockState:
    """Compare a value, an envelope and right behind it the payload, with what its name says."""
    return check_bytes(value[:ENVELOPE_BYTES], value[ENVELOPE_BYTES:], namespace_name, key, opener)
