"""Optional contracts of policies that learn from whole requests: arrivals, admission, and forecasts of reuse.

A manager calls its policy through those of them that the policy implements. An engine's connector and a replay call the
same methods of the manager, so that a policy learns in production what it learned in a replay.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvtier.base import OffloadKey

NO_HINTS: Mapping[str, Any] = {}  # Any: see ArrivedRequest; hints are read only


class ArrivedRequest(NamedTuple):
    """A request, as it is known when it arrives.

    A tuple, since one is made for each request; a frozen dataclass takes three times as long to make.

    Attributes:
        req_id: the engine's name of it.
        chains: for each KV group the keys of its full blocks, head first; each key stands for its whole prefix.
        arrival_s: when, in seconds on the manager's clock.
        hints: the client's hints, its ``kv_transfer_params``.
    """

    req_id: str
    chains: tuple[Sequence[OffloadKey], ...]
    arrival_s: float
    hints: Mapping[str, Any] = NO_HINTS  # Any: a client's JSON, checked where it is read


class RequestLearner(ABC):
    """A policy that learns from requests. Without these calls it orders blocks by the calls about blocks alone."""

    @abstractmethod
    def note_request(self, request: ArrivedRequest) -> None:
        """Learn that a request arrived; once for each, before any other call is made for it."""

    @abstractmethod
    def on_finished(self, req_id: str) -> None:
        """Forget what only the running request needed; unknown ones are ignored."""


class AdmissionControl(ABC):
    """A policy that refuses blocks which are worth less than those they would replace."""

    @abstractmethod
    def admit(self, keys: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        """Return those of ``keys`` that shall be stored, in order; of each KV group none after the first refused.

        Returning ``keys`` itself means that none is refused, and saves the caller a search.

        Args:
            keys: what a request offers, head first within each group. They may go on where its arrival ended.
            req_id: the request.
        """


class ReuseForecast(ABC):
    """Estimates how likely blocks are used again, for tiers that admit only such blocks."""

    @property
    @abstractmethod
    def num_remembered_blocks(self) -> int:
        """How many blocks it can remember beyond those that are held; it estimates nothing for others."""

    @abstractmethod
    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        """Return how likely each of ``keys`` is named again within ``horizon_s`` of the last request's arrival. Pure.

        Returns:
            In the order of ``keys``, from 0 to 1; None for a block that nothing is known of, and for each while too
            little was learned.
        """


class ReuseForecaster(RequestLearner, ReuseForecast):
    """Learns from requests like a policy, and holds no blocks; for a primary tier whose policy gives no forecast."""

    @abstractmethod
    def on_stored(self, keys: Collection[OffloadKey], req_id: str) -> None:
        """Learn from blocks of the request's answer that were stored."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""
