"""Blocks by name: those that the policy would hold, and ghosts; how they hang together, and who named them when.

It decides nothing and learns nothing. A request names its blocks head first, each the child of the one before it.
What is held hangs together from the roots: a block is held only while its parent is. So only leaves leave, and a
ghost's children are ghosts that are forgotten before it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvtier.base import OffloadKey
from kvtier.errors import InvariantError

MIN_STALE = 64
"""Burials below which stale ones are not worth looking for. Above it they are dropped when they outnumber the ghosts,
which bounds the memory and makes a block's share of the work constant."""


class Naming:
    """One request, as the blocks that it named last remember it.

    Attributes:
        time_s: when.
        turn: depth of the conversation that it continued, 0 for the first request.
        request_code: its part of the class of each block.
        leaf: which of its blocks is a candidate to leave; None when none is. They lie on one path, so one at most is.
        handle: number of its place among the candidates; 0 when it has none.
    """

    __slots__ = ("handle", "leaf", "request_code", "time_s", "turn")

    def __init__(self, time_s: float, turn: int, request_code: int) -> None:
        self.time_s = time_s
        self.turn = turn
        self.request_code = request_code
        self.leaf: Node | None = None
        self.handle = 0


class Cohort:
    """Blocks of one class that one request named; blocks leave it when they are named again or forgotten.

    Attributes:
        naming: the request.
        code: the class.
        num: blocks left.
    """

    __slots__ = ("code", "naming", "num")

    def __init__(self, naming: Naming, code: int) -> None:
        self.naming = naming
        self.code = code
        self.num = 0


UNNAMED = Cohort(Naming(0.0, 0, 0), 0)
"""Where blocks are between becoming known and being named."""


class Node:
    """One block.

    Attributes:
        key: its key.
        parent: the block before it; None for the first of a prompt.
        cohort: its class and who named it last.
        num_children: blocks known to follow it.
        num_held_children: those of them that are held.
        num_seen: requests that named it, the one that made it known included.
        burial: number of its latest burial; 0 before the first.
        is_held: whether it is held.
    """

    __slots__ = (
        "burial",
        "cohort",
        "is_held",
        "key",
        "num_children",
        "num_held_children",
        "num_seen",
        "parent",
    )

    def __init__(self, key: OffloadKey, parent: "Node | None") -> None:
        self.key = key
        self.parent = parent
        self.cohort = UNNAMED
        self.num_children = self.num_held_children = 0
        self.num_seen = 1
        self.burial = 0
        self.is_held = False
        if parent is not None:
            parent.num_children += 1


class Directory:
    """The known blocks.

    Args:
        max_ghosts: known blocks that are not held.

    Attributes:
        nodes: by key.
        num_held: those that are held.
    """

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self.nodes: dict[OffloadKey, Node] = {}
        self.num_held = 0
        # Every burial in turn; one is stale when its block was buried again or is held. An ordered dictionary would
        # reach for neighbours all over memory with each call. INVARIANT: numbers follow one another, and the last one's
        # is _num_burials.
        self._burials: deque[Node] = deque()
        self._num_burials = 0

    @property
    def num_ghosts(self) -> int:
        """Blocks that are not held."""
        return len(self.nodes) - self.num_held

    def chain_of(self, keys: Iterable[OffloadKey], parent: Node | None = None) -> tuple[list[Node], int]:
        """Return the nodes of ``keys``, and how many of them were known before.

        A key stands for its whole prefix, so that a known block has the parent that it always had. Where a caller's
        keys are not such, the chain ends.

        Args:
            keys: distinct, head first.
            parent: the block before them.

        Effects:
            Unknown ones become nodes, neither held nor ghosts: hold them or bury them.
        """
        get, nodes = self.nodes.get, self.nodes
        chain: list[Node] = []
        num_known = 0
        # For as few blocks as requests mostly name, and for forty as well, loops in C take longer.
        for key in keys:
            node = get(key)
            if node is None:
                node = nodes[key] = Node(key, parent)
            elif node.parent is parent and num_known == len(chain):
                num_known += 1
            else:
                break
            chain.append(node)
            parent = node
        return chain, num_known

    def hold(self, node: Node) -> None:
        """Hold a block whose parent is held."""
        node.is_held = True
        self.num_held += 1
        if node.parent is not None:
            node.parent.num_held_children += 1

    def release(self, node: Node) -> None:
        """Make a held leaf the youngest ghost."""
        node.is_held = False
        self.num_held -= 1
        self._num_burials = node.burial = self._num_burials + 1
        self._burials.append(node)
        if node.parent is not None:
            node.parent.num_held_children -= 1

    def bury(self, nodes: Sequence[Node]) -> None:
        """Make the blocks that a request named and that are not held the youngest ghosts, its tail forgotten first."""
        number = self._num_burials
        for node in reversed(nodes):
            number += 1
            node.burial = number
        self._num_burials = number
        self._burials.extend(reversed(nodes))

    def forget_oldest(self) -> list[Cohort]:
        """Forget the ghosts beyond the limit; return the cohort of each of them."""
        burials, nodes = self._burials, self.nodes
        number = self._num_burials - len(burials)
        num_left = self.num_ghosts - self.max_ghosts
        cohorts = []
        while num_left > 0:
            node = burials.popleft()
            number += 1
            if node.burial != number or node.is_held:
                continue
            del nodes[node.key]
            if node.parent is not None:
                node.parent.num_children -= 1
            cohorts.append(node.cohort)
            num_left -= 1
        if len(burials) > 2 * self.num_ghosts + MIN_STALE:
            self._drop_stale()
        return cohorts

    def check(self) -> None:
        """Recount; for tests, it visits every block.

        Raises:
            InvariantError: a held block's parent is not held, a count is wrong, a held leaf cannot leave, or a ghost
                cannot be forgotten.
        """
        held = [node for node in self.nodes.values() if node.is_held]
        parents = Counter(node.parent for node in held)
        for node in self.nodes.values():
            if node.num_held_children != parents[node]:
                raise InvariantError(f"the held children of block {node.key.hex()} are miscounted")
            if node.parent is not None and self.nodes.get(node.parent.key) is not node.parent:
                raise InvariantError(f"block {node.key.hex()} is known and its parent is not")
            if node.is_held and not node.num_held_children and node.cohort.naming.leaf is not node:
                raise InvariantError(f"block {node.key.hex()} is a held leaf and no candidate to leave")
            if node.is_held and node.parent is not None and not node.parent.is_held:
                raise InvariantError(f"block {node.key.hex()} is held and its parent is not")
        ghosts = {node.key for node in self._live_burials()}
        if len(held) != self.num_held or ghosts != self.nodes.keys() - {node.key for node in held}:
            raise InvariantError(
                f"{len(held)} blocks held, {len(ghosts)} ghosts of {len(self.nodes)} blocks, counted {self.num_held}"
            )

    def _live_burials(self) -> list[Node]:
        """Return the ghosts in the order in which they are forgotten. Pure."""
        first = self._num_burials - len(self._burials) + 1
        return [
            node
            for number, node in enumerate(self._burials, first)
            if node.burial == number and not node.is_held
        ]

    def _drop_stale(self) -> None:
        live = self._live_burials()
        for number, node in enumerate(live, 1):
            node.burial = number
        self._burials, self._num_burials = deque(live), len(live)
