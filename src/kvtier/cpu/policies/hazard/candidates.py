"""The held leaves, the one with the lowest index first, while indices change with age.

It decides nothing. A heap holds the leaves by index. An index changes when its block's age passes into another bin,
so a second heap says when that is. Each entry bears a ticket; once its block has another ticket, or none, the entry is
stale.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from kvtier.cpu.policies.hazard.directory import Node
from kvtier.cpu.policies.hazard.model import EDGES_S, NUM_EDGES

MIN_STALE = 64
"""Entries below which stale ones are not worth looking for."""

Entry = tuple[float, int, Node]


class Candidates:
    """Leaves that may leave.

    Args:
        indices: what orders them: the index of each class in each bin of age.
    """

    def __init__(self, indices: Mapping[int, Sequence[float]]) -> None:
        self._indices = indices
        self._by_index: list[Entry] = []
        self._by_change: list[Entry] = []
        self._num_tickets = 0
        self._max_entries = MIN_STALE

    def add(self, node: Node, now_s: float) -> None:
        """Make a leaf a candidate, or put it where it belongs by now."""
        cohort = node.cohort
        named_s = cohort.naming.time_s
        age_bin = bisect_right(EDGES_S, now_s - named_s)
        ticket = node.ticket = self._num_tickets = self._num_tickets + 1
        heappush(self._by_index, (self._indices[cohort.code][age_bin], ticket, node))
        if age_bin < NUM_EDGES:
            heappush(self._by_change, (named_s + EDGES_S[age_bin], ticket, node))

    def pop(self) -> tuple[float, Node] | None:
        """Take the leaf with the lowest index; None when there is none."""
        by_index = self._by_index
        while by_index:
            index, ticket, node = heappop(by_index)
            if node.ticket == ticket:
                node.ticket = 0
                return index, node
        return None

    def renew(self, now_s: float) -> None:
        """Put the leaves that have grown into another bin where they belong by now."""
        by_change = self._by_change
        due = []
        while by_change and by_change[0][0] <= now_s:
            due.append(heappop(by_change))
        # Put back only after all are taken: rounded, an age may lie in its old bin still, and be due again at once.
        for _, ticket, node in due:
            if node.ticket == ticket:
                self.add(node, now_s)
        if len(self._by_index) > self._max_entries or len(self._by_change) > self._max_entries:
            self._drop_stale()

    def rebuild(self, now_s: float) -> None:
        """Put every leaf where it belongs after the model has changed."""
        live = [node for _, ticket, node in self._by_index if node.ticket == ticket]
        self._by_index, self._by_change = [], []
        for node in live:
            self.add(node, now_s)

    def __len__(self) -> int:
        return len(self._by_index) + len(self._by_change)

    def _drop_stale(self) -> None:
        self._by_index = [entry for entry in self._by_index if entry[2].ticket == entry[1]]
        # Whoever has an entry here that is not stale has one there. Its block is not asked again: it may lie anywhere.
        live = {ticket for _, ticket, _ in self._by_index}
        self._by_change = [entry for entry in self._by_change if entry[1] in live]
        heapify(self._by_index)
        heapify(self._by_change)
        self._max_entries = 2 * max(len(self._by_index), len(self._by_change)) + MIN_STALE
