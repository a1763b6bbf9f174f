"""The contract of an eviction policy, and the block that managers and policies share.

A policy decides which held block to evict next. It reads ``ref_cnt`` and never writes it: slots and pins belong to the
manager's block table. Five methods are abstract; the others have defaults, which a policy overrides where it can be
faster or stricter, or learns from requests. Managers and replays call the same methods, so a policy learns the same in
production as in a replay.

Source: the contract follows vLLM's ``kv_offload/cpu/policies``, pull request 37874.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

from kvtier.base import OffloadKey
from kvtier.cpu.policies.learning import ArrivedRequest, ReuseForecast
from kvtier.errors import InvariantError

Admit = Callable[[Collection[OffloadKey], str], Collection[OffloadKey]]
"""Decides which blocks of a request to store, as ``CachePolicy.admit``."""

IN_FLIGHT = -1
"""``ref_cnt`` of a block whose write is in flight."""


class BlockStatus:
    """One held block. A million of them live at once, so it has two slots and no dictionary.

    The object belongs to its slot: after an eviction it is used again under another key.

    Args:
        block_id: its slot in the primary tier.

    Attributes:
        block_id: the slot.
        ref_cnt: IN_FLIGHT (-1) while its write is in flight, 0 when idle, n when pinned n times.
    """

    __slots__ = ("block_id", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = IN_FLIGHT

    @property
    def is_ready(self) -> bool:
        """Whether its write has completed."""
        return self.ref_cnt >= 0

    def __repr__(self) -> str:
        return f"BlockStatus(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


class CachePolicy(ABC):
    """The order in which held blocks are evicted. Used from one thread.

    Args:
        cache_capacity: blocks that the primary tier can hold.

    Attributes:
        learns_without_hints: whether requests whose clients give no hints teach it anything by now; managers skip
            ``note_request`` for them when not.
    """

    learns_without_hints: bool = True

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity

    @property
    def forecast(self) -> ReuseForecast | None:
        """Estimates of reuse, for tiers with an admission threshold; None: it gives none."""
        return None

    @abstractmethod
    def get(self, key: OffloadKey) -> BlockStatus | None:
        """Return the held block under ``key``, or None; counts as no use."""

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Hold ``block`` under ``key``, which is not held yet."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> None:
        """Stop holding ``key``, as if it had never been stored; unknown keys are ignored."""

    @abstractmethod
    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Record a use of ``keys``; the first ends up most recent, so that the tail of a prefix is evicted first.

        For blocks in flight every policy keeps this order; one that is ordered by insertion may leave ready blocks in
        place. Keys that are not held are no error; a policy may remember them.
        """

    @abstractmethod
    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Stop holding the next ``n`` idle blocks (``ref_cnt`` 0) that are not in ``protected``.

        Args:
            n: how many.
            protected: keys that must stay; its ``in`` is evaluated once for each candidate.

        Returns:
            The evicted blocks, in eviction order; None, with nothing changed, when fewer than ``n`` can be evicted.
        """

    def clear(self) -> bool | None:
        """Forget everything: held blocks, ghosts, learned state.

        Returns:
            False: not supported. The manager then builds the policy again (``clear_policy``).
        """
        return False

    def note_request(self, request: ArrivedRequest) -> None:
        """Learn that a request arrived; called once for each request, before any other call for it."""

    def on_finished(self, req_id: str) -> None:
        """Forget a request's running state; unknown requests are ignored."""

    def admit(self, keys: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        """Return those of ``keys`` to store, in order; within a KV group nothing behind the first refused key.

        A policy that refuses nothing returns ``keys`` itself, which saves the caller a search.

        Args:
            keys: the blocks that a request offers, head first within each group; they may extend its prompt.
            req_id: the request.
        """
        del req_id
        return keys

    def extend(self, run: Hashable, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        """Hold ``blocks`` under ``keys`` as the continuation of ``run``, the blocks of one request."""
        del run
        self.insert_many(keys, blocks)

    def renew(self, keys: Collection[OffloadKey]) -> None:
        """Make ``keys`` the most recent, in the order of ``touch``, without counting a use of them."""
        self.touch(keys)

    def next_victims(self, n: int) -> list[OffloadKey] | None:
        """Return at most ``n`` idle blocks, those that ``evict`` would take first, in its order. Pure.

        Returns:
            None: not supported. Write-back then takes the oldest stores.
        """
        del n
        return None

    def expect_idle(self) -> None:
        """Rely on ``on_idle`` from now on; called once, while nothing is held."""

    def on_idle(self, keys: Iterable[OffloadKey]) -> None:
        """Handle that ``keys``, pinned or in flight before, may have become idle (``ref_cnt`` 0).

        Some may not be held any more.
        """

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        """Hold ``blocks`` under ``keys``, pairwise and in order."""
        for key, block in zip(keys, blocks, strict=True):
            self.insert(key, block)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        """Return the cheapest callable that does what ``get`` does; it stays valid for the policy's life.

        A policy that overrides this overrides ``clear`` too.
        """
        return self.get

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        """Compare the policy with the manager's block table.

        Args:
            held: every block that should be held.

        Raises:
            InvariantError: they differ, or the policy's own structure is inconsistent.
        """
        for key, block in held.items():
            if self.get(key) is not block:
                raise InvariantError(f"block {key.hex()} in slot {block.block_id} is not held by the policy")


def clear_policy(policy: CachePolicy, cache_capacity: int) -> bool:
    """Make a policy forget everything; one that cannot is built again in place, because others refer to the object.

    Args:
        policy: the policy.
        cache_capacity: blocks that it can hold.

    Returns:
        Whether it was built again.
    """
    if policy.clear() is not False:
        return False
    vars(policy).clear()
    type(policy).__init__(policy, cache_capacity)
    return True


def check_same_blocks(
    found: Mapping[OffloadKey, BlockStatus], held: Mapping[OffloadKey, BlockStatus]
) -> None:
    """Compare what a policy holds with what it should hold, block by block.

    Raises:
        InvariantError: a key is in only one of them, or has different blocks.
    """
    for key in found.keys() ^ held.keys():
        side = "policy" if key in found else "manager"
        raise InvariantError(f"block {key.hex()} is held only by the {side}")
    for key, block in found.items():
        if held[key] is not block:
            raise InvariantError(f"block {key.hex()} is {block} in the policy, {held[key]} in the manager")
