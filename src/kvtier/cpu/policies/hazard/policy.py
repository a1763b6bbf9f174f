"""The hazard policy: evicts the block whose slot is expected to earn the fewest reuses per second.

A shadow cache (``shadow``) decides from requests alone which blocks it would hold. The real cache follows it: blocks
that the shadow has evicted are evicted first, and blocks that it refused are not stored. So the cost of a decision does
not depend on pins and transfers in flight, and children are evicted before their parents. When every block that the
shadow has evicted is busy or gone, the least recently used block is evicted.

Set dueling bounds the loss: a second shadow runs LRU, and until the hazard shadow has found more blocks than LRU's, the
policy is LRU and refuses nothing. It starts as LRU, and stays LRU when no request is reported to it.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import exp

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, check_same_blocks
from kvtier.cpu.policies.hazard.features import hint_code
from kvtier.cpu.policies.hazard.forecaster import RunningRequests
from kvtier.cpu.policies.hazard.prefix_tree import PrefixNode
from kvtier.cpu.policies.hazard.shadow import GHOSTS_PER_BLOCK, HazardShadow
from kvtier.cpu.policies.hint_trust import HintTrust
from kvtier.cpu.policies.learning import ArrivedRequest, ReuseForecast
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.errors import InvariantError

WINDOW_REQUESTS = 1000
"""Requests after which a hit counts 1/e. A shorter window follows noise, a longer one adapts too late."""

DEFICIT_WINDOW_S = 60.0
"""Seconds after which a lead over LRU counts 1/e where the present matters. Shorter stops keeping blocks for later at
every lull; longer notices too late to bound what ten minutes lose."""

MAX_DEFICIT_RATIO = 0.01
"""How far it may be behind LRU, as a share of the blocks named of late. It loses more until the cache holds what LRU
would: in ten minutes rarely more than two of a hundred, and up to four where a cache has room for a few requests only.
Lower costs hits on agents' traffic, higher bounds less."""

Victims = list[tuple[OffloadKey, BlockStatus]]


class HazardCachePolicy(CachePolicy, ReuseForecast):
    """Eviction and admission by learned time to reuse, with LRU as the fallback.

    Args:
        cache_capacity: blocks that the primary tier can hold.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._recent = LRUCachePolicy(cache_capacity)
        # Held blocks that the shadow knows and does not hold, in the order in which it evicted them.
        self._surplus: OrderedDict[OffloadKey, None] = OrderedDict()
        self._begin()

    @property
    def follows_lru(self) -> bool:
        """Whether the policy evicts as LRU now, because LRU's shadow has at least as many recent hits."""
        return not self._selector.prefers_hazard

    @property
    def forecast(self) -> ReuseForecast:
        return self

    @property
    def num_remembered_blocks(self) -> int:
        return GHOSTS_PER_BLOCK * self.cache_capacity

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self._recent.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        return self._recent.getter()

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.insert_many([key], [block])

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        keys = list(keys)
        self._recent.insert_many(keys, blocks)
        nodes = self._shadow.tree.nodes
        if nodes:
            for key, node in zip(keys, map(nodes.get, keys), strict=True):
                if node is not None and not node.is_held:
                    self._surplus[key] = None

    def remove(self, key: OffloadKey) -> None:
        self._recent.remove(key)
        self._surplus.pop(key, None)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        # Requests also name refused blocks. LRU takes its slow path when a touched key is not held, so filter first.
        self._recent.touch(list(filter(self._recent.blocks.__contains__, keys)))

    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        victims = self._surplus_victims(n, protected)
        if len(victims) < n:
            idle = self._idle()
            if protected:
                idle = (item for item in idle if item[0] not in protected)
            victims = list(islice(idle, n))
        if len(victims) < n:
            return None
        blocks, surplus = self._recent.blocks, self._surplus
        for key, _ in victims:
            del blocks[key]
            if key in surplus:
                del surplus[key]
        return victims

    def next_victims(self, n: int) -> list[OffloadKey]:
        return [key for key, _ in islice(self._idle(), n)]

    def clear(self) -> None:
        self._recent.clear()
        self._surplus.clear()
        self._begin()

    def note_request(self, request: ArrivedRequest) -> None:
        hint = hint_code(self._trust.hear(request.hints, request.arrival_s))
        num_lru_hits = num_hazard_hits = num_blocks = 0
        tails: dict[int, PrefixNode] = {}
        for chain_keys in request.chains:
            keys = list(dict.fromkeys(chain_keys))
            num_blocks += len(keys)
            num_lru_hits += self._lru.serve(keys)
            num_hits, tail = self._shadow.serve(keys, request.arrival_s, hint)
            num_hazard_hits += num_hits
            self._follow_shadow()
            if tail is not None:
                tails[get_offload_group_idx(tail.key)] = tail
        self._running.begin(request.req_id, tails)
        self._selector.count(num_lru_hits, num_hazard_hits, num_blocks, request.arrival_s)

    def on_finished(self, req_id: str) -> None:
        self._running.end(req_id)

    def admit(self, keys: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        groups = self._running.groups_of(req_id)
        if groups is None:
            return keys
        for tail, answer in self._running.learn(keys, req_id):
            self._follow_shadow()
            self._lru.move_to_front(reversed([*_prefix_of(tail), *answer]))
        if self.follows_lru:
            return keys
        get = self._shadow.tree.nodes.get
        admitted = [
            key
            for key in keys
            if (node.is_held if (node := get(key)) else get_offload_group_idx(key) not in groups)
        ]
        return admitted if len(admitted) < len(keys) else keys

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        return self._shadow.reuse_probabilities(keys, horizon_s)

    def known_prefix(self, key: OffloadKey) -> list[OffloadKey]:
        """Return the known blocks before ``key`` in its prefix, head first; none when it is unknown. Pure."""
        node = self._shadow.tree.nodes.get(key)
        return [] if node is None else _prefix_of(node)[:-1]

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self._recent.blocks, held)
        nodes = self._shadow.tree.nodes
        for key in self._surplus:
            if key not in held or (key in nodes and nodes[key].is_held):
                raise InvariantError(f"block {key.hex()} is surplus, but not held, or held by the shadow")
        self._shadow.tree.check()

    def _begin(self) -> None:
        self._shadow = HazardShadow(self.cache_capacity)
        self._lru = LRUShadow(self.cache_capacity)
        self._selector = PolicySelector()
        self._running = RunningRequests(self._shadow)
        self._trust = HintTrust()

    def _surplus_victims(self, n: int, protected: Collection[OffloadKey]) -> Victims:
        """Return the first of ``_idle`` as far as they are surplus; a plain loop, since nearly all victims are."""
        victims: Victims = []
        if self.follows_lru or n == 0:
            return victims
        blocks = self._recent.blocks
        for key in self._surplus:
            block = blocks[key]
            if not block.ref_cnt and key not in protected:
                victims.append((key, block))
                if len(victims) == n:
                    break
        return victims

    def _idle(self) -> Iterator[tuple[OffloadKey, BlockStatus]]:
        """Yield the idle blocks in the order of eviction."""
        blocks, surplus = self._recent.blocks, self._surplus
        items: Iterable[tuple[OffloadKey, BlockStatus]] = blocks.items()
        if surplus and not self.follows_lru:
            wanted = (item for item in items if item[0] not in surplus)
            items = chain(zip(surplus, map(blocks.__getitem__, surplus), strict=True), wanted)
        return (item for item in items if not item[1].ref_cnt)

    def _follow_shadow(self) -> None:
        """Add to the surplus what the shadow has just evicted; take out what it has admitted again."""
        blocks, surplus = self._recent.blocks, self._surplus
        for key in self._shadow.released:
            if key in blocks:
                surplus[key] = None
        if surplus:
            for key in self._shadow.held:
                if key in surplus:
                    del surplus[key]


class PolicySelector:
    """Chooses between LRU and the hazard policy by the hits of their shadows.

    The hazard policy must have more hits, which fade over WINDOW_REQUESTS. That alone would let it lose for a while
    what it has won before, such as while it keeps what a job will name in half an hour. So it must also not be behind
    by more than MAX_DEFICIT_RATIO of the blocks of the last minutes, which fade over DEFICIT_WINDOW_S; once it was, it
    must catch up first.

    Attributes:
        num_lru_hits: blocks that LRU would have found.
        num_hazard_hits: blocks that the hazard policy would have found.
    """

    def __init__(self) -> None:
        self.num_lru_hits = self.num_hazard_hits = 0.0
        self._lead = self._num_recent = 0.0
        self._is_behind = False
        self._last_s: float | None = None

    @property
    def prefers_hazard(self) -> bool:
        """Whether the hazard policy has more hits than LRU, and none to catch up."""
        return self.num_hazard_hits > self.num_lru_hits and not self._is_behind

    def count(self, num_lru_hits: int, num_hazard_hits: int, num_blocks: int, now_s: float) -> None:
        """Count the hits of one request.

        Args:
            num_lru_hits: of its blocks, those that LRU would have found.
            num_hazard_hits: those that the hazard policy would have found.
            num_blocks: its blocks.
            now_s: its time of arrival.
        """
        kept = 1 - 1 / WINDOW_REQUESTS
        self.num_lru_hits = kept * self.num_lru_hits + num_lru_hits
        self.num_hazard_hits = kept * self.num_hazard_hits + num_hazard_hits
        last_s = now_s if self._last_s is None else self._last_s
        self._last_s = max(last_s, now_s)
        kept = exp((last_s - self._last_s) / DEFICIT_WINDOW_S)
        self._lead = kept * self._lead + num_hazard_hits - num_lru_hits
        self._num_recent = kept * self._num_recent + num_blocks
        if self._is_behind:
            self._is_behind = self._lead < 0
        else:
            self._is_behind = self._lead < -MAX_DEFICIT_RATIO * self._num_recent


class LRUShadow:
    """The keys that LRU would hold if it evicted the tail of a prefix before its head.

    Args:
        num_blocks: its capacity.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[OffloadKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def serve(self, keys: Sequence[OffloadKey]) -> int:
        """Serve a request of distinct ``keys``, head first; return how many leading blocks were held before it."""
        held = self._held
        num_hits = next((number for number, key in enumerate(keys) if key not in held), len(keys))
        self.move_to_front(islice(reversed(keys), max(0, len(keys) - self._num_blocks), None))
        return num_hits

    def move_to_front(self, keys: Iterable[OffloadKey]) -> None:
        """Hold ``keys`` as the most recent, the last of them most recent of all."""
        held = self._held
        for key in keys:
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
        while len(held) > self._num_blocks:
            held.popitem(last=False)


def _prefix_of(tail: PrefixNode) -> list[OffloadKey]:
    """Return the keys from the first block of a prompt to ``tail``. Pure."""
    keys = []
    node: PrefixNode | None = tail
    while node is not None:
        keys.append(node.key)
        node = node.parent
    return keys[::-1]
