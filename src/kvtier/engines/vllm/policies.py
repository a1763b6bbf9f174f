"""kvtier's eviction policies for vLLM's own CPU manager: ``kvtier-lru``, ``kvtier-arc`` and ``kvtier-hazard``.

The algorithms are those of ``kvtier.cpu.policies``, applied to vLLM's block objects, whose ``ref_cnt`` means the same.
What differs is when vLLM reports a use. From 0.31 on it does so once per request, at its end, and names the blocks that
the request has only stored. These are reordered, so that the tail of a prefix is evicted before its head, and count as
used once. Before 0.31 vLLM touches blocks while a request is scheduled.

Until then a request's blocks stand in the order in which they were stored, its head first. So an eviction that would
take a block of an unfinished request puts that request's blocks in order before (``LiveRequests``). vLLM names the
request of a block that is stored, and its position, from 0.31 on, that of a block that is loaded from 0.33 on.

Source: the contract is that of ``vllm/v1/kv_offload/cpu/policies/base.py``, vLLM 0.28 to 0.33.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import ReqContext as StockReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy as StockPolicy

from kvtier.base import OffloadKey
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import CachePolicy, clear_policy
from kvtier.cpu.policies.hazard import HazardCachePolicy
from kvtier.cpu.policies.learning import make_arrived
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.registry import REMOVED_POLICIES
from kvtier.engines.vllm.compat import release
from kvtier.engines.vllm.stock_jobs import kvtier_context
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
        self._live = LiveRequests()

    def get(self, key: OffloadKey) -> StockBlock | None:
        """Return the held block under ``key``, or None."""
        return self.policy.get(key)

    def insert(
        self, key: OffloadKey, chunk: StockBlock, /, req_context: StockReqContext | None = None
    ) -> None:
        """Hold a block whose write starts; from 0.33 on vLLM names the request that stores it."""
        if req_context is not None:
            self._live.note((key,), req_context)
        self.policy.insert(key, chunk)

    def remove(self, key: OffloadKey) -> None:
        """Stop holding a block whose write failed."""
        self.policy.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: StockReqContext) -> None:
        """Record a use of ``keys``, the first of them most recent."""
        del req_context
        self.policy.touch(tuple(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: StockReqContext) -> None:
        """Record a use of ``keys`` that are not held, and which the request will store."""
        keys = tuple(keys)
        self._live.note(keys, req_context)
        self.policy.touch(keys)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: StockReqContext) -> None:
        """Note that ``keys`` belong to an unfinished request; its uses count at its end."""
        self._live.note(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: Collection[OffloadKey],
        reused_keys: Collection[OffloadKey],
        req_context: StockReqContext,
    ) -> None:
        """Record the blocks that a request has used; blocks that it has only stored are reordered without a use."""
        self._live.end(req_context)
        # One at a time, tail first: used and stored blocks share one order, in which the head ends up most recent.
        for key in reversed(in_prefix_order(key_groups, req_context)):
            if key in insertion_only_keys:
                self.policy.renew((key,))
            elif key in reused_keys:
                self.policy.touch((key,))

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, StockBlock]] | None:
        """Evict ``n`` idle blocks outside ``protected``, or none at all; of unfinished requests the tails first."""
        while unordered := self._live.unordered_of(self.policy.next_victims(n + len(protected))):
            for request in unordered:
                self.policy.renew(request.put_in_order())
        return self.policy.evict(n, protected)

    def clear(self) -> None:
        """Forget every block and what was learned."""
        self._live = LiveRequests()
        clear_policy(self.policy, self._cache_capacity)


class KVTierLRU(KVTierPolicy):
    """kvtier's LRU; it counts no uses, so reordering a block is the same as using it."""

    policy_class = LRUCachePolicy


class KVTierARC(KVTierPolicy):
    """kvtier's ARC, in which a second use promotes a block."""

    policy_class = ARCCachePolicy
    policy: ARCCachePolicy


class KVTierHazard(KVTierPolicy):
    """kvtier's hazard policy. It learns from each request at its end: vLLM names its blocks then.

    vLLM asks no policy which blocks to store, so what it would refuse is stored and leaves first.

    Args:
        cache_capacity: blocks that the primary tier can hold.
        clock: seconds, monotonic.
        unknown: arguments of later releases; ignored.

    Raises:
        ConfigError: this release of vLLM does not report the end of a request.
    """

    policy_class = HazardCachePolicy
    policy: HazardCachePolicy

    def __init__(
        self, cache_capacity: int, clock: Callable[[], float] = time.monotonic, **unknown: object
    ) -> None:
        super().__init__(cache_capacity, **unknown)
        self._clock = clock
        if not hasattr(StockPolicy, "on_request_finished"):
            remedy = f"learns from requests, and vLLM {release()} reports none (it does from 0.31 on): write kvtier-lru"
            raise ConfigError("eviction_policy", "kvtier-hazard", remedy)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: Collection[OffloadKey],
        reused_keys: Collection[OffloadKey],
        req_context: StockReqContext,
    ) -> None:
        # vLLM names no block that the device has held all along, so the head of a known prefix may be missing.
        chains = [(*self.policy.known_prefix(keys[0]), *keys) for keys in key_groups if keys]
        if chains:
            context = kvtier_context(req_context)
            self.policy.note_request(make_arrived(chains, context, self._clock()))
            self.policy.on_finished(context.req_id)
            # The request is known only now. Held again, what the policy would have refused is the first to leave.
            held = {key: block for key in chain(*chains) if (block := self.policy.get(key)) is not None}
            self.policy.insert_many(held.keys(), held.values())
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)


class LiveRequest:
    """The blocks of one unfinished request.

    Attributes:
        positions: its blocks, each with the last token that it covers.
        is_ordered: whether the policy has them in order.
    """

    __slots__ = ("is_ordered", "positions")

    def __init__(self) -> None:
        self.positions: dict[OffloadKey, int] = {}
        self.is_ordered = True

    def put_in_order(self) -> list[OffloadKey]:
        """Return its blocks, head first, and count them as ordered."""
        self.is_ordered = True
        return sorted(self.positions, key=self.positions.__getitem__)


class LiveRequests:
    """Which unfinished request each block belongs to: the one that named it last."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveRequest] = {}
        self._owners: dict[OffloadKey, LiveRequest] = {}

    def note(self, keys: Iterable[OffloadKey], req_context: StockReqContext) -> None:
        """Add ``keys`` to a request's blocks, as far as vLLM gives their positions."""
        request = self._by_id.get(req_context.req_id) or LiveRequest()
        for key in keys:
            position = request.positions.get(key, position_of(key, req_context))
            if position is None:
                continue
            self._owners[key] = request
            if key not in request.positions:
                request.positions[key] = position
                request.is_ordered = len(request.positions) == 1
        if request.positions:
            self._by_id[req_context.req_id] = request

    def end(self, req_context: StockReqContext) -> None:
        """Forget a request."""
        request = self._by_id.pop(req_context.req_id, None)
        for key in () if request is None else request.positions:
            if self._owners.get(key) is request:
                del self._owners[key]

    def unordered_of(self, victims: Collection[OffloadKey] | None) -> list[LiveRequest]:
        """Return the requests whose blocks are not in order, of those that would lose one; oldest first. Pure.

        Args:
            victims: the blocks that leave next; None when the policy does not tell.
        """
        if not self._owners:
            return []
        found = self._by_id.values() if victims is None else map(self._owners.get, victims)
        return [one for one in dict.fromkeys(found) if one is not None and not one.is_ordered]


def __getattr__(name: str) -> object:
    """Refuse the name of a policy that no longer comes with kvtier: vLLM takes the setting's name from this module.

    Raises:
        ConfigError: it is such a name.
        AttributeError: the module does not have the name.
    """
    if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() in REMOVED_POLICIES:
        remedy = "no longer comes with kvtier: write kvtier-lru, kvtier-arc or kvtier-hazard, or your own KVTierPolicy"
        raise ConfigError("eviction_policy", name, remedy)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def in_prefix_order(
    key_groups: Sequence[Sequence[OffloadKey]], req_context: StockReqContext
) -> list[OffloadKey]:
    """Return the keys of all KV groups, head of the prefix first if vLLM gives their positions. Pure."""
    keys = [key for group in key_groups for key in group]
    positions = {key: position_of(key, req_context) for key in keys}
    known = {key: position for key, position in positions.items() if position is not None}
    return sorted(keys, key=known.__getitem__) if len(known) == len(positions) else keys


def position_of(key: OffloadKey, req_context: StockReqContext) -> int | None:
    """Return the last token that a block of a request covers; None where vLLM does not tell. Pure."""
    position: int | None = getattr(req_context, "get_offload_key_position", lambda _: None)(key)
    return position
