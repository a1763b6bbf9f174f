"""The held leaves, the one with the lowest index first, while indices change with age.

It decides nothing. What one request named last lies on one path of the tree of prefixes, so at most one of these blocks
is a leaf: an entry stands for a naming, whose leaf moves up that path as blocks leave. A heap holds namings by index.
An index changes as the naming's age passes into another bin. No index may be lower than its entry says, so a second
heap says when the first bin begins in which it would be; who has risen is put right when its entry comes to the top.
Entries bear a ticket; once their naming has another, or none, they are stale.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from kvtier.cpu.policies.hazard.directory import Naming, Node
from kvtier.cpu.policies.hazard.model import EDGES_S, NUM_BINS

MIN_STALE = 64
"""Entries below which stale ones are not worth looking for."""


class Candidates:
    """Leaves that may leave.

    Args:
        indices: what orders them: the index of each class in each bin of age.
    """

    def __init__(self, indices: Mapping[int, Sequence[float]]) -> None:
        self._indices = indices
        # The index, a ticket, the naming.
        self._by_index: list[tuple[float, int, Naming]] = []
        # When the index falls, a ticket, the naming, the bin that begins then.
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
            naming.ticket = 0

    def lowest(self, now_s: float) -> tuple[float, Node] | None:
        """Return the lowest index and its leaf, which stays; None when there is none.

        Effects:
            Entries at the top that are stale are dropped, and those whose index has risen put right.
        """
        by_index = self._by_index
        while by_index:
            index, ticket, naming = by_index[0]
            leaf = naming.leaf
            if leaf is None or naming.ticket != ticket:
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
            _, ticket, naming, age_bin = heappop(by_fall)
            if naming.ticket == ticket and naming.leaf is not None:
                # Rounded, an age may lie in the bin before still.
                self._put(naming, naming.leaf, bisect_right(EDGES_S, now_s - naming.time_s, age_bin))
        if len(self._by_index) > self._max_entries or len(by_fall) > self._max_entries:
            self._drop_stale()

    def rebuild(self, now_s: float) -> None:
        """Put every leaf where it belongs after the model has changed."""
        live = [naming.leaf for _, ticket, naming in self._by_index if naming.ticket == ticket]
        self._by_index, self._by_fall = [], []
        for leaf in live:
            if leaf is not None:
                self.add(leaf, now_s)

    def __len__(self) -> int:
        return len(self._by_index) + len(self._by_fall)

    def _put(self, naming: Naming, leaf: Node, age_bin: int) -> None:
        row = self._indices[leaf.cohort.code]
        index = row[age_bin]
        naming.ticket = ticket = self._num_tickets = self._num_tickets + 1
        heappush(self._by_index, (index, ticket, naming))
        for lower_bin in range(age_bin + 1, NUM_BINS):
            if row[lower_bin] < index:
                fall_s = naming.time_s + EDGES_S[lower_bin - 1]
                heappush(self._by_fall, (fall_s, ticket, naming, lower_bin))
                break

    def _drop_stale(self) -> None:
        self._by_index = [entry for entry in self._by_index if entry[2].ticket == entry[1]]
        self._by_fall = [entry for entry in self._by_fall if entry[2].ticket == entry[1]]
        heapify(self._by_index)
        heapify(self._by_fall)
        self._max_entries = 2 * max(len(self._by_index), len(self._by_fall)) + MIN_STALE
