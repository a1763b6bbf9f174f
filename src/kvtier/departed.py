"""Memory of blocks that left, or were not kept: when, and why.

Sixteen bytes for each block at most, in arrays that are made when the first block leaves: a ring of entries in the
order of their arrival, the oldest overwritten first, and a hash table whose chains run through the ring. An entry has
32 bits of a fingerprint and 28 bits of time in tenths of a second; the table's index has 20 bits more where it is
large. So one answer in 10^8 is about another block.

Batches are kept as they come, because the call that evicts must stay short. A look-up takes them into a dictionary, and
the arrays get some thousand keys at a time: putting in a few takes ten microseconds however few they are, and a request
that misses would pay that each time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.base import OffloadKey
from kvtier.misses import HOST_ORIGIN, Miss, MissCause, NotStored, not_stored

MAX_REMEMBERED_BLOCKS = 2**20
"""Blocks that one memory has at most, 16 MB. Fewer explain less of what a large tier has lost; more take memory from
the tier itself."""

MIN_REMEMBERED_BLOCKS = 65_536
"""Blocks that the memory of a place has at least, 1 MB once a block has left. What leaves is as much as the traffic
brings, however little a place holds: with fewer a small place forgets what it has lost before that is asked for."""

MAX_WAITING_KEYS = 2048
"""Keys that wait to be put into the arrays. More hold more keys alive, about 70 bytes each; fewer pay for the start of
each numpy call more often."""

RECENT_SHARE = 8
"""A memory keeps an eighth as many keys as it has entries in its dictionary, MAX_WAITING_KEYS at most: less, and a
small memory would be put into the arrays at each look-up; more, and it would be mostly dictionary."""

MAX_WAITING_BATCHES = 4096
"""Batches of other threads that wait. Each look-up takes them, so only a place that is never asked has more."""

MAX_CHAIN = 64
"""Entries that a look-up visits. Chains have one entry on average; only a table of a few entries has longer ones, and
an overwritten entry may lead into another chain."""

TAG_MASK = 2**32 - 1
HASH_MASK = 2**64 - 1
MIXER = 0x9E3779B97F4A7C15
"""Fibonacci hashing: the product's upper bits depend on all bits below, where hashes of small numbers stand."""

TICKS = 10
"""Parts of a second that a time is remembered in."""
MAX_TICKS = 2**28 - 1
"""The latest time that fits into an entry, 310 days after the start; later ones count as that."""

HOST_STRIDE = 8
"""A large manager remembers every eighth block that leaves, and recognises a prefix by any of eight blocks. Fewer, and
eviction takes longer; more, and prefixes of a few blocks that left look like new ones."""

MAX_ALL_REMEMBERED = 4096
"""A smaller manager remembers every block that leaves, 64 KB at most."""

KIND_BITS = 4
KIND_MASK = 2**KIND_BITS - 1
NO_ENTRY = -1


class Departure(NamedTuple):
    """Why and when a block left.

    Attributes:
        miss: why it is missing.
        ago_s: seconds since it left, to a tenth.
    """

    miss: Miss
    ago_s: float


class DepartedBlocks:
    """The blocks that left one place.

    Mutable are the batches that wait, which any thread may append to, and the dictionary and the arrays, which belong
    to one thread, the only caller of everything but ``report``. There is no lock: a deque passes the batches on.

    Args:
        max_blocks: blocks to remember; above MAX_REMEMBERED_BLOCKS it is that many.
        clock: seconds, monotonic.
        kinds: why blocks leave this place, at most 16; a block is added under the position of its reason.
        stride: of so many added blocks one is remembered; ``explain`` finds a run of them by any that is. It takes
            a stride-th of the time and of the memory.
    """

    def __init__(
        self,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        kinds: Iterable[Miss] = (),
        stride: int = 1,
    ) -> None:
        self.stride = stride
        self._skipped = 0
        self._num_entries = max(1, min(max_blocks, MAX_REMEMBERED_BLOCKS) // stride)
        bucket_bits = max(1, self._num_entries.bit_length() - 1)
        self._num_buckets, self._bucket_shift = 1 << bucket_bits, 64 - bucket_bits
        self._clock = clock
        self._began_s = clock()
        self._kinds = list(kinds)
        self._waiting: deque[tuple[Sequence[OffloadKey], float, int]] = deque()
        self._num_waiting = 0
        self._recent: dict[OffloadKey, int] = {}
        self._max_recent = min(MAX_WAITING_KEYS, self._num_entries // RECENT_SHARE)
        self._next = 0
        self._drop_arrays()

    @property
    def num_waiting(self) -> int:
        """Keys that were added and that no look-up has taken."""
        return self._num_waiting

    @property
    def num_batches(self) -> int:
        """Batches that the next look-up takes. Thread: any."""
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self._tags, self._stamps, self._following, self._heads)
        return sum(array.nbytes for array in arrays)

    def add_kind(self, miss: Miss) -> int:
        """Return the number under which blocks that are missing for this reason are added; at most 16 of them."""
        assert len(self._kinds) < 2**KIND_BITS, "a kind is four bits of an entry"
        self._kinds.append(miss)
        return len(self._kinds) - 1

    def add(self, keys: Sequence[OffloadKey], kind: int) -> None:
        """Remember that ``keys`` have just left; the caller does not change the sequence afterwards."""
        if self.stride > 1:
            first, self._skipped = self._skipped, (self._skipped - len(keys)) % self.stride
            keys = keys[first :: self.stride]
            if not keys:
                return
        self._waiting.append((keys, self._clock(), kind))
        self._num_waiting += len(keys)
        if self._num_waiting >= MAX_WAITING_KEYS:
            self.fold()

    def report(self, keys: Sequence[OffloadKey], kind: int) -> None:
        """Do what ``add`` does, from any thread, with every key; what nothing ever looks for is not remembered."""
        # Only the owner takes batches out: two that take could both want the last one.
        if keys and len(self._waiting) < MAX_WAITING_BATCHES:
            self._waiting.append((keys, self._clock(), kind))

    def find(self, key: OffloadKey) -> Departure | None:
        """Return why and when ``key`` left for the last time; None when that is not remembered."""
        if self._waiting:
            self._take_waiting()
        stamp = self._find_stamp(key)
        return None if stamp is None else Departure(self._kinds[stamp & KIND_MASK], self._ago_s(stamp))

    def explain(self, key: OffloadKey, behind: Sequence[OffloadKey] = ()) -> Miss | None:
        """Return why ``key`` is missing, with the seconds since it left; None when that is not remembered.

        With a stride a block that is none of those remembered is judged by the blocks ``behind`` it.
        A prefix leaves from its tail, so what is behind a block that left has left too, shortly before.
        """
        if self._waiting:
            self._take_waiting()
        elif not (self._recent or self._has_arrays):
            return None
        stamp = self._find_stamp(key)
        if stamp is None and self.stride > 1:
            for other in behind[: self.stride - 1]:
                stamp = self._find_stamp(other)
                if stamp is not None:
                    break
        if stamp is None:
            return None
        cause, tier, detail = self._kinds[stamp & KIND_MASK]
        ago_s = self._ago_s(stamp)
        return Miss(cause, tier, MappingProxyType({**detail, "ago_s": ago_s} if detail else {"ago_s": ago_s}))

    def clear(self) -> None:
        """Forget every block."""
        self._waiting.clear()
        self._recent.clear()
        self._num_waiting = self._next = 0
        self._drop_arrays()

    def _find_stamp(self, key: OffloadKey) -> int | None:
        """Return time and kind of the last departure of ``key``; None when that is not remembered."""
        stamp = self._recent.get(key)
        if stamp is not None or not self._has_arrays:
            return stamp
        mixed = hash(key) * MIXER & HASH_MASK
        tag, entry = mixed & TAG_MASK, self._heads_seen[mixed >> self._bucket_shift]
        for _ in range(MAX_CHAIN):
            if entry == NO_ENTRY:
                return None
            if self._tags_seen[entry] == tag:
                return self._stamps_seen[entry]
            entry = self._following_seen[entry]
        return None

    def _ago_s(self, stamp: int) -> float:
        ticks = int((self._clock() - self._began_s) * TICKS) - (stamp >> KIND_BITS)
        return ticks / TICKS if ticks > 0 else 0.0

    def _take_waiting(self) -> None:
        """Take the batches that wait into the dictionary, and that into the arrays when it is full."""
        self._num_waiting = 0
        recent = self._recent
        # What other threads append meanwhile waits for the next call.
        for _ in range(len(self._waiting)):
            keys, left_s, kind = self._waiting.popleft()
            recent.update(dict.fromkeys(keys, self._stamp(left_s, kind)))
            if len(recent) > self._max_recent:
                self._put_recent()

    def fold(self) -> None:
        """Put everything into the arrays."""
        self._take_waiting()
        if self._recent:
            self._put_recent()

    def _put_recent(self) -> None:
        """Put the dictionary into the arrays."""
        keys, stamps = list(self._recent), np.fromiter(self._recent.values(), np.uint32, len(self._recent))
        self._recent.clear()
        num_keys = len(keys)
        if not self._has_arrays:
            self._make_arrays()
        hashes = _fingerprints(keys)
        # What is overwritten within one call is not written, and a part ends where the ring begins anew.
        begin = max(0, num_keys - self._num_entries)
        while begin < num_keys:
            end = min(num_keys, begin + self._num_entries - self._next)
            self._insert(hashes[begin:end], stamps[begin:end])
            begin = end

    def _drop_arrays(self) -> None:
        self._tags = self._stamps = np.empty(0, np.uint32)
        self._following = self._heads = np.empty(0, np.int32)
        self._has_arrays = False
        self._view()

    def _make_arrays(self) -> None:
        self._tags = np.zeros(self._num_entries, np.uint32)
        self._stamps = np.zeros(self._num_entries, np.uint32)
        self._following = np.full(self._num_entries, NO_ENTRY, np.int32)
        self._heads = np.full(self._num_buckets, NO_ENTRY, np.int32)
        self._has_arrays = True
        self._view()

    def _view(self) -> None:
        # An element of a memoryview is a number in a third of the time that one of an array takes.
        self._tags_seen, self._stamps_seen = self._tags.data, self._stamps.data
        self._following_seen, self._heads_seen = self._following.data, self._heads.data

    def _stamp(self, left_s: float, kind: int) -> int:
        ticks = max(0, min(int((left_s - self._began_s) * TICKS), MAX_TICKS))
        return ticks << KIND_BITS | kind

    def _insert(self, hashes: npt.NDArray[np.uint64], stamps: npt.NDArray[np.uint32]) -> None:
        """Write entries over the oldest ones; they fit before the end of the ring."""
        first, end = self._next, self._next + len(hashes)
        self._next = end % self._num_entries
        self._tags[first:end] = hashes & np.uint64(TAG_MASK)
        self._stamps[first:end] = stamps
        buckets = (hashes >> np.uint64(self._bucket_shift)).astype(np.int64)
        entries = np.arange(first, end, dtype=np.int32)
        heads, following = self._heads, self._following
        before = heads[buckets]
        heads[buckets] = entries
        is_last = heads[buckets] == entries
        if not is_last.all():
            # Several of one bucket: all but the last are chained one by one, so that the last leads to them.
            heads[buckets] = before
            for bucket, entry in zip(buckets[~is_last].tolist(), entries[~is_last].tolist(), strict=True):
                following[entry] = heads[bucket]
                heads[bucket] = entry
            buckets, entries = buckets[is_last], entries[is_last]
            before = heads[buckets]
            heads[buckets] = entries
        following[entries] = before


def _fingerprints(keys: Sequence[OffloadKey]) -> npt.NDArray[np.uint64]:
    """Return a fingerprint of each key, shape (len(keys),). Pure."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64) * np.uint64(MIXER)


class Loss(IntEnum):
    """Why a tier no longer has a block; positions in the kinds of ``make_losses``.

    EXPIRED is of a tier that removes what has outlived its time to live. Where the backend does that by itself,
    ``kvtier.tiering.kit.losses`` works it out. FOREIGN is there and cannot be read by this engine.
    """

    EVICTED = 0
    DAMAGED = 1
    REMOVED = 2
    EXPIRED = 3
    PURGED = 4
    FOREIGN = 5


def make_losses(tier: str, max_blocks: int, clock: Callable[[], float]) -> DepartedBlocks:
    """Return an empty memory.

    Args:
        tier: type of the tier.
        max_blocks: blocks that it can hold.
        clock: seconds, monotonic.
    """
    removed = Miss(MissCause.PURGED, tier, MappingProxyType({"reason": "removed by another program"}))
    kinds = (
        Miss(MissCause.EVICTED, tier),
        Miss(MissCause.DAMAGED, tier),
        removed,
        Miss(MissCause.EXPIRED, tier),
        Miss(MissCause.PURGED, tier),
        Miss(MissCause.LOAD_FAILED, tier, MappingProxyType({"reason": "of another version or key"})),
    )
    return DepartedBlocks(max(max_blocks, MIN_REMEMBERED_BLOCKS), clock, kinds)


class HostDeparture(IntEnum):
    """Why a block is not in host memory; positions in the kinds of ``make_host_departures``."""

    EVICTED = 0
    RESET = 1
    REUSE_FILTER = 2
    ADMISSION = 3
    JOB_FAILED = 4
    PURGED = 5
    DROPPED = 6
    EXPIRED = 7


def make_host_departures(num_blocks: int, clock: Callable[[], float]) -> DepartedBlocks:
    """Return an empty memory of the blocks of host memory.

    Args:
        num_blocks: blocks that it can hold.
        clock: seconds, monotonic.
    """
    kinds = (
        Miss(MissCause.EVICTED, HOST_ORIGIN),
        Miss(MissCause.PURGED, HOST_ORIGIN, MappingProxyType({"reason": "reset"})),
        not_stored(NotStored.REUSE_FILTER),
        not_stored(NotStored.ADMISSION),
        not_stored(NotStored.JOB_FAILED),
        Miss(MissCause.PURGED, HOST_ORIGIN),
        Miss(MissCause.DAMAGED, HOST_ORIGIN, MappingProxyType({"reason": "audit"})),
        Miss(MissCause.EXPIRED, HOST_ORIGIN),
    )
    stride = HOST_STRIDE if num_blocks > MAX_ALL_REMEMBERED else 1
    return DepartedBlocks(max(num_blocks, MIN_REMEMBERED_BLOCKS), clock, kinds, stride)
