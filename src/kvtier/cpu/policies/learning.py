"""What is learned from requests: their arrivals, and forecasts of reuse."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvtier.base import OffloadKey, ReqContext
from kvtier.hints.values import NO_HINTS, NO_PARAMS, RequestHints


class ArrivedRequest(NamedTuple):
    """A request, as it is known when it arrives.

    A NamedTuple, because one is made for each request and a frozen dataclass takes three times as long.

    Attributes:
        req_id: the engine's name of it.
        chains: for each KV group the keys of its full blocks, head first; each key stands for its whole prefix.
        arrival_s: time of arrival on the manager's clock.
        hints: what the client says of it.
        params: the client's ``kv_transfer_params`` as they came, for policies with hints of their own.
    """

    req_id: str
    chains: tuple[Sequence[OffloadKey], ...]
    arrival_s: float
    hints: RequestHints = NO_HINTS
    params: Mapping[str, Any] = NO_PARAMS  # Any: a client's JSON, checked where it is read


def make_arrived(
    chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext, arrival_s: float
) -> ArrivedRequest:
    """Return what a policy learns of a request that arrives now."""
    params = req_context.kv_transfer_params
    if not params:
        return ArrivedRequest(req_context.req_id, tuple(chains), arrival_s)
    return ArrivedRequest(req_context.req_id, tuple(chains), arrival_s, req_context.hints, params)


class ReuseForecast(ABC):
    """Estimates the probability that blocks are reused, for tiers with an admission threshold."""

    @property
    @abstractmethod
    def num_remembered_blocks(self) -> int:
        """How many blocks it can remember beyond the held ones; it has no estimate for others."""

    @abstractmethod
    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        """Return the probability that each of ``keys`` is reused within ``horizon_s`` of the last arrival. Pure.

        Returns:
            In the order of ``keys``, from 0 to 1; None for an unknown block, and for all while too little was learned.
        """


class ReuseForecaster(ReuseForecast):
    """Learns from requests and holds no blocks; for a primary tier whose policy gives no forecast."""

    @abstractmethod
    def note_request(self, request: ArrivedRequest) -> None:
        """Learn that a request arrived, as ``CachePolicy.note_request``."""

    @abstractmethod
    def on_finished(self, req_id: str) -> None:
        """Forget a request's running state; unknown requests are ignored."""

    @abstractmethod
    def on_stored(self, keys: Collection[OffloadKey], req_id: str) -> None:
        """Learn from stored blocks, which may belong to the request's answer."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""
