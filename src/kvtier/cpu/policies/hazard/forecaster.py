"""What running requests name beyond the prompt that they came with: the blocks of their answers.

A request arrives once, with its prompt; its answer is first seen when blocks of it are stored, and
follows the end of the prompt.
"""

from collections.abc import Collection, Iterator
from operator import attrgetter

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.cpu.policies.hazard.directory import Node
from kvtier.cpu.policies.hazard.features import HintReader
from kvtier.cpu.policies.hazard.shadow import HazardShadow
from kvtier.cpu.policies.learning import ArrivedRequest, ReuseForecaster

PARENT_OF = attrgetter("parent")


class Answers:
    """The last known block of each running request, for each KV group.

    Args:
        shadow: where blocks are named.
    """

    def __init__(self, shadow: HazardShadow) -> None:
        self._shadow = shadow
        self._tails: dict[str, dict[int, Node]] = {}

    def begin(self, req_id: str, tails: dict[int, Node]) -> None:
        """Note where the prompt of a request ends, by KV group."""
        self._tails[req_id] = tails

    def end(self, req_id: str) -> None:
        """Forget where a request's prompt ended; unknown ones are ignored."""
        self._tails.pop(req_id, None)

    def groups_of(self, req_id: str) -> Collection[int] | None:
        """Return the KV groups in which a request has named blocks, None when it is not running. Pure."""
        tails = self._tails.get(req_id)
        return None if tails is None else tails.keys()

    def learn(self, keys: Collection[OffloadKey], req_id: str) -> Iterator[tuple[Node, list[OffloadKey]]]:
        """Let a request name those of ``keys`` that are not known; those that are it passes over.

        Yields:
            After each KV group of which there were some the block that they follow, and they.
        """
        tails, get = self._tails.get(req_id), self._shadow.directory.nodes.get
        if not tails:
            return
        nodes = list(map(get, keys))
        # Nearly always a request offers blocks of its prompt, and C loops find that out.
        if None not in nodes and frozenset(tails.values()).isdisjoint(map(PARENT_OF, nodes)):
            return
        answers: dict[int, list[OffloadKey]] = {}
        for key in dict.fromkeys(keys):
            group, node = get_offload_group_idx(key), get(key)
            if node is None and group in tails:
                answers.setdefault(group, []).append(key)
            elif node is not None and node.parent is tails.get(group) and group not in answers:
                tails[group] = node
        for group, answer in answers.items():
            tail = tails[group]
            tails[group] = self._shadow.extend(tail, answer)
            yield tail, answer


class HazardForecaster(ReuseForecaster):
    """A learner without a cache.

    Args:
        max_blocks: blocks that it remembers.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hints = HintReader()
        self.clear()

    @property
    def num_remembered_blocks(self) -> int:
        return self._max_blocks

    def clear(self) -> None:
        self._shadow = HazardShadow(0, self._max_blocks)
        self._answers = Answers(self._shadow)

    def note_request(self, request: ArrivedRequest) -> None:
        hint = self._hints.read(request.hints)
        tails: dict[int, Node] = {}
        for named in request.chains:
            _, tail = self._shadow.serve(dict.fromkeys(named), request.arrival_s, hint)
            if tail is not None:
                tails[get_offload_group_idx(tail.key)] = tail
        self._answers.begin(request.req_id, tails)

    def on_stored(self, keys: Collection[OffloadKey], req_id: str) -> None:
        for _ in self._answers.learn(keys, req_id):
            pass

    def on_finished(self, req_id: str) -> None:
        self._answers.end(req_id)

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        return self._shadow.reuse_probabilities(keys, horizon_s)

    def __len__(self) -> int:
        return len(self._shadow.directory.nodes)
