"""The cohorts whose blocks wait to be named again, as columns that a fit reads at once.

It decides nothing. A cohort's class and time never change and stand in arrays; how many of its blocks are left changes
with every block that comes back, and stands in the cohort.
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
from kvtier.cpu.policies.hazard.directory import UNNAMED, Cohort, Directory, Naming, Node
from kvtier.cpu.policies.hazard.features import (
    BRANCHING_CHILDREN,
    MAX_SEEN,
    NEW_CHAIN_BASE,
    NEW_TAIL_BASE,
    SEEN_BASE,
    STRATUM_BASE,
    RequestFactors,
    request_code,
)
from kvtier.cpu.policies.hazard.model import EDGES_S, NUM_BINS, HazardModel, Ints, Waits

MIN_COHORTS = 1024
"""Cohorts below which empty ones are not worth looking for."""

NUM_OF = attrgetter("num")


class CohortTable:
    """Cohorts in the order in which they were named, those without blocks until they are dropped."""

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
        """Whether there are twice as many as were left when the empty ones were dropped."""
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

    def take_stock(self, now_s: float) -> Waits:
        """Return how long the blocks of each cohort have waited by now; those without blocks are dropped."""
        nums = self.drop_empty()
        return Waits(np.array(self._codes), now_s - np.array(self._times_s), nums, np.zeros(len(nums)))

    def __len__(self) -> int:
        return len(self._cohorts)


MIN_STALE = 64
"""Entries below which stale ones are not worth looking for."""


class Candidates:
    """Leaves that may leave.

    Args:
        indices: what orders them: the index of each class in each bin of age.
    """

    def __init__(self, indices: Mapping[int, Sequence[float]]) -> None:
        self._indices = indices
        # The index, a handle, the naming.
        self._by_index: list[tuple[float, int, Naming]] = []
        # When the index falls, a handle, the naming, the bin that begins then.
        self._by_fall: list[tuple[float, int, Naming, int]] = []
        self._num_tickets = 0
        self._max_entries = MIN_STALE

    def add(self, leaf: Node, now_s: float) -> None:
        """Make a leaf a candidate, in place of the one that its naming had."""
        naming = leaf.cohort.naming
        naming.leaf = leaf
        self._put(naming, leaf, bisect_right(EDGES_S, now_s - naming.time_s))

    def move(self, leaf: Node, parent: Node) -> None:
        """Let a block of the same cohort, which has become a leaf, take the place of a candidate that has left."""
        leaf.cohort.naming.leaf = parent

    def withdraw(self, leaf: Node) -> None:
        """Let a leaf be no candidate any more; others are ignored."""
        naming = leaf.cohort.naming
        if naming.leaf is leaf:
            naming.leaf = None
            naming.handle = 0

    def lowest(self, now_s: float) -> tuple[float, Node] | None:
        """Return the lowest index and its leaf, which stays; None when there is none.

        Effects:
            Entries at the top that are stale are dropped, and those whose index has risen put right.
        """
        by_index = self._by_index
        while by_index:
            index, handle, naming = by_index[0]
            leaf = naming.leaf
            if leaf is None or naming.handle != handle:
                heappop(by_index)
                continue
            age_bin = bisect_right(EDGES_S, now_s - naming.time_s)
            if self._indices[leaf.cohort.code][age_bin] <= index:
                return index, leaf
            heappop(by_index)
            self._put(naming, leaf, age_bin)
        return None

    def renew(self, now_s: float) -> None:
        """Put the leaves whose index has fallen where they belong by now."""
        by_fall = self._by_fall
        while by_fall and by_fall[0][0] <= now_s:
            _, handle, naming, age_bin = heappop(by_fall)
            if naming.handle == handle and naming.leaf is not None:
                # Rounded, an age may lie in the bin before still.
                self._put(naming, naming.leaf, bisect_right(EDGES_S, now_s - naming.time_s, age_bin))
        if len(self._by_index) > self._max_entries or len(by_fall) > self._max_entries:
            self._drop_stale()

    def rebuild(self, now_s: float) -> None:
        """Put every leaf where it belongs after the model has changed."""
        live = [naming.leaf for _, handle, naming in self._by_index if naming.handle == handle]
        self._by_index, self._by_fall = [], []
        for leaf in live:
            if leaf is not None:
                self.add(leaf, now_s)

    def __len__(self) -> int:
        return len(self._by_index) + len(self._by_fall)

    def _put(self, naming: Naming, leaf: Node, age_bin: int) -> None:
        row = self._indices[leaf.cohort.code]
        index = row[age_bin]
        naming.handle = handle = self._num_tickets = self._num_tickets + 1
        heappush(self._by_index, (index, handle, naming))
        for lower_bin in range(age_bin + 1, NUM_BINS):
            if row[lower_bin] < index:
                fall_s = naming.time_s + EDGES_S[lower_bin - 1]
                heappush(self._by_fall, (fall_s, handle, naming, lower_bin))
                break

    def _drop_stale(self) -> None:
        self._by_index = [entry for entry in self._by_index if entry[2].handle == entry[1]]
        self._by_fall = [entry for entry in self._by_fall if entry[2].handle == entry[1]]
        heapify(self._by_index)
        heapify(self._by_fall)
        self._max_entries = 2 * max(len(self._by_index), len(self._by_fall)) + MIN_STALE


GHOSTS_PER_BLOCK = 4
"""Ghosts for each block of capacity. Fewer hide returns of what left early, more only cost memory."""

MAX_SHARED_CHILDREN = 8
"""Children from which a block is too widely shared to tell whose turn a request continues."""

FIRST_FIT_S = 20.0
"""Age of the policy at its first fit; before it the oldest leaf leaves first and nothing is refused."""

REFIT_GROWTH = 0.1
"""A fit follows the last after this share of the time since the start: what is learned changes ever more slowly."""

NAMED_PER_COHORT = 2.0
"""Blocks to be named between two fits for each cohort that a fit visits, which keeps its cost per block constant."""


class HazardShadow:
    """The policy as if every request were stored at once.

    Args:
        num_blocks: its capacity; with 0 it only learns.
        max_ghosts: blocks that it remembers besides; GHOSTS_PER_BLOCK for each block of capacity by default.

    Attributes:
        directory: the blocks that it knows.
        model: what it has learned.
        held: keys that the last call began to hold.
        released: keys that it ceased to hold.
    """

    def __init__(self, num_blocks: int, max_ghosts: int | None = None) -> None:
        self._num_blocks = num_blocks
        self.directory = Directory(GHOSTS_PER_BLOCK * num_blocks if max_ghosts is None else max_ghosts)
        self.model = HazardModel()
        self.held: list[OffloadKey] = []
        self.released: list[OffloadKey] = []
        self._candidates = Candidates(self.model.indices)
        self._cohorts = CohortTable()
        self._num_named = 0
        self._now_s = 0.0
        self._start_s: float | None = None
        self._next_fit_s = 0.0

    def serve(self, keys: Iterable[OffloadKey], now_s: float, hint: int = 0) -> tuple[int, Node | None]:
        """Serve a request.

        Args:
            keys: its blocks, distinct, head first.
            now_s: seconds, any origin; it does not run backwards.
            hint: what the client says, as HintReader reads it.

        Returns:
            The length of its held prefix before it, and its last block.
        """
        self._tell_time(now_s)
        chain, num_known = self.directory.chain_of(keys)
        num_hits = 0
        for node in chain:
            if not node.is_held:
                break
            num_hits += 1
        if num_hits:
            # The others have held children.
            self._candidates.withdraw(chain[num_hits - 1])
        self._name(chain, num_known, self._find_naming(chain, num_known, hint))
        self._candidates.renew(self._now_s)
        self._hold(chain, num_hits)
        return num_hits, chain[-1] if chain else None

    def extend(self, tail: Node, keys: Sequence[OffloadKey]) -> Node:
        """Let a request name more blocks than it came with: those of its answer.

        Args:
            tail: its last block so far.
            keys: what follows it, distinct and unknown.

        Returns:
            Its last block; ``tail`` when that is forgotten.
        """
        self.held, self.released = [], []
        if self.directory.nodes.get(tail.key) is not tail:
            return tail
        chain, _ = self.directory.chain_of(keys, tail)
        self._candidates.withdraw(tail)
        tail.cohort.num -= 1
        tail.num_seen -= 1
        before = tail.cohort.naming
        self._put_in_cohorts([tail, *chain], 1, Naming(before.time_s, before.turn, before.request_code))
        if tail.is_held:
            self._hold([tail, *chain], 1)
        else:
            self._bury([*_ghosts_up_to(tail), *chain])
        return chain[-1]

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        """Return how likely each of ``keys`` is named again within ``horizon_s``; None where nothing tells. Pure."""
        if not self.model.is_fitted:
            return [None] * len(keys)
        nodes = list(map(self.directory.nodes.get, keys))
        # Blocks of a batch were mostly named by one request, in a few classes.
        of_cohort = {
            cohort: self.model.reuse_probability(cohort.code, self._now_s - cohort.naming.time_s, horizon_s)
            for cohort in {node.cohort for node in nodes if node is not None}
        }
        return [None if node is None else of_cohort[node.cohort] for node in nodes]

    def _tell_time(self, now_s: float) -> None:
        self.held, self.released = [], []
        self._now_s = now_s = max(self._now_s, now_s)
        if self._start_s is None:
            self._start_s, self._next_fit_s = now_s, now_s + FIRST_FIT_S
        if now_s >= self._next_fit_s and self._num_named >= NAMED_PER_COHORT * len(self._cohorts):
            self._next_fit_s = now_s + REFIT_GROWTH * (now_s - self._start_s)
            self._num_named = 0
            self.model.fit(self._cohorts.take_stock(now_s))
            self._candidates.rebuild(now_s)
        elif self._cohorts.is_crowded:
            self._cohorts.drop_empty()

    def _find_naming(self, chain: Sequence[Node], num_known: int, hint: int) -> Naming:
        """Return what the request tells of its blocks. Pure."""
        turn, gap_s = 0, None
        if num_known:
            last = chain[num_known - 1]
            # The request's own first new block is a child by now.
            if last.num_children - (num_known < len(chain)) < MAX_SHARED_CHILDREN:
                before = last.cohort.naming
                turn, gap_s = before.turn + 1, self._now_s - before.time_s
        factors = RequestFactors(turn, len(chain), gap_s, len(chain) - num_known, hint)
        return Naming(self._now_s, turn, request_code(factors))

    def _name(self, chain: Sequence[Node], num_known: int, naming: Naming) -> None:
        """End the waits of the blocks, and begin others."""
        self._end_waits([node.cohort for node in chain[:num_known]], is_reuse=True)
        self._put_in_cohorts(chain, num_known, naming)

    def _end_waits(self, cohorts: Iterable[Cohort], *, is_reuse: bool) -> None:
        """Take a block out of each of ``cohorts``, and learn from it."""
        # Neighbours are mostly of one cohort. Nobody waits in UNNAMED, so that it can stand at both ends.
        last, num = UNNAMED, 0
        for cohort in chained(cohorts, (UNNAMED,)):
            if cohort is not last:
                if num:
                    last.num -= num
                    self.model.record(last.code, self._now_s - last.naming.time_s, num, is_reuse=is_reuse)
                last, num = cohort, 0
            num += 1

    def _put_in_cohorts(self, chain: Sequence[Node], num_known: int, naming: Naming) -> None:
        """Set the class of each block; loops without calls, because every named block passes through them."""
        cohorts: dict[int, Cohort] = {}
        request = naming.request_code
        last_code, num = -1, 0
        cohort = UNNAMED
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
                cohort = cohorts.get(code) or cohorts.setdefault(code, Cohort(naming, code))
            num += 1
            node.cohort = cohort
        cohort.num += num
        # New ones have been seen once, and each but the last has one child.
        new = chain[num_known:]
        for base, nodes in ((NEW_CHAIN_BASE, new[:-1]), (NEW_TAIL_BASE, new[-1:])):
            if nodes:
                code = base + request
                cohort = cohorts.get(code) or cohorts.setdefault(code, Cohort(naming, code))
                cohort.num += len(nodes)
                for node in nodes:
                    node.cohort = cohort
        self._cohorts.add(cohorts, naming.time_s)
        self._num_named += len(chain)

    def _hold(self, chain: Sequence[Node], num_held: int) -> None:
        """Hold the blocks of ``chain`` behind the first ``num_held``, as far as they are worth their room."""
        directory = self.directory
        lowest: tuple[float, Node] | None = None
        for node in chain[num_held:] if num_held or _is_root(chain) else ():
            if directory.num_held >= self._num_blocks:
                lowest = lowest or self._candidates.lowest(self._now_s)
                if lowest is None or self._index_of_new(node) < lowest[0]:
                    break
                lowest = self._release(lowest, node.cohort.naming)
            directory.hold(node)
            self.held.append(node.key)
            num_held += 1
        if num_held and not chain[num_held - 1].num_held_children:
            self._candidates.add(chain[num_held - 1], self._now_s)
        self._bury(chain[num_held:])

    def _bury(self, nodes: Sequence[Node]) -> None:
        """Remember blocks that are not held as ghosts, whose parents are held or among them."""
        self.directory.bury(nodes)
        self._end_waits(self.directory.forget_oldest(), is_reuse=False)

    def _index_of_new(self, node: Node) -> float:
        """Return the index of a block that was named just now; above all others while nothing is learned."""
        return self.model.indices[node.cohort.code][0] if self.model.is_fitted else inf

    def _release(self, lowest: tuple[float, Node], naming: Naming) -> tuple[float, Node] | None:
        """Release the candidate with the lowest index.

        Args:
            lowest: its index, and it.
            naming: the request that is being served; its blocks are no candidates.

        Returns:
            The candidate that now has the lowest index, where that is known without a search: a parent of the same
            cohort has the same index, and takes the same place. None otherwise.
        """
        index, leaf = lowest
        self.directory.release(leaf)
        self.released.append(leaf.key)
        parent = leaf.parent
        if parent is None or parent.num_held_children:
            self._candidates.withdraw(leaf)
        elif parent.cohort is leaf.cohort:
            self._candidates.move(leaf, parent)
            return index, parent
        else:
            self._candidates.withdraw(leaf)
            if parent.cohort.naming is not naming:
                self._candidates.add(parent, self._now_s)
        return None


def _is_root(chain: Sequence[Node]) -> bool:
    return bool(chain) and chain[0].parent is None


def _ghosts_up_to(tail: Node) -> list[Node]:
    """Return the blocks of a prefix that are not held, to ``tail``, head first. Pure."""
    ghosts = []
    node: Node | None = tail
    while node is not None and not node.is_held:
        ghosts.append(node)
        node = node.parent
    return ghosts[::-1]
