"""Reuse probabilities for a primary tier whose policy forecasts none: the hazard model without a cache.

It records requests as the hazard policy's shadow does, with every block a ghost, and fits the same model.
``RunningRequests`` serves both: a request arrives once, with its prompt, and the blocks of its answer, which follow the
prompt, are first seen when they are offered or stored.
"""

from collections.abc import Collection, Iterator
from operator import attrgetter

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.cpu.policies.hazard.features import hint_code
from kvtier.cpu.policies.hazard.prefix_tree import PrefixNode
from kvtier.cpu.policies.hazard.shadow import HazardShadow
from kvtier.cpu.policies.hint_trust import HintTrust
from kvtier.cpu.policies.learning import ArrivedRequest, ReuseForecaster

PARENT_OF = attrgetter("parent")


class HazardForecaster(ReuseForecaster):
    """Learns reuse from requests and holds no blocks.

    Args:
        max_blocks: blocks to remember.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.clear()

    @property
    def num_remembered_blocks(self) -> int:
        return self._max_blocks

    def clear(self) -> None:
        self._shadow = HazardShadow(0, self._max_blocks)
        self._running = RunningRequests(self._shadow)
        self._trust = HintTrust()

    def note_request(self, request: ArrivedRequest) -> None:
        hint = hint_code(self._trust.hear(request.hints, request.arrival_s))
        tails: dict[int, PrefixNode] = {}
        for chain in request.chains:
            _, tail = self._shadow.serve(dict.fromkeys(chain), request.arrival_s, hint)
            if tail is not None:
                tails[get_offload_group_idx(tail.key)] = tail
        self._running.begin(request.req_id, tails)

    def on_stored(self, keys: Collection[OffloadKey], req_id: str) -> None:
        for _ in self._running.learn(keys, req_id):
            pass

    def on_finished(self, req_id: str) -> None:
        self._running.end(req_id)

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        return self._shadow.reuse_probabilities(keys, horizon_s)

    def __len__(self) -> int:
        return len(self._shadow.tree.nodes)


class RunningRequests:
    """The last known block of each running request, for each KV group.

    Args:
        shadow: the shadow that records the blocks of answers.
    """

    def __init__(self, shadow: HazardShadow) -> None:
        self._shadow = shadow
        self._tails: dict[str, dict[int, PrefixNode]] = {}

    def begin(self, req_id: str, tails: dict[int, PrefixNode]) -> None:
        """Record the last block of a request's prompt, by KV group."""
        self._tails[req_id] = tails

    def end(self, req_id: str) -> None:
        """Forget a request; an unknown one is ignored."""
        self._tails.pop(req_id, None)

    def groups_of(self, req_id: str) -> Collection[int] | None:
        """Return the KV groups in which a request has blocks; None when it is not running. Pure."""
        tails = self._tails.get(req_id)
        return None if tails is None else tails.keys()

    def learn(
        self, keys: Collection[OffloadKey], req_id: str
    ) -> Iterator[tuple[PrefixNode, list[OffloadKey]]]:
        """Record the unknown ones of ``keys`` as blocks of the request's answer.

        Yields:
            For each KV group with such blocks, after they are recorded: the block that they follow, and their keys.
        """
        tails, get = self._tails.get(req_id), self._shadow.tree.nodes.get
        if not tails:
            return
        nodes = list(map(get, keys))
        # Nearly every call offers blocks of the prompt only; C loops find that out quickly.
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
