"""The shadow cache of the hazard policy: which blocks it would hold, decided at each request from keys alone.

A request ends the open reuse interval of each known block that it names, and sets the class of each. Then its missing
blocks are admitted head first. Each takes the place of the leaf with the lowest index; the first block whose own index
is lower than that is refused, and so are those behind it. The shadow has no bytes and no pins, so it never waits.
"""

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain as chained
from itertools import compress
from math import inf
from operator import attrgetter

import numpy as np

from kvtier.base import OffloadKey
from kvtier.cpu.policies.hazard.features import (
    BRANCHING_CHILDREN,
    MAX_SEEN,
    NEW_CHAIN_BASE,
    NEW_TAIL_BASE,
    SEEN_BASE,
    STRATUM_BASE,
    RequestFeatures,
    request_code,
)
from kvtier.cpu.policies.hazard.model import EDGES_S, NUM_BINS, HazardModel, Ints, ReuseIntervals
from kvtier.cpu.policies.hazard.prefix_tree import NOT_ACCESSED, Access, Cohort, PrefixNode, PrefixTree

GHOSTS_PER_BLOCK = 4
"""Ghosts for each block of capacity. Fewer miss the reuse of blocks that were evicted early, more only cost memory."""

MAX_SHARED_CHILDREN = 8
"""Children from which a block is shared too widely for its last access to be the request's previous turn."""

FIRST_FIT_S = 20.0
"""Age of the policy at its first fit; before that it evicts the oldest leaf first and refuses nothing."""

REFIT_GROWTH = 0.1
"""Time between two fits as a share of the time since the start: what is learned changes ever more slowly."""

ACCESSES_PER_COHORT = 2.0
"""Accesses between two fits for each cohort that a fit visits, which keeps the cost for each block constant."""

MIN_COHORTS = 1024
"""Cohorts below which a clean-up of empty ones is not worth its fixed cost."""

MIN_STALE = 64
"""Entries of a heap below which a clean-up of stale ones is not worth its fixed cost."""

NUM_OF = attrgetter("num")


class HazardShadow:
    """The hazard policy as if every request were stored at once.

    Args:
        num_blocks: its capacity; with 0 it only learns.
        max_ghosts: ghosts that it remembers; by default GHOSTS_PER_BLOCK for each block of capacity.

    Attributes:
        tree: the known blocks.
        model: the fitted hazards.
        held: keys that the last call admitted.
        released: keys that the last call evicted.
    """

    def __init__(self, num_blocks: int, max_ghosts: int | None = None) -> None:
        self._num_blocks = num_blocks
        self.tree = PrefixTree(GHOSTS_PER_BLOCK * num_blocks if max_ghosts is None else max_ghosts)
        self.model = HazardModel()
        self.held: list[OffloadKey] = []
        self.released: list[OffloadKey] = []
        self._queue = EvictionQueue(self.model.indices)
        self._cohorts = CohortTable()
        self._num_accessed = 0
        self._now_s = 0.0
        self._start_s: float | None = None
        self._next_fit_s = 0.0

    def serve(self, keys: Iterable[OffloadKey], now_s: float, hint: int = 0) -> tuple[int, PrefixNode | None]:
        """Serve a request.

        Args:
            keys: its blocks, distinct, head first.
            now_s: arrival in seconds, any origin; a time before the last one counts as that one.
            hint: the client's hint, as ``hint_code`` returns it.

        Returns:
            The number of leading blocks that were held before the request, and its last block.
        """
        self._advance_time(now_s)
        chain, num_known = self.tree.find_or_add(keys)
        num_hits = 0
        for node in chain:
            if not node.is_held:
                break
            num_hits += 1
        if num_hits:
            # Only the last one can be a leaf: the others have held children.
            self._queue.remove(chain[num_hits - 1])
        self._record_access(chain, num_known, self._make_access(chain, num_known, hint))
        self._queue.update(self._now_s)
        self._hold(chain, num_hits)
        return num_hits, chain[-1] if chain else None

    def extend(self, tail: PrefixNode, keys: Sequence[OffloadKey]) -> PrefixNode:
        """Add the blocks of a request's answer.

        Args:
            tail: the request's last block so far.
            keys: the blocks that follow it, distinct and unknown.

        Returns:
            The request's last block; ``tail`` when that was forgotten meanwhile.
        """
        self.held, self.released = [], []
        if self.tree.nodes.get(tail.key) is not tail:
            return tail
        chain, _ = self.tree.find_or_add(keys, tail)
        self._queue.remove(tail)
        tail.cohort.num -= 1
        tail.num_seen -= 1
        before = tail.cohort.access
        self._put_in_cohorts([tail, *chain], 1, Access(before.time_s, before.turn, before.request_code))
        if tail.is_held:
            self._hold([tail, *chain], 1)
        else:
            self._add_ghosts([*_ghosts_up_to(tail), *chain])
        return chain[-1]

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        """Return the probability that each of ``keys`` is reused within ``horizon_s``, None if unknown. Pure."""
        if not self.model.is_fitted:
            return [None] * len(keys)
        nodes = list(map(self.tree.nodes.get, keys))
        # Most blocks of a batch have the same last access and a few classes.
        of_cohort = {
            cohort: self.model.reuse_probability(cohort.code, self._now_s - cohort.access.time_s, horizon_s)
            for cohort in {node.cohort for node in nodes if node is not None}
        }
        return [None if node is None else of_cohort[node.cohort] for node in nodes]

    def _advance_time(self, now_s: float) -> None:
        self.held, self.released = [], []
        self._now_s = now_s = max(self._now_s, now_s)
        if self._start_s is None:
            self._start_s, self._next_fit_s = now_s, now_s + FIRST_FIT_S
        if now_s >= self._next_fit_s and self._num_accessed >= ACCESSES_PER_COHORT * len(self._cohorts):
            self._next_fit_s = now_s + REFIT_GROWTH * (now_s - self._start_s)
            self._num_accessed = 0
            self.model.fit(self._cohorts.open_intervals(now_s))
            self._queue.rebuild(now_s)
        elif self._cohorts.is_crowded:
            self._cohorts.drop_empty()

    def _make_access(self, chain: Sequence[PrefixNode], num_known: int, hint: int) -> Access:
        """Return the access of this request, with its features. Pure."""
        turn, gap_s = 0, None
        if num_known:
            last = chain[num_known - 1]
            # The request's own first new block is among the children already.
            if last.num_children - (num_known < len(chain)) < MAX_SHARED_CHILDREN:
                before = last.cohort.access
                turn, gap_s = before.turn + 1, self._now_s - before.time_s
        features = RequestFeatures(turn, len(chain), gap_s, len(chain) - num_known, hint)
        return Access(self._now_s, turn, request_code(features))

    def _record_access(self, chain: Sequence[PrefixNode], num_known: int, access: Access) -> None:
        """End the open intervals of the known blocks and begin new ones for all."""
        self._end_intervals([node.cohort for node in chain[:num_known]], is_reuse=True)
        self._put_in_cohorts(chain, num_known, access)

    def _end_intervals(self, cohorts: Iterable[Cohort], *, is_reuse: bool) -> None:
        """Take a block out of each of ``cohorts`` and record the length of its interval."""
        # Neighbours are mostly of one cohort. NOT_ACCESSED never has blocks, so it serves as the sentinel at both ends.
        last, num = NOT_ACCESSED, 0
        for cohort in chained(cohorts, (NOT_ACCESSED,)):
            if cohort is not last:
                if num:
                    last.num -= num
                    self.model.record(last.code, self._now_s - last.access.time_s, num, is_reuse=is_reuse)
                last, num = cohort, 0
            num += 1

    def _put_in_cohorts(self, chain: Sequence[PrefixNode], num_known: int, access: Access) -> None:
        """Set the class of each block; the loops make no calls, because every accessed block passes through them."""
        cohorts: dict[int, Cohort] = {}
        request = access.request_code
        last_code, num = -1, 0
        cohort = NOT_ACCESSED
        for node in chain[:num_known]:
            seen = node.num_seen = node.num_seen + 1
            children = node.num_children
            code = (
                STRATUM_BASE[children if children < BRANCHING_CHILDREN else BRANCHING_CHILDREN]  # noqa: FURB136
                + SEEN_BASE[seen if seen < MAX_SEEN else MAX_SEEN]  # noqa: FURB136 - a call of min costs more
                + request
            )
            # Neighbours are mostly of one class.
            if code != last_code:
                cohort.num += num
                last_code, num = code, 0
                cohort = cohorts.get(code) or cohorts.setdefault(code, Cohort(access, code))
            num += 1
            node.cohort = cohort
        cohort.num += num
        # New blocks have been seen once, and each but the last has one child.
        new = chain[num_known:]
        for base, nodes in ((NEW_CHAIN_BASE, new[:-1]), (NEW_TAIL_BASE, new[-1:])):
            if nodes:
                code = base + request
                cohort = cohorts.get(code) or cohorts.setdefault(code, Cohort(access, code))
                cohort.num += len(nodes)
                for node in nodes:
                    node.cohort = cohort
        self._cohorts.add(cohorts, access.time_s)
        self._num_accessed += len(chain)

    def _hold(self, chain: Sequence[PrefixNode], num_held: int) -> None:
        """Admit the blocks after the first ``num_held``, up to the first that is worth less than every leaf."""
        tree = self.tree
        lowest: tuple[float, PrefixNode] | None = None
        for node in chain[num_held:] if num_held or _is_root(chain) else ():
            if tree.num_held >= self._num_blocks:
                lowest = lowest or self._queue.lowest(self._now_s)
                if lowest is None or self._index_of_new(node) < lowest[0]:
                    break
                lowest = self._release(lowest, node.cohort.access)
            tree.hold(node)
            self.held.append(node.key)
            num_held += 1
        if num_held and not chain[num_held - 1].num_held_children:
            self._queue.add(chain[num_held - 1], self._now_s)
        self._add_ghosts(chain[num_held:])

    def _add_ghosts(self, nodes: Sequence[PrefixNode]) -> None:
        """Remember unheld blocks as ghosts; the parent of each is held or among them."""
        self.tree.add_ghosts(nodes)
        self._end_intervals(self.tree.forget_oldest_ghosts(), is_reuse=False)

    def _index_of_new(self, node: PrefixNode) -> float:
        """Return the index of a block at age 0; above all others before the first fit."""
        return self.model.indices[node.cohort.code][0] if self.model.is_fitted else inf

    def _release(self, lowest: tuple[float, PrefixNode], access: Access) -> tuple[float, PrefixNode] | None:
        """Evict the leaf with the lowest index.

        Args:
            lowest: its index, and it.
            access: the request that is being served; its blocks are not in the queue.

        Returns:
            The leaf that now has the lowest index, where it is known without a search: a parent of the same cohort has
            the same index and takes the same place. None otherwise.
        """
        index, leaf = lowest
        self.tree.release(leaf)
        self.released.append(leaf.key)
        parent = leaf.parent
        if parent is None or parent.num_held_children:
            self._queue.remove(leaf)
        elif parent.cohort is leaf.cohort:
            self._queue.move(leaf, parent)
            return index, parent
        else:
            self._queue.remove(leaf)
            if parent.cohort.access is not access:
                self._queue.add(parent, self._now_s)
        return None


class EvictionQueue:
    """The held leaves, lowest index first: two heaps with lazy deletion.

    An entry is stale when its id is no longer that of its access.

    Args:
        indices: the index of each class in each bin of age.
    """

    def __init__(self, indices: Mapping[int, Sequence[float]]) -> None:
        self._indices = indices
        # (index, entry id, access)
        self._by_index: list[tuple[float, int, Access]] = []
        # (time at which the index falls, entry id, access, bin that begins then)
        self._by_fall: list[tuple[float, int, Access, int]] = []
        self._last_entry_id = 0
        self._max_entries = MIN_STALE

    def add(self, leaf: PrefixNode, now_s: float) -> None:
        """Add a leaf; it replaces the leaf of the same access."""
        access = leaf.cohort.access
        access.leaf = leaf
        self._put(access, leaf, bisect_right(EDGES_S, now_s - access.time_s))

    def move(self, leaf: PrefixNode, parent: PrefixNode) -> None:
        """Replace an evicted leaf by its parent of the same cohort, which has become a leaf."""
        leaf.cohort.access.leaf = parent

    def remove(self, leaf: PrefixNode) -> None:
        """Remove a leaf; a block that is not in the queue is ignored."""
        access = leaf.cohort.access
        if access.leaf is leaf:
            access.leaf = None
            access.entry_id = 0

    def lowest(self, now_s: float) -> tuple[float, PrefixNode] | None:
        """Return the lowest index and its leaf, which stays in the queue; None when the queue is empty.

        Effects:
            Drops stale entries at the top and moves those whose index has risen.
        """
        by_index = self._by_index
        while by_index:
            index, entry_id, access = by_index[0]
            leaf = access.leaf
            if leaf is None or access.entry_id != entry_id:
                heappop(by_index)
                continue
            age_bin = bisect_right(EDGES_S, now_s - access.time_s)
            if self._indices[leaf.cohort.code][age_bin] <= index:
                return index, leaf
            heappop(by_index)
            self._put(access, leaf, age_bin)
        return None

    def update(self, now_s: float) -> None:
        """Move the leaves whose index has fallen by now."""
        by_fall = self._by_fall
        while by_fall and by_fall[0][0] <= now_s:
            _, entry_id, access, age_bin = heappop(by_fall)
            if access.entry_id == entry_id and access.leaf is not None:
                # By rounding the age may still lie in the bin before, hence the lower bound.
                self._put(access, access.leaf, bisect_right(EDGES_S, now_s - access.time_s, age_bin))
        if len(self._by_index) > self._max_entries or len(by_fall) > self._max_entries:
            self._drop_stale()

    def rebuild(self, now_s: float) -> None:
        """Order every leaf anew, after a fit has changed the indices."""
        live = [access.leaf for _, entry_id, access in self._by_index if access.entry_id == entry_id]
        self._by_index, self._by_fall = [], []
        for leaf in live:
            if leaf is not None:
                self.add(leaf, now_s)

    def __len__(self) -> int:
        return len(self._by_index) + len(self._by_fall)

    def _put(self, access: Access, leaf: PrefixNode, age_bin: int) -> None:
        row = self._indices[leaf.cohort.code]
        index = row[age_bin]
        access.entry_id = entry_id = self._last_entry_id = self._last_entry_id + 1
        heappush(self._by_index, (index, entry_id, access))
        for lower_bin in range(age_bin + 1, NUM_BINS):
            if row[lower_bin] < index:
                fall_s = access.time_s + EDGES_S[lower_bin - 1]
                heappush(self._by_fall, (fall_s, entry_id, access, lower_bin))
                break

    def _drop_stale(self) -> None:
        self._by_index = [entry for entry in self._by_index if entry[2].entry_id == entry[1]]
        self._by_fall = [entry for entry in self._by_fall if entry[2].entry_id == entry[1]]
        heapify(self._by_index)
        heapify(self._by_fall)
        self._max_entries = 2 * max(len(self._by_index), len(self._by_fall)) + MIN_STALE


class CohortTable:
    """The open reuse intervals, by cohort, as columns that a fit reads at once.

    A cohort's class and time never change, so they stand in arrays. Its number of blocks changes with every reuse, so
    it stands in the cohort. Cohorts without blocks stay until ``drop_empty``.
    """

    def __init__(self) -> None:
        self._cohorts: list[Cohort] = []
        self._codes = array("q")
        self._times_s = array("d")
        self._max_cohorts = MIN_COHORTS

    def add(self, cohorts: Mapping[int, Cohort], time_s: float) -> None:
        """Add the cohorts of a request, by class."""
        self._cohorts += cohorts.values()
        self._codes.extend(cohorts)
        self._times_s.extend([time_s] * len(cohorts))

    @property
    def is_crowded(self) -> bool:
        """Whether the table has twice as many cohorts as after the last ``drop_empty``."""
        return len(self._cohorts) > self._max_cohorts

    def drop_empty(self) -> Ints:
        """Drop the cohorts without blocks; return how many blocks the others have."""
        nums = np.fromiter(map(NUM_OF, self._cohorts), np.int64, len(self._cohorts))
        has_blocks = nums > 0
        self._cohorts = list(compress(self._cohorts, has_blocks.tolist()))
        self._codes = array("q", np.array(self._codes)[has_blocks].tobytes())
        self._times_s = array("d", np.array(self._times_s)[has_blocks].tobytes())
        self._max_cohorts = 2 * len(self._cohorts) + MIN_COHORTS
        return nums[has_blocks]

    def open_intervals(self, now_s: float) -> ReuseIntervals:
        """Return the open intervals of all blocks, by cohort; cohorts without blocks are dropped."""
        nums = self.drop_empty()
        return ReuseIntervals(
            np.array(self._codes), now_s - np.array(self._times_s), nums, np.zeros(len(nums))
        )

    def __len__(self) -> int:
        return len(self._cohorts)


def _is_root(chain: Sequence[PrefixNode]) -> bool:
    return bool(chain) and chain[0].parent is None


def _ghosts_up_to(tail: PrefixNode) -> list[PrefixNode]:
    """Return the unheld blocks of the prefix that ends with ``tail``, head first. Pure."""
    ghosts = []
    node: PrefixNode | None = tail
    while node is not None and not node.is_held:
        ghosts.append(node)
        node = node.parent
    return ghosts[::-1]
