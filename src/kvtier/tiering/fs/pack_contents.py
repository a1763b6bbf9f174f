"""What a pack holds: as its journal says, or where that cannot be trusted, as the envelopes in its slots say."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.base import OffloadKey
from kvtier.tiering.fs.neighbours import PackContents, PackNamespace, SlotContent
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.records import Change, Kind, Records, last_of_each, names_of
from kvtier.tiering.kit.backend import allocate_page
from kvtier.tiering.kit.block_format import BlockName
from kvtier.tiering.kit.envelope import HeaderCheck, unpack

Times = npt.NDArray[np.uint32]
"""When each slot of a pack was last used, seconds since 1970; shape (num_slots,)."""

UNSURE_S = 120
"""Blocks stored less than this before the last one of a pack are read before they are announced, where the pack's owner
has not closed it: a loss of power may keep the journal and lose bytes. A kernel writes them within half a minute; more
reads more at the start."""


def take_over(namespace: PackNamespace, pack: Pack) -> PackContents:
    """Return what an adopted pack holds; what its journal has wrongly is put right in it first.

    Args:
        namespace: the pack's.
        pack: own.

    Raises:
        OSError: the journal cannot be read or written.
    """
    if pack.journal.is_lost:
        pack.journal.append(list(read_envelopes(pack)))
    held = last_of_each(pack.journal.tail().records)
    held = held[held["kind"] == Kind.STORED]
    if not (pack.was_closed and pack.same_boot) and len(held):
        is_unsure = held["stored_s"] >= max(0, int(held["stored_s"].max()) - UNSURE_S)
        is_lost = is_unsure.copy()
        suspects = held[is_unsure]
        is_lost[is_unsure] = [
            not _is_there(pack, slot, name)
            for slot, name in zip(suspects["slot"].tolist(), names_of(suspects), strict=True)
        ]
        if is_lost.any():
            pack.journal.append([Change(Kind.DROPPED, slot, b"") for slot in held["slot"][is_lost].tolist()])
            held = held[~is_lost]
    held = held[np.argsort(held["used_s"], kind="stable")]
    names, key = names_of(held), namespace.format.key
    # Plain names are keys.
    keys = [key(name) for name in names] if namespace.format.is_encrypted else cast("list[OffloadKey]", names)
    return PackContents(held["slot"].astype(np.int64), keys, held["stored_s"].copy(), held["used_s"].copy())


def in_order_of_use(records: Records, used_s: Times) -> Records:
    """Return the records of what slots hold, used longest ago first.

    Args:
        records: of a whole journal.
        used_s: when each slot was last used, as far as the owner knows.
    """
    held = last_of_each(records)
    held = held[held["kind"] == Kind.STORED]
    held["used_s"] = np.maximum(held["used_s"], used_s[held["slot"]])
    ordered: Records = held[np.argsort(held["used_s"], kind="stable")]
    return ordered


def contents_of(records: Records, namespace: PackNamespace) -> Iterator[SlotContent]:
    """Yield what the records say last of each slot."""
    records = last_of_each(records)
    is_stored = (records["kind"] == Kind.STORED).tolist()
    slots, stored_s, used_s = (records[name].tolist() for name in ("slot", "stored_s", "used_s"))
    key = namespace.format.key
    for slot, name, stored, begun, used in zip(
        slots, names_of(records), is_stored, stored_s, used_s, strict=True
    ):
        yield SlotContent(slot, key(name) if stored else None, begun, used)


def _is_there(pack: Pack, slot: int, name: BlockName) -> bool:
    """Return whether the envelope in a slot is of the block that the journal has."""
    return read_envelope(pack, slot) == (pack.header.namespace, name)


def read_envelopes(pack: Pack) -> Iterator[Change]:
    """Yield records of the blocks whose envelopes are in the slots of a pack."""
    for slot in range(pack.geometry.num_slots):
        found = read_envelope(pack, slot)
        if found is not None and found[0] == pack.header.namespace:
            yield Change(Kind.STORED, slot, found[1])


def read_envelope(pack: Pack, slot: int) -> tuple[bytes, bytes] | None:
    """Return the namespace and the name in a slot's header, None where it is none or cannot be read."""
    page = allocate_page()
    try:
        if pack.read(slot, [page]) < len(page):
            return None
    except OSError:
        return None
    found = unpack(page)
    return None if isinstance(found, HeaderCheck) else (found.namespace, found.key)
