"""The blobs of a tier beyond an engine's own: for commands without an engine, and for the causes of misses.

A blob is created once and never written over, so what is read twice and is damaged both times stays so. A block has
the same name in every namespace but for the namespace's own, so its length says whether another namespace has it.
"""

import math
from collections.abc import Collection, Iterator, Sequence

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.tiering.kit.blobs.contract import BlobKind, Blobs
from kvtier.tiering.kit.block_pieces import check_in_pieces
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.place import (
    FAULTS_OF_PLACE,
    Amount,
    BlockState,
    Place,
    PlaceBlock,
    PlaceNamespace,
    PlaceSummary,
    check_value,
)
from kvtier.tiering.kit.siblings import (
    UNKNOWN_AMOUNT,
    Sibling,
    SiblingPlace,
    amount_in_words,
    log_siblings,
    row_bytes_of,
)

MAX_WHOLE_BYTES = 64 * 2**20
"""Blobs up to this length are read at once. Longer ones are read by pieces, and no further than their headers say."""


MAX_DOCUMENT_BYTES = 2**20
MAX_READ_DOCUMENTS = 32
"""Documents read in a listing, at once. Most backends have no cheap order by age, so those that differ least are chosen
among these; more are more requests, fewer miss the one that matters where there are many models."""

MAX_ASKED = 64
"""Missing blocks of a lookup that are asked for in the sibling that holds one. Each may be a request."""

MAX_MEASURED = 8
"""Namespaces of an older layout whose blocks are counted, once in the life of a tier."""

FIRST_PAUSE_S = 1.0
"""The first pause after a look that found nothing. A look costs a round trip, and some dozen requests."""


class BlobPlace(Place):
    """The blobs of a backend.

    Args:
        tier: type of the tier.
        blobs: the backend; it can list.
    """

    def __init__(self, tier: str, blobs: Blobs) -> None:
        super().__init__(blobs.where)
        # Other places are of one tier, and have these as constants of their class.
        self.__dict__.update(tier=tier, has_times=blobs.has_times)
        self._blobs = blobs
        self._foreign = Amount()
        self._documents: set[str] = set()
        self._namespaces: set[str] = set()

    def namespaces(self) -> list[PlaceNamespace]:
        for _ in self.blocks():
            pass  # backends list names, not folders
        documents = [self._blobs.names.document(name) for name in sorted(self._documents)]
        texts = self._blobs.read_each(documents, MAX_DOCUMENT_BYTES + 1) if documents else {}
        return [
            PlaceNamespace(name, _as_text(texts.get(self._blobs.names.document(name))))
            for name in sorted(self._namespaces | self._documents)
        ]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        self._foreign, self._documents, self._namespaces = Amount(), set(), set()
        for listed in self._blobs.list_all():
            parsed = self._blobs.names.parse(listed.name)
            if parsed is None:
                self._foreign = self._foreign.plus(1, listed.num_bytes)
            elif parsed.kind is BlobKind.DOCUMENT:
                self._documents.add(parsed.namespace)
            elif parsed.kind is not BlobKind.PAGE:
                self._namespaces.add(parsed.namespace)
                if namespaces is None or parsed.namespace in namespaces:
                    is_block = parsed.kind is BlobKind.BLOCK
                    key = OffloadKey(parsed.block) if is_block else None
                    yield PlaceBlock(
                        parsed.namespace,
                        listed.name,
                        listed.num_bytes,
                        listed.used_s if self._blobs.has_times and listed.used_s != math.inf else None,
                        num_blocks=1 if is_block else 0,
                        tenant=None if key is None else get_offload_tenant(key),
                        key=key,
                        name=key,
                    )

    def summary(self) -> PlaceSummary:
        return PlaceSummary(capacity_bytes=self._blobs.read_capacity_bytes(), foreign=self._foreign)

    def check(self, block: PlaceBlock) -> BlockState:
        if block.name is None:
            return BlockState.OTHER_FORMAT  # of an earlier version: this one reads none
        state = self._check_once(block, block.name)
        return self._check_once(block, block.name) if state in FAULTS_OF_PLACE else state

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        used = {block.address: block.used_s for block in blocks if block.used_s is not None}
        by_name = {block.address: block for block in blocks}
        removed = [
            by_name[name] for name in self._blobs.remove(list(by_name), used if unless_changed else None)
        ]
        return Amount(sum(block.num_blocks for block in removed), sum(block.num_bytes for block in removed))

    def end_removal(self, namespaces: Collection[str]) -> None:
        left = {block.namespace for block in self.blocks(namespaces)} if namespaces else set()
        gone = [name for name in namespaces if name not in left]
        names = self._blobs.names
        self._blobs.remove([*map(names.document, gone), *map(names.page, gone)])

    def close(self) -> None:
        self._blobs.close()

    def _check_once(self, block: PlaceBlock, name: bytes) -> BlockState:
        address = block.address
        size = self._blobs.sizes([address], is_lookup=False).get(address)
        if size is None:
            return BlockState.GONE
        if size.num_bytes is not None and size.num_bytes > MAX_WHOLE_BYTES:
            return check_in_pieces(
                self._read(address, 0, ENVELOPE_BYTES),
                size.num_bytes - ENVELOPE_BYTES,
                lambda offset, length: self._read(address, ENVELOPE_BYTES + offset, length),
                block.namespace,
                name,
                self.opener,
                num_disk_blocks=size.num_disk_blocks,
            )
        found = self._blobs.read_each([address], MAX_WHOLE_BYTES).get(address)
        if found is None:
            return BlockState.UNREADABLE  # or removed meanwhile: the second look finds out
        return check_value(found, block.namespace, name, self.opener)

    def _read(self, address: str, start: int, num_bytes: int) -> memoryview:
        return self._blobs.read_each([address], num_bytes, start).get(address, memoryview(b""))


def _as_text(document: memoryview | None) -> str:
    if document is None or len(document) > MAX_DOCUMENT_BYTES:
        return ""
    return bytes(document).decode("utf-8", "replace")


class BlobSiblings(SiblingPlace):
    """Namespaces beside the own one. What has no answer in time counts as absent.

    Args:
        tier: type of the tier, for messages.
        blobs: the backend.
        has_capacity: whether the tier evicts; blobs of others go with its own.
    """

    def __init__(self, tier: str, blobs: Blobs, *, has_capacity: bool) -> None:
        if not has_capacity:
            self.fate = blobs.fate
        self._tier = tier
        self._blobs = blobs
        self._own_name = ""

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        del max_namespaces  # those that differ least are chosen among more
        self._own_name = own_name
        names = [name for name in self._blobs.list_namespaces() if name != own_name][:MAX_READ_DOCUMENTS]
        documents = {self._blobs.names.document(name): name for name in names}
        found = self._blobs.read_each(list(documents), MAX_DOCUMENT_BYTES) if documents else {}
        return [(documents[name], bytes(text).decode("utf-8", "replace")) for name, text in found.items()]

    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        asked = {self._blobs.names.block(name, key): name for name in names for key in keys}
        there = {asked[name] for name in self._blobs.sizes(list(asked), is_lookup=False)}
        return next((name for name in names if name in there), None)

    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        asked = {self._blobs.names.block(name, key): key for key in keys[:MAX_ASKED]}
        return [asked[found] for found in self._blobs.sizes(list(asked), is_lookup=False)]

    def note_siblings(self, siblings: Sequence[Sibling]) -> None:
        # A namespace that was written to has its description, so it is not empty by mistake.
        own = self._blobs.names.document(self._own_name)
        if own in self._blobs.read_each([own], MAX_DOCUMENT_BYTES):
            return
        count = self._blobs.count_blocks(siblings[0].name)
        num_blocks = "an unknown number of"
        if count.is_whole or count.num_blocks:
            num_blocks = str(count.num_blocks) if count.is_whole else f"{count.num_blocks} or more"
        log_siblings(self._tier, self._own_name, siblings[0], num_blocks)

    def measure_older(self, documents: Sequence[tuple[str, str]]) -> str:
        num_bytes, is_whole = 0, len(documents) <= MAX_MEASURED
        for name, document in documents[:MAX_MEASURED]:
            count, row_bytes = self._blobs.count_blocks(name), row_bytes_of(document)
            num_bytes += count.num_blocks * (row_bytes or 0)
            is_whole = is_whole and count.is_whole and row_bytes is not None
        if not num_bytes:
            return UNKNOWN_AMOUNT
        return amount_in_words(num_bytes) if is_whole else f"at least {amount_in_words(num_bytes)}"
