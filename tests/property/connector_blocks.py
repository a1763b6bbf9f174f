"""The simulated engine's device blocks: a pool for all KV groups, a prefix cache, block tables.

It schedules nothing. The rules are vLLM's: blocks that left a window, and states but the last, are freed when
the request next asks for blocks, counted by the tokens of steps whose output has been taken; their places in the
table hold the null block; tables grow at their end; full blocks of confirmed tokens can be found by others as
soon as the step that computes them is planned.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.connector.fakes import HASH_TOKENS
from tests.property.connector_device import NULL_BLOCK
from tests.property.connector_requests import SimRequest, Tables, Work

from kvtier.config import GroupKind

CacheKey = tuple[bytes, int]


@dataclass(frozen=True)
class SimGroup:
    """One KV group."""

    kind: GroupKind
    block_tokens: int
    window: int | None = None

    def num_dead(self, num_tokens: int) -> int:
        """Return how many leading blocks the token after the first ``num_tokens`` does not need."""
        if self.kind is GroupKind.FULL:
            return 0
        num_seen_before = 1 if self.window is None else self.window - 1
        return max(0, num_tokens - num_seen_before) // self.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-num_tokens // self.block_tokens)


class BlockPool:
    """Device block numbers, counted references, and the blocks whose content a prefix cache knows."""

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(1, num_blocks))
        self._num_refs = [0] * num_blocks
        self._cached: dict[CacheKey, int] = {}
        self._key_of: dict[int, CacheKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, those that were freed first before others."""
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in taken:
            self._num_refs[block_id] = 1
            key = self._key_of.pop(block_id, None)
            if key is not None:
                del self._cached[key]
        return taken

    def find(self, key: CacheKey) -> int | None:
        """Return the block with this content, without taking it."""
        return self._cached.get(key)

    def is_free(self, block_id: int) -> bool:
        """Return whether nobody holds a block."""
        return self._num_refs[block_id] == 0

    def share(self, block_ids: Sequence[int]) -> None:
        """Take cached blocks."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                self._free.remove(block_id)
            self._num_refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back, the last of them first."""
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._free.append(block_id)

    def publish(self, block_id: int, key: CacheKey) -> bool:
        """Let others find a block that is full; return whether that is new."""
        if key in self._cached or block_id in self._key_of:
            return False
        self._cached[key] = block_id
        self._key_of[block_id] = key
        return True

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()
        self._key_of.clear()


class DeviceCache:
    """Block tables of all requests, and the prefix cache.

    Args:
        groups: the KV groups.
        num_blocks: size of the pool, the null block included.
    """

    def __init__(self, groups: Sequence[SimGroup], num_blocks: int) -> None:
        self.groups = groups
        self.pool = BlockPool(num_blocks)
        self.num_freed_early = 0
        self._new_states: set[int] = set()
        self._align_tokens = math.lcm(*(group.block_tokens for group in groups))

    def begin_step(self) -> None:
        """Forget which states the step before has published."""
        self._new_states.clear()

    def find_prefix(self, request: SimRequest) -> tuple[int, Tables]:
        """Return the longest prefix that every group holds enough of, and its blocks, without taking them."""
        longest = (request.num_tokens - 1) // self._align_tokens * self._align_tokens
        for end in range(longest, 0, -self._align_tokens):
            tables = self._find_blocks(request, end)
            if tables:
                return end, tables
        return 0, [[] for _ in self.groups]

    def holds_new_state(self, tables: Tables) -> bool:
        """Return whether a state among these is computed by the step being planned: it cannot be read yet."""
        return any(block_id in self._new_states for table in tables for block_id in table)

    def fits(self, request: SimRequest, local: Tables, num_computed: int) -> bool:
        """Return whether a waiting request could be given blocks for all its tokens."""
        return (
            self._count_needed(request.tables, local, num_computed, request.num_tokens) <= self.pool.num_free
        )

    def num_missing(self, request: SimRequest) -> int:
        """Return how many more blocks a request needs for all its tokens."""
        wanted = [group.num_blocks(request.num_tokens) for group in self.groups]
        return sum(max(0, num - len(table)) for num, table in zip(wanted, request.tables, strict=True))

    def grow(
        self, request: SimRequest, num_computed: int, num_tokens: int, local: Tables, num_reserved: int = 0
    ) -> Tables | None:
        """Give a request the blocks for ``num_tokens``.

        Args:
            request: whose tables grow.
            num_computed: tokens before this step, those to be loaded included.
            num_tokens: tokens after it.
            local: cached blocks that a request without blocks begins with.
            num_reserved: blocks that must stay free.

        Returns:
            What was appended to each table, or None when there are too few blocks.
        """
        self._free_dead(request, num_computed - request.num_in_flight)
        needed = self._count_needed(request.tables, local, num_computed, num_tokens)
        if needed > self.pool.num_free - num_reserved:
            return None
        lengths = [len(table) for table in request.tables]
        for group, table, cached in zip(self.groups, request.tables, local, strict=True):
            if not table:
                kept = cached[group.num_dead(num_computed) :]
                self.pool.share(kept)
                table.extend([NULL_BLOCK] * group.num_dead(num_computed))
                table.extend(kept)
        for group, table in zip(self.groups, request.tables, strict=True):
            table.extend(self.pool.allocate(max(0, group.num_blocks(num_tokens) - len(table))))
        return [table[length:] for table, length in zip(request.tables, lengths, strict=True)]

    def publish(self, request: SimRequest, num_tokens: int) -> None:
        """Let others find the full blocks of the first ``num_tokens``, as far as they are confirmed."""
        hashes = request.block_hashes
        num_tokens = min(num_tokens, request.num_tokens)
        for idx, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            for block, block_id in enumerate(table[: num_tokens // group.block_tokens]):
                key = (self._hash_of(hashes, group, block), idx)
                is_new = block_id != NULL_BLOCK and self.pool.publish(block_id, key)
                if is_new and group.kind is GroupKind.STATE:
                    self._new_states.add(block_id)

    def name_states(
        self, works: Sequence[Work], interval_tokens: int
    ) -> dict[str, list[tuple[int, int, int]]]:
        """Return the states that a planned step keeps, by request: group, device block, tokens before its end.

        With an interval shorter than a block some of them end within one.
        """
        named: dict[str, list[tuple[int, int, int]]] = {}
        for request, num_tokens in ((work.request, work.num_tokens) for work in works):
            first = (request.num_computed - num_tokens) // interval_tokens * interval_tokens
            confirmed = min(request.num_computed, request.num_tokens)
            named[request.request_id] = [
                (idx, request.tables[idx][(end - 1) // group.block_tokens], end)
                for idx, group in enumerate(self.groups)
                if group.kind is GroupKind.STATE
                for end in range(first + interval_tokens, confirmed + 1, interval_tokens)
            ]
        return named

    def free(self, request: SimRequest) -> None:
        """Take all blocks of a request back."""
        for table in request.tables:
            self.pool.free(table)
        request.tables = [[] for _ in self.groups]

    def _find_blocks(self, request: SimRequest, end: int) -> Tables:
        """Return the blocks that a prefix of ``end`` tokens needs, or nothing when one is missing."""
        hashes = request.block_hashes
        tables: Tables = []
        for idx, group in enumerate(self.groups):
            dead = group.num_dead(end)
            keys = [
                (self._hash_of(hashes, group, block), idx) for block in range(dead, end // group.block_tokens)
            ]
            found = [block_id for key in keys if (block_id := self.pool.find(key)) is not None]
            if len(found) < len(keys):
                return []
            tables.append([NULL_BLOCK] * dead + found)
        return tables

    def _count_needed(self, tables: Tables, local: Tables, num_computed: int, num_tokens: int) -> int:
        needed = 0
        for group, table, cached in zip(self.groups, tables, local, strict=True):
            dead = group.num_dead(num_computed)
            needed += max(0, group.num_blocks(num_tokens) - max(len(table), len(cached), dead))
            needed += sum(map(self.pool.is_free, cached[dead:]))
        return needed

    def _free_dead(self, request: SimRequest, num_processed: int) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            dead = table[: group.num_dead(num_processed)]
            self.num_freed_early += any(dead)
            self.pool.free(dead)
            table[: len(dead)] = [NULL_BLOCK] * len(dead)

    @staticmethod
    def _hash_of(hashes: Sequence[bytes], group: SimGroup, block: int) -> bytes:
        return hashes[(block + 1) * group.block_tokens // HASH_TOKENS - 1]
