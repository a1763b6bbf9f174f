"""An LRU policy that writes down what it is told of requests, and refuses and expects what it was told to."""

from collections.abc import Collection
from typing import ClassVar

from kvtier.base import OffloadKey
from kvtier.cpu.policies.learning import ArrivedRequest, ReuseForecast
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.registry import CACHE_POLICIES

NOTING_LEARNER = "noting learner"
"""Its registered name."""


class NotingLearner(LRUCachePolicy, ReuseForecast):
    """Notes requests and ends, and what was offered by whom."""

    made: ClassVar[list["NotingLearner"]] = []

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.requests: list[ArrivedRequest] = []
        self.finished: list[str] = []
        self.offered: list[tuple[str, list[OffloadKey]]] = []
        self.refused: set[OffloadKey] = set()
        self.expected: dict[OffloadKey, float] = {}
        self.made.append(self)

    @property
    def forecast(self) -> ReuseForecast:
        return self

    @property
    def num_remembered_blocks(self) -> int:
        return 4 * self.cache_capacity

    def note_request(self, request: ArrivedRequest) -> None:
        self.requests.append(request)

    def on_finished(self, req_id: str) -> None:
        self.finished.append(req_id)

    def admit(self, keys: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        self.offered.append((req_id, list(keys)))
        return [key for key in keys if key not in self.refused]

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        return [self.expected.get(key) for key in keys]


CACHE_POLICIES.register(NOTING_LEARNER, "tests.cpu.policies.learner:NotingLearner")
