"""The suite of policies accepts one that evicts the worst of a random sample, as Redis does."""

import random
from collections.abc import Collection, Mapping
from typing import ClassVar

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, check_same_blocks
from kvtier.testing.policy_suite import PolicySuite

SAMPLE = 2
"""Smaller than Redis's five, so that four blocks already leave in an order that nobody can foresee."""


class SamplingPolicy(CachePolicy):
    """Evicts the least recently used of a few idle blocks that it draws."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._blocks: dict[OffloadKey, BlockStatus] = {}
        self._used_at: dict[OffloadKey, int] = {}
        self._num_uses = 0
        self._random = random.SystemRandom()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self._blocks.get(key)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self._blocks[key] = block
        self._use(key)

    def remove(self, key: OffloadKey) -> None:
        if self._blocks.pop(key, None) is not None:
            del self._used_at[key]

    def touch(self, keys: Collection[OffloadKey]) -> None:
        for key in reversed(list(keys)):
            if key in self._blocks:
                self._use(key)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        idle = [key for key, block in self._blocks.items() if block.ref_cnt == 0 and key not in protected]
        if len(idle) < n:
            return None
        victims = []
        for _ in range(n):
            key = min(self._random.sample(idle, min(SAMPLE, len(idle))), key=self._used_at.__getitem__)
            idle.remove(key)
            victims.append((key, self._blocks[key]))
            self.remove(key)
        return victims

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self._blocks, held)

    def _use(self, key: OffloadKey) -> None:
        self._num_uses += 1
        self._used_at[key] = self._num_uses


class TestSampling(PolicySuite):
    """A policy whose order of eviction is drawn."""

    evicts_in_order: ClassVar[bool] = False

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        return SamplingPolicy(cache_capacity)
