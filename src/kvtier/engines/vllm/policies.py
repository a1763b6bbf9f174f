"""kvtier's eviction policies for vLLM's own CPU manager, selected with ``cache_policy_module_path``.

The algorithms are those of ``kvtier.cpu.policies``, applied to vLLM's block objects, whose ``ref_cnt`` means the same.
What differs is when vLLM reports a use. From 0.31 on it does so once per request, at its end, and names the blocks that
the request has only stored. These are reordered, so that the tail of a prefix is evicted before its head, and count as
used once. Before 0.31 vLLM touches blocks while a request is scheduled. From 0.33 on ``on_request_access`` reports
each key of a request before it counts as a use; nothing is done then, as in vLLM's own ARC.

Source: the contract is that of ``vllm/v1/kv_offload/cpu/policies/base.py``, vLLM 0.28 to 0.33.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import ReqContext as StockReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy as StockPolicy

from kvtier.base import OffloadKey
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import CachePolicy, clear_policy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.registry import REMOVED_POLICIES
from kvtier.errors import ConfigError

PREFIX = "KVTier"
"""Begins the names of the policies here."""

StockBlock = Any
"""vLLM's block: a slot and a ``ref_cnt``. Any: its name and module change with the release."""


class KVTierPolicy(StockPolicy):
    """Adapts one of kvtier's policies to vLLM's contract. Used from the scheduler's thread.

    Args:
        cache_capacity: blocks that the primary tier can hold.
        unknown: arguments of later releases; ignored.

    Attributes:
        policy: kvtier's policy.
    """

    policy_class: ClassVar[type[CachePolicy]]
    """kvtier's or your own; at the end of a request vLLM reports what it has stored, and ``renew`` orders that."""

    def __init__(self, cache_capacity: int, **unknown: object) -> None:
        del unknown
        super().__init__(cache_capacity)
        self._cache_capacity = cache_capacity
        self.policy = self.policy_class(cache_capacity)

    def get(self, key: OffloadKey) -> StockBlock | None:
        """Return the held block under ``key``, or None."""
        return self.policy.get(key)

    def insert(
        self, key: OffloadKey, chunk: StockBlock, /, req_context: StockReqContext | None = None
    ) -> None:
        """Hold a block whose write starts; from 0.33 on vLLM names the request that stores it."""
        del req_context
        self.policy.insert(key, chunk)

    def remove(self, key: OffloadKey) -> None:
        """Stop holding a block whose write failed."""
        self.policy.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: StockReqContext) -> None:
        """Record a use of ``keys``, the first of them most recent."""
        del req_context
        self.policy.touch(tuple(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: StockReqContext) -> None:
        """Record a use of ``keys`` that are not held."""
        self.touch(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: Collection[OffloadKey],
        reused_keys: Collection[OffloadKey],
        req_context: StockReqContext,
    ) -> None:
        """Record the blocks that a request has used; blocks that it has only stored are reordered without a use."""
        # One at a time, tail first: used and stored blocks share one order, in which the head ends up most recent.
        for key in reversed(in_prefix_order(key_groups, req_context)):
            if key in insertion_only_keys:
                self.policy.renew((key,))
            elif key in reused_keys:
                self.policy.touch((key,))

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, StockBlock]] | None:
        """Evict ``n`` idle blocks outside ``protected``, or none at all."""
        return self.policy.evict(n, protected)

    def clear(self) -> None:
        """Forget every block and what was learned."""
        clear_policy(self.policy, self._cache_capacity)


class KVTierLRU(KVTierPolicy):
    """kvtier's LRU; it counts no uses, so reordering a block is the same as using it."""

    policy_class = LRUCachePolicy


class KVTierARC(KVTierPolicy):
    """kvtier's ARC, in which a second use promotes a block."""

    policy_class = ARCCachePolicy
    policy: ARCCachePolicy


def __getattr__(name: str) -> object:
    """Refuse the name of a policy that no longer comes with kvtier: vLLM takes the setting's name from this module.

    Raises:
        ConfigError: it is such a name.
        AttributeError: the module does not have the name.
    """
    if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() in REMOVED_POLICIES:
        remedy = "no longer comes with kvtier: write KVTierLRU or KVTierARC, or a subclass of KVTierPolicy"
        raise ConfigError("eviction_policy", name, remedy)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def in_prefix_order(
    key_groups: Sequence[Sequence[OffloadKey]], req_context: StockReqContext
) -> list[OffloadKey]:
    """Return the keys of all KV groups, head of the prefix first if vLLM gives their positions. Pure."""
    keys = [key for group in key_groups for key in group]
    positions = [req_context.get_offload_key_position(key) for key in keys]
    if None in positions:
        return keys
    return [key for _, key in sorted(zip(positions, keys, strict=True), key=lambda pair: pair[0])]
