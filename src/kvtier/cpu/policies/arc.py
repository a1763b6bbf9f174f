"""ARC, the adaptive replacement cache: recency and frequency in two lists, balanced by ghost hits.

t1 holds blocks used once since they were stored, t2 those used again. The key of an evicted block stays as a ghost in
b1 or b2. A use of a ghost means that its list was too short: the target size of t1 grows for a ghost of b1 and shrinks
for one of b2, and an eviction takes from t1 while t1 is longer than its target.

Offloading differs from the paper's page cache in five ways:

- A miss shows twice, as a touch of a key that is not held and later as its insert. The first of the two moves the
  target, once for each eviction of the key.
- Blocks in flight or pinned cannot be evicted. When the list that the target selects has no idle block, the other list
  is used.
- One eviction frees many slots. The target does not move within it, and the paper's tie-break on the incoming key
  (|t1| = target and a hit in b2) is dropped.
- Ghosts are forgotten when t1 takes a block, by the paper's limits: t1 and b1 have at most as many keys as the
  capacity, all four lists twice as many.
- When t1 fills the whole cache, the paper keeps no ghost of it, and cannot see that t1 is too short. Here it keeps one.

On flat streams the hits are the paper's (tests/cpu/policies/test_peers.py).

Source: N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST'03.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import (
    BlockStatus,
    CachePolicy,
    check_same_blocks,
)
from kvtier.cpu.policies.parked_blocks import ParkedBlocks
from kvtier.errors import InvariantError

STALE_SHIFT = 4
"""The queue is rebuilt when more than one entry in 2**4 is stale. A smaller shift wastes memory on stale
entries, a larger one rebuilds more often; at 4 a deletion costs at most 16 steps of a rebuild."""

MIN_STALE = 64
"""Stale entries below which a rebuild is not worth its fixed cost."""


class GhostList(MutableMapping[OffloadKey, bool]):
    """Keys of evicted blocks in the order of their eviction, each with whether a use of it has moved the target.

    The order is a queue of keys beside a dictionary. A key that is deleted from the middle leaves a stale entry in the
    queue, which is skipped later. An OrderedDict would do the same in one line, but costs up to 200 bytes a key after
    long use: its hash table is up to six times its length, and each bucket carries a pointer. This costs at most 150
    bytes.
    """

    def __init__(self) -> None:
        self._members: dict[OffloadKey, bool] = {}
        self._queue: deque[OffloadKey] = deque()
        # INVARIANT: stale entries of a key stand before its live one, so the first ones found are stale.
        self._num_stale_of: dict[OffloadKey, int] = {}
        self._num_stale = 0

    def __getitem__(self, key: OffloadKey) -> bool:
        return self._members[key]

    def __setitem__(self, key: OffloadKey, memory: bool) -> None:
        if key not in self._members:
            self._queue.append(key)
        self._members[key] = memory

    def __delitem__(self, key: OffloadKey) -> None:
        del self._members[key]
        self._num_stale_of[key] = self._num_stale_of.get(key, 0) + 1
        self._num_stale += 1
        if self._num_stale > max(MIN_STALE, len(self._members) >> STALE_SHIFT):
            self._queue = deque(self)
            self._num_stale_of.clear()
            self._num_stale = 0

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def pop_oldest(self) -> OffloadKey:
        """Forget and return the key that was evicted first.

        Raises:
            KeyError: the list is empty.
        """
        if not self._members:
            raise KeyError("pop_oldest() of an empty ghost list: check its length first")
        key = self._queue.popleft()
        while key in self._num_stale_of:
            self._num_stale_of[key] -= 1
            if self._num_stale_of[key] == 0:
                del self._num_stale_of[key]
            self._num_stale -= 1
            key = self._queue.popleft()
        del self._members[key]
        return key

    def clear(self) -> None:
        """Forget every key."""
        self._members.clear()
        self._queue.clear()
        self._num_stale_of.clear()
        self._num_stale = 0

    def __repr__(self) -> str:
        return f"GhostList({len(self._members)} keys, {self._num_stale} stale)"


class ARCCachePolicy(CachePolicy):
    """ARC; when the slots of an eviction are filled, both ghost lists together are no longer than the capacity.

    Attributes:
        t1: blocks used once, oldest first but for parked ones.
        t2: blocks used more than once, in the same order.
        parked: the parked blocks of t1 and of t2.
        b1: keys evicted from t1, oldest first.
        b2: keys evicted from t2, oldest first.
        target_t1_size: the length t1 should have, from 0 to the capacity; the paper's p.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.t1: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.t2: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.b1 = GhostList()
        self.b2 = GhostList()
        self.target_t1_size = 0.0
        self.parked = (ParkedBlocks(self.t1), ParkedBlocks(self.t2))

    def expect_idle(self) -> None:
        for parked in self.parked:
            parked.is_notified = True

    def on_idle(self, keys: Iterable[OffloadKey]) -> None:
        for parked in self.parked:
            parked.on_idle(keys)

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.t1.get(key) or self.t2.get(key)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        ghosts = self._ghosts_with(key)
        if ghosts is None:
            self._forget_for_a_new_block()
            self.t1[key] = block
            return
        self._adapt(key, ghosts)
        del ghosts[key]
        self.t2[key] = block

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        if self.b1 or self.b2:
            super().insert_many(keys, blocks)
        else:
            self.t1.update(zip(keys, blocks, strict=True))

    def remove(self, key: OffloadKey) -> None:
        if self.t1.pop(key, None) is None:
            self.t2.pop(key, None)
        self._forget_places((key,))

    def touch(self, keys: Collection[OffloadKey]) -> None:
        t1, t2 = self.t1, self.t2
        self._forget_places(keys)
        for key in reversed(tuple(keys)):
            block = t1.get(key)
            if block is not None and block.ref_cnt < 0:
                t1.move_to_end(key)
            elif block is not None:
                del t1[key]
                t2[key] = block
            elif key in t2:
                t2.move_to_end(key)
            else:
                ghosts = self._ghosts_with(key)
                if ghosts is not None:
                    self._adapt(key, ghosts)

    def renew(self, keys: Collection[OffloadKey]) -> None:
        self._forget_places(keys)
        for key in reversed(tuple(keys)):
            for blocks in (self.t1, self.t2):
                if key in blocks:
                    blocks.move_to_end(key)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        victims = self._plan_eviction(n, protected)
        is_possible = len(victims) == n
        for key, _ in victims if is_possible else ():
            self._make_ghost(key)
        self._end_walk(victims if is_possible else ())
        return victims if is_possible else None

    def next_victims(self, n: int) -> list[OffloadKey]:
        victims = [key for key, _ in self._plan_eviction(n, ())]
        self._end_walk(())
        return victims

    def clear(self) -> None:
        for part in (self.t1, self.t2, self.b1, self.b2, *self.parked):
            part.clear()
        self.target_t1_size = 0.0

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks({**self.t1, **self.t2}, held)
        for parked in self.parked:
            parked.check()
        num_keys = len({*self.t1, *self.t2, *self.b1, *self.b2})
        num_ghosts = len(self.b1) + len(self.b2)
        if num_keys != len(held) + num_ghosts:
            raise InvariantError("a key is in two of t1, t2, b1 and b2")
        if num_keys > 2 * self.cache_capacity:
            raise InvariantError(
                f"{num_ghosts} ghosts and {len(held)} blocks for a capacity of {self.cache_capacity}"
            )
        if not 0 <= self.target_t1_size <= self.cache_capacity:
            raise InvariantError(f"target_t1_size={self.target_t1_size} is not within the capacity")

    def _plan_eviction(
        self, n: int, protected: Collection[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]]:
        """Return up to ``n`` victims in order; the caller ends the plan with ``_end_walk``."""
        recent, frequent = (parked.walk(protected) for parked in self.parked)
        num_recent = len(self.t1)
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        for _ in range(n):
            first, second = (recent, frequent) if num_recent > self.target_t1_size else (frequent, recent)
            victim = next(first, None) or next(second, None)
            if victim is None:
                break
            victims.append(victim)
            num_recent -= victim[0] in self.t1
        return victims

    def _end_walk(self, left: Collection[tuple[OffloadKey, BlockStatus]]) -> None:
        for parked in self.parked:
            parked.end_walk(left)

    def _forget_places(self, keys: Iterable[OffloadKey]) -> None:
        for parked in self.parked:
            parked.forget(keys)

    def _ghosts_with(self, key: OffloadKey) -> GhostList | None:
        if key in self.b1:
            return self.b1
        return self.b2 if key in self.b2 else None

    def _adapt(self, key: OffloadKey, ghosts: GhostList) -> None:
        if ghosts[key]:  # a waiting request touches its keys in every step; count one miss
            return
        ghosts[key] = True
        if ghosts is self.b1:
            step = max(1.0, len(self.b2) / len(self.b1))
            self.target_t1_size = min(self.target_t1_size + step, float(self.cache_capacity))
        else:
            step = max(1.0, len(self.b1) / len(self.b2))
            self.target_t1_size = max(self.target_t1_size - step, 0.0)

    def _make_ghost(self, key: OffloadKey) -> None:
        if self.t1.pop(key, None) is not None:
            self.b1[key] = False
        else:
            del self.t2[key]
            self.b2[key] = False

    def _forget_for_a_new_block(self) -> None:
        """Forget a ghost before t1 takes a block: t1 and b1 within the capacity, all four lists within twice that."""
        num_recent = len(self.t1) + len(self.b1)
        is_t1_everything = len(self.t1) + 1 >= self.cache_capacity
        if num_recent >= self.cache_capacity and len(self.b1) > is_t1_everything:
            self.b1.pop_oldest()
        elif num_recent + len(self.t2) + len(self.b2) >= 2 * self.cache_capacity:
            (self.b2 or self.b1).pop_oldest()
