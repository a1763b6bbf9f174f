"""What may be plugged into the scheduler half: a feature is called at fixed moments of a request and of a step.

The scheduler half knows no feature by name on its way. It keeps, for each hook, the methods that its features override
(``Hooks``), and calls them in the order of the features: audit, load or compute, recorder, records, those that an
engine brings along, control. A hook that no feature overrides is a loop over nothing.

A request passes the hooks in this order; those in brackets once for each search, the others once, unless the engine
pre-empts it:

    on_arrived  [withholds  limit  shorten]  on_begun  on_pinned  on_load_ended  on_stored ...  on_finished

and a step ``plan_step``, ``on_step_end``, ``on_report``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

from kvtier.base import OffloadKey
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata, StopReason
from kvtier.connector.jobs import OpenTransfer
from kvtier.connector.protocols import ControlledHalf, SchedulerOutput
from kvtier.connector.request_state import RequestState
from kvtier.misses import Miss, MissCause


@dataclass(frozen=True, slots=True, eq=False)
class Withheld:
    """Why a feature has a request compute tokens that may be held.

    Attributes:
        miss: the cause, as the request's record names it.
        tokens_by_tier: how many tokens of each tier are not loaded, by medium or type of the tier. Empty: the cause is
            that of all tokens between those loaded and the end of what the search has found, as after ``shorten``.
        first_token: where those of ``tokens_by_tier`` begin; None: where what the search has found ends, as after
            ``limit``, which keeps the search from finding them.
        is_unsearched: whether nothing was searched, as after ``withholds``: the cause is that of all tokens, also of
            those that are held nowhere.
    """

    miss: Miss
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    first_token: int | None = None
    is_unsearched: bool = False


UNDECIDED = Withheld(Miss(MissCause.AUDITED))
"""The answer of a feature that does not know yet. The record is made when the feature calls ``on_begun`` of the records
once more."""


class RequestFeature:
    """Something optional that follows the requests of a scheduler half. By default every hook does nothing.

    Its methods are called on the scheduler's thread, and ``stats`` on any. They must not raise or block: an exception
    ends the engine's step. What a feature knows of a request it keeps itself, by ``RequestState``, from the first hook
    that names it to ``on_finished``.
    """

    def on_arrived(self, state: RequestState) -> None:
        """Receive a request before its first search."""

    def withholds(self, state: RequestState) -> bool:
        """Return whether the request is answered at once, without a search, that nothing is to be loaded."""
        return False

    def limit(self, state: RequestState, first_token: int, end_token: int) -> int | None:
        """Return how far to search; None: the request waits and asks again in the next step.

        Args:
            state: the request, its keys grown.
            first_token: leading tokens that the device has.
            end_token: where the search would end: the end of the prompt, or what a feature before this one allows.
        """
        return end_token

    def shorten(self, state: RequestState, first_token: int, end_token: int) -> int:
        """Return up to which token to load, between both, ends included; called when a search has its final answer.

        The half loads whole blocks up to there. For groups that need only a tail of the prefix, such as sliding
        windows, it looks up the tail of the shorter prefix; the request may have to wait for that, and is searched
        again.
        """
        return end_token

    def on_begun(self, state: RequestState, num_loaded_tokens: int) -> None:
        """Receive a request that the engine begins.

        Nothing is pinned yet, and the manager still knows what the request has waited for. An engine may begin a
        request again, without a load, when its load has ended.
        """

    def on_pinned(self, state: RequestState, num_loaded_tokens: int) -> None:
        """Receive the same request when the blocks of its load, if it has any, are pinned and its wait is over."""

    def plan_step(self, output: SchedulerOutput, plan: OffloadingConnectorMetadata) -> None:
        """Add work to a step, before the stores of its requests are planned.

        Args:
            output: what the step computes.
            plan: the workers' work; a feature may add to ``store_jobs`` what it has opened in ``TransferJobs``, and set
                ``measured_step``.
        """

    def on_stored(self, state: RequestState, keys: Collection[OffloadKey]) -> None:
        """Receive the blocks of a store that was planned: they were held nowhere before."""

    def on_load_ended(self, job: OpenTransfer) -> None:
        """Receive the end of a load, well or badly; its request may have finished."""

    def on_report(self, report: OffloadingWorkerMetadata | None, ended_jobs: Sequence[OpenTransfer]) -> None:
        """Receive what the workers report of a step, when the manager knows of the jobs that have ended.

        Args:
            report: of all workers; None when none had anything to report.
            ended_jobs: the jobs that every worker has reported by now, oldest first.
        """

    def on_step_end(self) -> None:
        """Receive the end of a step, after the manager's ``end_step``."""

    def needs_step(self) -> bool:
        """Return whether the engine should make further steps, although it has no request."""
        return False

    def on_finished(self, state: RequestState, stop: StopReason, is_traffic: bool) -> None:
        """Receive the end of a request, before the manager's ``request_finished``; its jobs may still be open.

        Args:
            state: the request, with its answer.
            stop: why its answer ended.
            is_traffic: whether it came from outside; engines have requests of their own.
        """

    def on_dropped(self, req_id: str) -> None:
        """Receive the end of a request that never came to a search, so that no other hook has named it."""

    def on_reset(self) -> None:
        """Receive a reset, before the manager forgets its blocks."""

    def why_computed(self, state: RequestState) -> Withheld | None:
        """Return why the feature has kept a request from loading; None: it has not.

        The records call this when the engine begins the request, before they and later features get ``on_begun``. Of
        several features with an answer of one kind the first stands.
        """
        return None

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by dotted name. Thread: any."""
        return {}

    def close(self, unfinished: Collection[RequestState]) -> None:
        """End, before the manager does; idempotent.

        Args:
            unfinished: the requests that have not ended.
        """


class StepControl(RequestFeature, ABC):
    """Serves the operators of a living engine.

    Attributes:
        is_wanted: whether the end of the next step has something to do.
    """

    is_wanted: bool = False

    @property
    @abstractmethod
    def has_commands(self) -> bool:
        """Whether commands wait or are under way, so that the engine should step."""

    @abstractmethod
    def attach(self, half: ControlledHalf) -> RequestFeature:
        """Begin to show ``half``, without keeping it alive; return this feature."""

    def needs_step(self) -> bool:
        return self.has_commands


@dataclass(slots=True)
class Hooks:
    """For each hook the methods of the features that override it, in the order of the features.

    The lists are filled while the half is built and never change afterwards; what is built before the last feature
    may keep a list. A method is looked up in the class of its feature.
    """

    on_arrived: list[Callable[[RequestState], None]] = field(default_factory=list)
    withholds: list[Callable[[RequestState], bool]] = field(default_factory=list)
    limit: list[Callable[[RequestState, int, int], int | None]] = field(default_factory=list)
    shorten: list[Callable[[RequestState, int, int], int]] = field(default_factory=list)
    on_begun: list[Callable[[RequestState, int], None]] = field(default_factory=list)
    on_pinned: list[Callable[[RequestState, int], None]] = field(default_factory=list)
    plan_step: list[Callable[[SchedulerOutput, OffloadingConnectorMetadata], None]] = field(
        default_factory=list
    )
    on_stored: list[Callable[[RequestState, Collection[OffloadKey]], None]] = field(default_factory=list)
    on_load_ended: list[Callable[[OpenTransfer], None]] = field(default_factory=list)
    on_report: list[Callable[[OffloadingWorkerMetadata | None, Sequence[OpenTransfer]], None]] = field(
        default_factory=list
    )
    on_step_end: list[Callable[[], None]] = field(default_factory=list)
    needs_step: list[Callable[[], bool]] = field(default_factory=list)
    on_finished: list[Callable[[RequestState, StopReason, bool], None]] = field(default_factory=list)
    on_dropped: list[Callable[[str], None]] = field(default_factory=list)
    on_reset: list[Callable[[], None]] = field(default_factory=list)
    why_computed: list[Callable[[RequestState], Withheld | None]] = field(default_factory=list)
    stats: list[Callable[[], dict[str, float]]] = field(default_factory=list)
    close: list[Callable[[Collection[RequestState]], None]] = field(default_factory=list)

    def add(self, feature: RequestFeature) -> None:
        """Add what a feature overrides."""
        for hook in fields(self):
            if getattr(type(feature), hook.name) is not getattr(RequestFeature, hook.name):
                getattr(self, hook.name).append(getattr(feature, hook.name))
