"""How likely blocks come back, learned beside a policy that learns nothing, or too little: keys alone, no block held.

It orders nothing and refuses nothing. It names and remembers blocks as the hazard policy's shadow does, all of them as
ghosts, and fits the same model.
"""

from collections.abc import Collection

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.cpu.policies.hazard.answers import Answers
from kvtier.cpu.policies.hazard.directory import Node
from kvtier.cpu.policies.hazard.hints import HintReader
from kvtier.cpu.policies.hazard.shadow import HazardShadow
from kvtier.cpu.policies.learning import ArrivedRequest, RequestLearner, ReuseForecast


class ReuseForecaster(RequestLearner, ReuseForecast):
    """A learner without a cache.

    Args:
        max_blocks: blocks that it remembers.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hints = HintReader()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._shadow = HazardShadow(0, self._max_blocks)
        self._answers = Answers(self._shadow)

    def note_request(self, request: ArrivedRequest) -> None:
        """Learn that a request arrived."""
        hint = self._hints.read(request.hints)
        tails: dict[int, Node] = {}
        for named in request.chains:
            _, tail = self._shadow.serve(dict.fromkeys(named), request.arrival_s, hint)
            if tail is not None:
                tails[get_offload_group_idx(tail.key)] = tail
        self._answers.begin(request.req_id, tails)

    def note_stored(self, keys: Collection[OffloadKey], req_id: str) -> None:
        """Learn what the answer of a running request adds to its prompt; of other requests nothing."""
        for _ in self._answers.learn(keys, req_id):
            pass

    def note_finished(self, req_id: str) -> None:
        """Forget where the request's prompt ended."""
        self._answers.end(req_id)

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        """Return how likely each of ``keys`` comes back within ``horizon_s``."""
        return self._shadow.reuse_probabilities(keys, horizon_s)

    def __len__(self) -> int:
        return len(self._shadow.directory.nodes)
