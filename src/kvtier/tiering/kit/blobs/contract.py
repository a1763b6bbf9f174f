"""The contract of a backend that keeps bytes under names, and what those names say.

A backend writes seven methods of ``Blobs``. Everything above it, from envelopes to eviction, is written once over
these. What is wrong with one name is the outcome of that name. A call raises a TierError only when it got no answer for
any name, or when the backend refused all of them for one reason that is no value's, such as missing rights.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from itertools import islice
from typing import NamedTuple

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import TierError
from kvtier.tiering.kit.blobs.settings import BlobSettings
from kvtier.tiering.kit.block_format import BlockName
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer
from kvtier.tiering.kit.purging import BATCH_BLOCKS, Batches, Removed

NAMESPACE_CHARS = 32


class PutKind(Enum):
    """How a write ended.

    WRITTEN: also what existed, where the backend does not tell the difference. REFUSED: the backend does not take this
    value, and is well: it is too long, or another writer is at it. FAILED: the backend has failed with it, or did not
    answer. AWAY: the part of the backend that has this name did, others work.
    """

    WRITTEN = "written"
    EXISTED = "existed"
    NO_ROOM = "no_room"
    REFUSED = "refused"
    FAILED = "failed"
    AWAY = "away"


class Put(NamedTuple):
    """The outcome of one blob.

    Attributes:
        kind: how the write ended.
        words: why the blob was not written, in the server's words, without secrets; empty where it was.
        num_bytes: length of the blob that existed; None where the backend did not tell.
    """

    kind: PutKind
    words: str = ""
    num_bytes: int | None = None


class GotKind(Enum):
    """How a read ended. REFUSED: there is something of that name, and it is no blob. AWAY: as of a write."""

    READ = "read"
    ABSENT = "absent"
    REFUSED = "refused"
    FAILED = "failed"
    AWAY = "away"


class Got(NamedTuple):
    """The outcome of one read.

    Attributes:
        kind: how the read ended.
        num_bytes: length of the whole blob.
        written_s: when it was written, seconds since 1970; None where the backend does not tell.
        words: why it was not read, as for a ``Put``.
    """

    kind: GotKind
    num_bytes: int = 0
    written_s: float | None = None
    words: str = ""


class Blob(NamedTuple):
    """A blob to write.

    Attributes:
        name: under which it will be found.
        parts: its bytes. They are made when ``parts`` is iterated, so iterate just before they are sent; a second
            iteration, after a redirect, makes them again.
        num_bytes: their length.
    """

    name: str
    parts: Iterable[Buffer]
    num_bytes: int


class Target(ABC):
    """Where a blob is read to.

    Attributes:
        name: the blob.
        header: room for its first 128 bytes, writable.
        row: room for the rest, writable.
    """

    __slots__ = ("header", "name", "row")

    def __init__(self, name: str, header: memoryview, row: memoryview) -> None:
        self.name, self.header, self.row = name, header, row

    def take(self, value: memoryview, num_bytes: int | None = None) -> bool:
        """Take a blob that stands in memory of the client's, and check it as ``landed`` does; return the same.

        Args:
            value: all of it, or its first 128 bytes where it is of another length than header and row together.
            num_bytes: length of the whole blob; None: that of ``value``.
        """
        head = value[:ENVELOPE_BYTES]
        self.header[: len(head)] = head
        return self.landed(len(value) if num_bytes is None else num_bytes, value[ENVELOPE_BYTES:])

    @abstractmethod
    def landed(self, num_bytes: int, payload: Buffer | None = None) -> bool:
        """Check what was read, and decrypt it; call it before the next blob is read. Return whether it is right.

        Args:
            num_bytes: length of the whole blob. Where it is not that of header and row together, nothing stands in the
                row, and in the header the beginning of the blob as far as the backend can tell it.
            payload: what belongs into the row, in memory of the client's: copied once it was checked. None: it stands
                in the row.
        """


class Size(NamedTuple):
    """What there is of a blob without reading it.

    Attributes:
        num_bytes: its length; None where a lookup does not tell it: such a blob counts as whole until it is read.
        written_s: as in ``Got``.
        num_disk_blocks: how many blocks of 512 bytes it takes on this machine's disk; None where that is not known.
    """

    num_bytes: int | None
    written_s: float | None = None
    num_disk_blocks: int | None = None


class Listed(NamedTuple):
    """A blob in a listing; sorts by age.

    Attributes:
        used_s: when it was last used, or written where uses leave no trace, seconds since 1970; infinity where the
            backend does not tell.
        name: its name.
        num_bytes: its length, or what it takes where the backend tells that instead.
    """

    used_s: float
    name: str
    num_bytes: int


class BlockCount(NamedTuple):
    """How many blocks there are, or at least; ``is_whole`` when these are all."""

    num_blocks: int
    is_whole: bool


class Lent(NamedTuple):
    """Memory for one block on its way.

    Attributes:
        header: room for an envelope.
        scratch: room for an encrypted row; None: the block is encrypted into other memory.
        is_registered: whether the backend sends from this memory alone, so that headers must stand in it.
    """

    header: memoryview
    scratch: memoryview | None = None
    is_registered: bool = False


class BlobKind(Enum):
    """What a name of ours is of. EARLIER: something of an earlier version, which is counted and removed, never read."""

    BLOCK = "block"
    EARLIER = "earlier"
    DOCUMENT = "document"
    PAGE = "page"


class BlobName(NamedTuple):
    """What a name says; ``block`` is empty where it is of no block."""

    kind: BlobKind
    namespace: str
    block: BlockName = b""


class BlobNames(ABC):
    """What the blobs of a tier are called. Immutable, so any thread may use it."""

    @abstractmethod
    def block(self, namespace: str, name: BlockName) -> str:
        """Return the name of a block, its key where blocks are plain."""

    @abstractmethod
    def document(self, namespace: str) -> str:
        """Return the name of what describes a namespace to people."""

    @abstractmethod
    def page(self, namespace: str) -> str:
        """Return the name of a namespace's page."""

    @abstractmethod
    def parse(self, name: str) -> BlobName | None:
        """Return what a name says; None where it is not ours, and must not be counted or removed."""


class FolderNames(BlobNames):
    """Names for backends that take slashes for folders.

    ``<root>/<namespace>/<two digits>/<name>.kv`` is a block. The digits are the name's first two in hex, so that a
    store that partitions by name sees 256 starts of names. ``namespace.json`` and ``probe.page`` stand beside these.

    Args:
        root: what all names begin with, without slashes at the ends; may be empty.
        earlier: what in a namespace's folder is of an earlier version.
    """

    DOCUMENT = "namespace.json"
    PAGE = "probe.page"
    _NAME = re.compile(r"([0-9a-f]{32})/(?:([0-9a-f]{2})/(\2(?:[0-9a-f]{2}){0,39})\.kv|(.+))")

    def __init__(self, root: str = "", earlier: re.Pattern[str] | None = None) -> None:
        self._start = f"{root}/" if root else ""
        self._earlier = earlier

    def folder(self, namespace: str) -> str:
        """Return what the names of a namespace begin with, without the slash."""
        return f"{self._start}{namespace}"

    def block(self, namespace: str, name: BlockName) -> str:
        digits = name.hex()
        return f"{self._start}{namespace}/{digits[:2]}/{digits}.kv"

    def document(self, namespace: str) -> str:
        return f"{self._start}{namespace}/{self.DOCUMENT}"

    def page(self, namespace: str) -> str:
        return f"{self._start}{namespace}/{self.PAGE}"

    def parse(self, name: str) -> BlobName | None:
        if not name.startswith(self._start):
            return None
        found = self._NAME.fullmatch(name, len(self._start))
        if found is None:
            return None
        namespace, _, digits, other = found.groups()
        if digits is not None:
            return BlobName(BlobKind.BLOCK, namespace, bytes.fromhex(digits))
        kinds = {self.DOCUMENT: BlobKind.DOCUMENT, self.PAGE: BlobKind.PAGE}
        if self._earlier is not None and self._earlier.fullmatch(other):
            return BlobName(BlobKind.EARLIER, namespace)
        return BlobName(kinds[other], namespace) if other in kinds else None


class Blobs(ABC):
    """Named bytes in a backend. Several threads may call at once; a call may block as long as its time-outs say.

    Attributes:
        names: what blobs are called.
        settings: how the user has set it up.
        where: the backend, for messages.
        can_list: whether it can say what is in it. Where it cannot, a capacity, quotas, a time to live that the backend
            does not keep itself, and inspection without an engine are refused.
        has_times: whether a listing says when blobs were used or written. Where not, ``used_s`` of what is listed means
            nothing, and the same is refused but for the inspection.
        expires_itself: whether it keeps ``ttl_s`` itself.
        renews: whether a use of a blob begins its time to live again.
        fate: what becomes of blocks that no engine uses and no capacity evicts, as the end of "they are not readable
            and".
    """

    names: BlobNames
    settings: BlobSettings
    where: str
    can_list: bool = True
    has_times: bool = True
    expires_itself: bool = False
    renews: bool = False
    fate: str = "stay until the store's own rules remove them"

    @abstractmethod
    def put_new(self, blobs: Sequence[Blob], end_s: float | None) -> list[Put]:
        """Write blobs whole or not at all, unless there are some of those names; return the outcomes in their order.

        Args:
            blobs: to write.
            end_s: when the call should be over, on the tier's clock; None: the backend's own time-outs must do.
        """

    @abstractmethod
    def get_into(self, targets: Sequence[Target], end_s: float | None) -> list[Got]:
        """Read blobs, and call ``landed`` of each that was read; return the outcomes in their order. Likewise."""

    @abstractmethod
    def sizes(self, names: Sequence[str], *, is_lookup: bool) -> Mapping[str, Size]:
        """Return the lengths of those that exist; a name without an answer counts as absent.

        Args:
            names: to look for.
            is_lookup: whether a request asks: it is a use, and lengths may be left out where they take more calls.
        """

    @abstractmethod
    def read_each(self, names: Sequence[str], max_bytes: int, start: int = 0) -> Mapping[str, memoryview]:
        """Return parts of those that exist, less where they end before; it is no use of them.

        Args:
            names: to read.
            max_bytes: of each, at most.
            start: offset of the first of these bytes.
        """

    @abstractmethod
    def remove(
        self, names: Sequence[str], unless_used_since: Mapping[str, float] | None = None
    ) -> Collection[str]:
        """Remove blobs; return which, as far as the backend can tell: those that were gone may be among them.

        Args:
            names: to remove.
            unless_used_since: leave those that were used after these times, as far as the backend can tell.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise a TierError unless the backend is there and lets us in."""

    def check_writing(self) -> bool:
        """Check the same, and that blobs can be written where that leaves no trace; return whether that was tried."""
        self.check()
        return False

    def list_all(self, namespace: str | None = None) -> Iterator[Listed]:
        """Yield all blobs, or those of a namespace, a page at a time in memory; foreign ones may be among them."""
        del namespace
        raise TierError(self.where, "it cannot say what is in it")

    def list_namespaces(self) -> Sequence[str]:
        """Return namespaces that have something here, those first that were written to last, if that is known."""
        return ()

    def count_blocks(self, namespace: str) -> BlockCount:
        """Return how many blocks a namespace has, as far as that can be counted at a bounded cost."""
        del namespace
        return BlockCount(0, is_whole=False)

    def read_capacity_bytes(self) -> int | None:
        """Return the most that is kept there; None: there is no limit that is known."""
        return self.settings.capacity_bytes

    def put_document(self, namespace: str, document: str) -> Put:
        """Write what describes a namespace to people unless it is there."""
        body = document.encode()
        (put,) = self.put_new([Blob(self.names.document(namespace), [body], len(body))], None)
        return put

    def remove_namespace(self, namespace: str, tenant: int | None) -> Batches:
        """Remove every block of a namespace, or those of one tenant by its number, a batch for each item.

        Raises:
            TierError: the backend cannot be reached, or cannot do that.
        """
        found = (
            (listed.name, parsed)
            for listed in self.list_all(namespace)
            if (parsed := self.names.parse(listed.name)) is not None
            and parsed.namespace == namespace
            and parsed.kind in (BlobKind.BLOCK, BlobKind.EARLIER)
        )
        while batch := dict(islice(found, BATCH_BLOCKS)):
            keys = {name: OffloadKey(one.block) for name, one in batch.items() if one.block}
            if tenant is not None:
                keys = {name: key for name, key in keys.items() if get_offload_tenant(key) == tenant}
            removed = self.remove(list(batch) if tenant is None else list(keys))
            gone = [keys[name] for name in removed if name in keys]
            yield Removed(len(gone), gone)

    def lend_headers(self, num_blocks: int, *, has_scratch: bool) -> AbstractContextManager[Sequence[Lent]]:
        """Lend memory for the headers of one call, and rows to encrypt into where the backend reads only its own.

        Args:
            num_blocks: of the call.
            has_scratch: whether blocks are encrypted into other memory than the primary's.
        """
        del has_scratch
        headers = memoryview(bytearray(num_blocks * ENVELOPE_BYTES))
        starts = range(0, num_blocks * ENVELOPE_BYTES, ENVELOPE_BYTES)
        return nullcontext([Lent(headers[begin : begin + ENVELOPE_BYTES]) for begin in starts])

    def stats(self) -> dict[str, float]:
        """Return counts and gauges of the backend's own by name."""
        return {}

    def close(self) -> None:
        """Close connections; called once, when no thread uses the backend any more."""
