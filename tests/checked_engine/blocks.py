"""The checked engine's device blocks: one pool for all KV groups, a prefix cache, block tables.

It schedules nothing. The rules are vLLM's: blocks that left a window, and states but the last, are freed when
the request next asks for blocks, counted by the tokens of steps whose output has been taken; their places in the
table hold the null block; tables grow at their end; full blocks of confirmed tokens can be found by others as
soon as the step that computes them is planned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.checked_engine.memory import NULL_BLOCK
from tests.checked_engine.requests import CheckedRequest, Tables, Work

from kvtier.config import GroupKind
from kvtier.engines.common.block_pool import DeviceBlockPool


@dataclass(frozen=True)
class CheckedGroup:
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


class DeviceCache:
    """Block tables of all requests, and the prefix cache.

    Args:
        groups: the KV groups.
        num_blocks: size of the pool, the null block included.

    Attributes:
        num_freed_early: how often blocks were freed that their request did not need any more.
    """

    def __init__(self, groups: Sequence[CheckedGroup], num_blocks: int) -> None:
        self.groups = groups
        self.num_freed_early = 0
        self._pool = DeviceBlockPool(num_blocks)
        assert self._pool.allocate((), 1) == [NULL_BLOCK]
        self._new_states: set[int] = set()
        self._align_tokens = math.lcm(*(group.block_tokens for group in groups))

    def begin_step(self) -> None:
        """Forget which states the step before has published."""
        self._new_states.clear()

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._pool.drop_cached()

    def find_prefix(self, request: CheckedRequest) -> tuple[int, Tables]:
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

    def fits(
        self,
        request: CheckedRequest,
        local: Tables,
        num_computed: int,
        num_tokens: int,
        num_reserved: int = 0,
    ) -> bool:
        """Return whether a request could be given blocks for so many tokens; some blocks must stay free."""
        num_new, shared = num_reserved, list[int]()
        for group, table, cached in zip(self.groups, request.tables, local, strict=True):
            dead = group.num_dead(num_computed)
            num_new += max(0, group.num_blocks(num_tokens) - max(len(table), len(cached), dead))
            shared += cached[dead:]
        return self._pool.has_room(shared, num_new)

    def num_missing(self, request: CheckedRequest) -> int:
        """Return how many more blocks a request needs for all its tokens."""
        wanted = [group.num_blocks(request.num_tokens) for group in self.groups]
        return sum(max(0, num - len(table)) for num, table in zip(wanted, request.tables, strict=True))

    def grow(
        self,
        request: CheckedRequest,
        num_computed: int,
        num_tokens: int,
        local: Tables,
        num_reserved: int = 0,
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
        if not self.fits(request, local, num_computed, num_tokens, num_reserved):
            return None
        lengths = [len(table) for table in request.tables]
        for group, table, cached in zip(self.groups, request.tables, local, strict=True):
            if not table:
                dead = group.num_dead(num_computed)
                table.extend([NULL_BLOCK] * dead + self._pool.allocate(cached[dead:], 0))
        for group, table in zip(self.groups, request.tables, strict=True):
            table.extend(self._pool.allocate((), max(0, group.num_blocks(num_tokens) - len(table))))
        return [table[length:] for table, length in zip(request.tables, lengths, strict=True)]

    def publish(self, request: CheckedRequest, num_tokens: int) -> None:
        """Let others find the full blocks of the first ``num_tokens``, as far as they are confirmed."""
        num_tokens = min(num_tokens, request.num_tokens)
        for idx, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            for block, block_id in enumerate(table[: num_tokens // group.block_tokens]):
                if block_id == NULL_BLOCK:
                    continue
                keys = [request.key_of(idx, (block + 1) * group.block_tokens)]
                if group.kind is GroupKind.STATE and not self._pool.find_prefix(keys):
                    self._new_states.add(block_id)
                self._pool.publish([block_id], keys)

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

    def free(self, request: CheckedRequest) -> None:
        """Take all blocks of a request back."""
        for table in request.tables:
            self._free(table)
        request.tables = [[] for _ in self.groups]

    def _find_blocks(self, request: CheckedRequest, end: int) -> Tables:
        """Return the blocks that a prefix of ``end`` tokens needs, or nothing when one is missing."""
        tables: Tables = []
        for idx, group in enumerate(self.groups):
            dead = group.num_dead(end)
            blocks = range(dead, end // group.block_tokens)
            found = self._pool.find_prefix(
                [request.key_of(idx, (block + 1) * group.block_tokens) for block in blocks]
            )
            if len(found) < len(blocks):
                return []
            tables.append([NULL_BLOCK] * dead + found)
        return tables

    def _free_dead(self, request: CheckedRequest, num_processed: int) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            dead = table[: group.num_dead(num_processed)]
            self.num_freed_early += any(dead)
            self._free(dead)
            table[: len(dead)] = [NULL_BLOCK] * len(dead)

    def _free(self, block_ids: Sequence[int]) -> None:
        self._pool.free([block_id for block_id in block_ids if block_id != NULL_BLOCK])
