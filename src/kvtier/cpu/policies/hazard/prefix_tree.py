"""The tree of prefixes that the shadow cache knows: held blocks, ghosts, and each block's last access.

A request lists its blocks head first, so each block is the child of the one before it. A block is held only while its
parent is held. So only leaves are evicted, and the children of a ghost are ghosts that are forgotten before it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvtier.base import OffloadKey
from kvtier.errors import InvariantError

MIN_STALE = 64
"""Stale entries of the ghost queue below which a clean-up is not worth its fixed cost. Above it they are dropped when
they outnumber the ghosts: memory stays bounded, and the work for each block constant."""


class Access:
    """One request, shared by the blocks whose last access it was.

    Attributes:
        time_s: when it arrived.
        turn: depth of the conversation that it continued, 0 for the first request.
        request_code: its part of the class of each block.
        leaf: the block of it that the eviction queue holds, or None. Its blocks lie on one path, so at most one is a
            leaf.
        entry_id: id of its live entry in the eviction queue; 0 when it has none.
    """

    __slots__ = ("entry_id", "leaf", "request_code", "time_s", "turn")

    def __init__(self, time_s: float, turn: int, request_code: int) -> None:
        self.time_s = time_s
        self.turn = turn
        self.request_code = request_code
        self.leaf: PrefixNode | None = None
        self.entry_id = 0


class Cohort:
    """Blocks of one class with the same last access; a block leaves it at its next access or when it is forgotten.

    Attributes:
        access: the request.
        code: the class.
        num: blocks left.
    """

    __slots__ = ("access", "code", "num")

    def __init__(self, access: Access, code: int) -> None:
        self.access = access
        self.code = code
        self.num = 0


NOT_ACCESSED = Cohort(Access(0.0, 0, 0), 0)
"""The cohort of a new block until its first access is recorded."""


class PrefixNode:
    """One block.

    Attributes:
        key: its key.
        parent: the block before it; None for the first of a prompt.
        cohort: its class and its last access.
        num_children: known blocks that follow it.
        num_held_children: those of them that are held.
        num_seen: requests that named it, the first included.
        ghost_number: number of its latest entry in the ghost queue; 0 before the first.
        is_held: whether it is held.
    """

    __slots__ = (
        "cohort",
        "ghost_number",
        "is_held",
        "key",
        "num_children",
        "num_held_children",
        "num_seen",
        "parent",
    )

    def __init__(self, key: OffloadKey, parent: "PrefixNode | None") -> None:
        self.key = key
        self.parent = parent
        self.cohort = NOT_ACCESSED
        self.num_children = self.num_held_children = 0
        self.num_seen = 1
        self.ghost_number = 0
        self.is_held = False
        if parent is not None:
            parent.num_children += 1


class PrefixTree:
    """The known blocks, held ones and ghosts.

    Args:
        max_ghosts: ghosts to remember.

    Attributes:
        nodes: the blocks by key.
        num_held: how many of them are held.
    """

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self.nodes: dict[OffloadKey, PrefixNode] = {}
        self.num_held = 0
        # Ghosts, oldest first. An entry is stale when its block has a later entry or is held. An ordered dictionary
        # would touch neighbours all over memory with each call. INVARIANT: entries are numbered without gaps, up to
        # _last_ghost_number.
        self._ghost_queue: deque[PrefixNode] = deque()
        self._last_ghost_number = 0

    @property
    def num_ghosts(self) -> int:
        """Blocks that are not held."""
        return len(self.nodes) - self.num_held

    def find_or_add(
        self, keys: Iterable[OffloadKey], parent: PrefixNode | None = None
    ) -> tuple[list[PrefixNode], int]:
        """Return the nodes of ``keys``, and how many of them were known before.

        A key stands for its whole prefix, so a known block keeps its parent. The chain ends at a key that breaks this
        rule.

        Args:
            keys: distinct, head first.
            parent: the block before them.

        Effects:
            Unknown keys become nodes that are neither held nor ghosts: call ``hold`` or ``add_ghosts`` for them.
        """
        get, nodes = self.nodes.get, self.nodes
        chain: list[PrefixNode] = []
        num_known = 0
        # A plain loop: for the lengths of most requests, and up to some forty blocks, C-level iteration is slower.
        for key in keys:
            node = get(key)
            if node is None:
                node = nodes[key] = PrefixNode(key, parent)
            elif node.parent is parent and num_known == len(chain):
                num_known += 1
            else:
                break
            chain.append(node)
            parent = node
        return chain, num_known

    def hold(self, node: PrefixNode) -> None:
        """Hold a block whose parent is held."""
        node.is_held = True
        self.num_held += 1
        if node.parent is not None:
            node.parent.num_held_children += 1

    def release(self, node: PrefixNode) -> None:
        """Make a held leaf the youngest ghost."""
        node.is_held = False
        self.num_held -= 1
        self._last_ghost_number = node.ghost_number = self._last_ghost_number + 1
        self._ghost_queue.append(node)
        if node.parent is not None:
            node.parent.num_held_children -= 1

    def add_ghosts(self, nodes: Sequence[PrefixNode]) -> None:
        """Make the unheld blocks of a request, given head first, the youngest ghosts; its tail is forgotten first."""
        number = self._last_ghost_number
        for node in reversed(nodes):
            number += 1
            node.ghost_number = number
        self._last_ghost_number = number
        self._ghost_queue.extend(reversed(nodes))

    def forget_oldest_ghosts(self) -> list[Cohort]:
        """Forget the ghosts beyond the limit, oldest first; return the cohort of each."""
        queue, nodes = self._ghost_queue, self.nodes
        number = self._last_ghost_number - len(queue)
        num_left = self.num_ghosts - self.max_ghosts
        cohorts = []
        while num_left > 0:
            node = queue.popleft()
            number += 1
            if node.ghost_number != number or node.is_held:
                continue
            del nodes[node.key]
            if node.parent is not None:
                node.parent.num_children -= 1
            cohorts.append(node.cohort)
            num_left -= 1
        if len(queue) > 2 * self.num_ghosts + MIN_STALE:
            self._drop_stale()
        return cohorts

    def check(self) -> None:
        """Recount; for tests, it visits every block.

        Raises:
            InvariantError: a held block's parent is not held, a count is wrong, a held leaf is not in the eviction
                queue, or a ghost is not in the ghost queue.
        """
        held = [node for node in self.nodes.values() if node.is_held]
        parents = Counter(node.parent for node in held)
        for node in self.nodes.values():
            if node.num_held_children != parents[node]:
                raise InvariantError(f"the held children of block {node.key.hex()} are miscounted")
            if node.parent is not None and self.nodes.get(node.parent.key) is not node.parent:
                raise InvariantError(f"block {node.key.hex()} is known and its parent is not")
            if node.is_held and not node.num_held_children and node.cohort.access.leaf is not node:
                raise InvariantError(f"block {node.key.hex()} is a held leaf and not in the eviction queue")
            if node.is_held and node.parent is not None and not node.parent.is_held:
                raise InvariantError(f"block {node.key.hex()} is held and its parent is not")
        ghosts = {node.key for node in self._live_ghosts()}
        if len(held) != self.num_held or ghosts != self.nodes.keys() - {node.key for node in held}:
            raise InvariantError(
                f"{len(held)} blocks held, {len(ghosts)} ghosts of {len(self.nodes)} blocks, counted {self.num_held}"
            )

    def _live_ghosts(self) -> list[PrefixNode]:
        """Return the ghosts in the order in which they are forgotten. Pure."""
        first = self._last_ghost_number - len(self._ghost_queue) + 1
        return [
            node
            for number, node in enumerate(self._ghost_queue, first)
            if node.ghost_number == number and not node.is_held
        ]

    def _drop_stale(self) -> None:
        live = self._live_ghosts()
        for number, node in enumerate(live, 1):
            node.ghost_number = number
        self._ghost_queue, self._last_ghost_number = deque(live), len(live)
