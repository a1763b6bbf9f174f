"""Whether to load a hit that would be faster to recompute.

A prefix is loaded up to some block and computed from there on, so there is one number to choose. Every choice has a
time until the request's first token:

- the tiers promote their blocks in parallel, each after the loads that it has queued;
- meanwhile the engine computes the prompts that it has started before; the longer of the two counts;
- then the blocks go to the device, and the rest of the prompt is computed.

Other requests wait too: for the engine while it computes this one, for a tier while it loads this one. That time is
added at half its weight. The choice with the lowest sum wins; of equal ones the one that loads most. A time that was
not measured yet counts as zero, so the blocks are loaded and the time is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.base import OffloadingManager, OffloadingSpec, OffloadKey
from kvtier.config import LoadIf
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata, StopReason
from kvtier.connector.features import RequestFeature, Withheld
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.jobs import OpenTransfer
from kvtier.connector.metrics import add_tokens
from kvtier.connector.prefix_search import split_by_need
from kvtier.connector.protocols import SchedulerOutput
from kvtier.connector.request_state import RequestState
from kvtier.cost_model import BandwidthEstimator, LinkRate, PrefillEstimator, PrefillRate, compute_s
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.locations import BlockLocator, BlockPlace, LocatedRun, TierLoad
from kvtier.misses import Miss, MissCause

HIDDEN_WAIT_COST = 0.5
"""What a second costs that a request waits for a tier while it would have waited for the engine anyway. The queue may
be shorter than it looks, and the request loses its turn: requests that come meanwhile are computed first, and an engine
that is busy half of the time gives half of what was hidden to those. At 0 a load of minutes that saves a second is free
behind any queue; at 1 nothing is hidden, and an engine that is behind computes what it could have loaded."""

OTHERS_WEIGHT = 0.5
"""What a second costs that others wait for a request, beside one of its own. How many will come behind it is a guess.
At 0 no request counts the others, and an engine that is behind computes what a tier could give it: measured on a
recorded trace, with a tier at three quarters of its break-even, the median first token then came 11 % later than with
everything loaded. At 1 a request may wait long for the sake of others that never come."""


SLOWER = Miss(MissCause.SLOWER)


class HitFilter(Protocol):
    """Knows which hits turned out slower to load than to compute (``audit.Audit``)."""

    def withholds(self, state: RequestState) -> bool:
        """Return whether a request that is searched is computed whatever the search finds."""

    def skips(self, state: RequestState, tokens_by_tier: Mapping[str, int]) -> bool:
        """Return whether to compute the hit of a request, given as tokens by medium or type of their tier."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Hits of a search that the request does not load.

    Attributes:
        tokens: how many, by where they are: "CPU", or a tier's type.
        to_probe: blocks to measure anew, by the position of their tier; nothing else is loaded from these tiers.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)
    to_probe: Mapping[int, Sequence[OffloadKey]] = field(default_factory=dict)


NOTHING_UNWANTED = Unwanted()


@dataclass(slots=True)
class ChoiceState:
    """How much of the request is worth loading.

    Attributes:
        num_begun_tokens: tokens that it had, those of its load included, when the engine began it; None before.
        wanted_end_token: how far to load it, once chosen and until the engine begins it; None otherwise.
        unwanted: what was found and not loaded because computing it is faster.
    """

    num_begun_tokens: int | None = None
    wanted_end_token: int | None = None
    unwanted: Unwanted = NOTHING_UNWANTED


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """The inputs of a request's times, besides its tiers.

    Attributes:
        first_token: leading tokens that the device has.
        end_token: length of the prompt.
        block_tokens: tokens that a block covers.
        block_bytes: bytes of a block on the device, all groups and workers together.
        rows_per_block: rows of host memory that it takes: one for each KV group that loads every block.
        prefill: how fast prompts are computed.
        to_device: the link from host memory to the device; None while it is not measured.
        queue_s: seconds that the engine needs for the prompts it has begun.
        num_queued: how many those are.
        deadline_s: seconds that a request may wait for its blocks; what takes longer would not be loaded in the end.
    """

    first_token: int
    end_token: int
    block_tokens: int
    block_bytes: int
    prefill: PrefillRate
    to_device: LinkRate | None = None
    queue_s: float = 0.0
    num_queued: int = 0
    deadline_s: float = float("inf")
    rows_per_block: float = 1.0


def plan_load_cut(places: Sequence[BlockPlace], tiers: Sequence[TierLoad], costs: PromptCosts) -> int:
    """Return how many of the leading blocks to load. Pure.

    Args:
        places: where each block of the run is.
        tiers: what a load from each tier would cost, by position.
        costs: the rest.
    """
    num_rows: dict[int, float] = {}
    promote_s = 0.0
    best, best_s = 0, first_token_s(0, promote_s, costs) + others_s(0, {}, tiers, costs)
    for num_blocks, place in enumerate(places, start=1):
        if place.tier is not None:
            own_rows = 0.0 if place.is_coming else costs.rows_per_block
            rows = num_rows[place.tier] = num_rows.get(place.tier, 0.0) + own_rows
            promote_s = max(promote_s, tiers[place.tier].time_s(rows))
            if promote_s > costs.deadline_s:
                break
        time_s = first_token_s(num_blocks, promote_s, costs) + others_s(num_blocks, num_rows, tiers, costs)
        if time_s <= best_s:
            best, best_s = num_blocks, time_s
    return best


def others_s(
    num_blocks: int, num_rows: Mapping[int, float], tiers: Sequence[TierLoad], costs: PromptCosts
) -> float:
    """Return the weighted seconds that this many loaded blocks cost other requests. Pure.

    As many requests are taken to come behind it as are in front of it: what it computes delays those that wait for the
    engine, what it loads those that wait for the same tier.

    Args:
        num_blocks: leading blocks of the run.
        num_rows: rows that each tier brings up for it.
        tiers: what a load from each tier would cost, by position.
        costs: of the request.
    """
    loading_s = sum(tiers[tier].num_queued * tiers[tier].own_s(rows) for tier, rows in num_rows.items())
    return OTHERS_WEIGHT * (loading_s + costs.num_queued * computing_s(num_blocks, costs))


def first_token_s(num_blocks: int, promote_s: float, costs: PromptCosts) -> float:
    """Return the seconds until the first token when this many blocks are loaded. Pure.

    Args:
        num_blocks: leading blocks of the run.
        promote_s: seconds until they are all in host memory.
        costs: of the request.
    """
    copy_s = costs.to_device.time_s(num_blocks * costs.block_bytes) if costs.to_device else 0.0
    hidden_s = HIDDEN_WAIT_COST * min(promote_s, costs.queue_s)
    return max(promote_s, costs.queue_s) + hidden_s + copy_s + computing_s(num_blocks, costs)


def computing_s(num_blocks: int, costs: PromptCosts) -> float:
    """Return the seconds to compute the rest of the prompt when this many blocks are loaded. Pure."""
    end_block = costs.first_token // costs.block_tokens + num_blocks
    computed_from = max(costs.first_token, end_block * costs.block_tokens)
    return compute_s(computed_from, costs.end_token, costs.prefill)


def list_unwanted(places: Sequence[BlockPlace], num_wanted: int) -> dict[int, list[int]]:
    """Return, for each tier from which nothing is loaded, its blocks that the request does not load. Pure."""
    used = {place.tier for place in places[:num_wanted]}
    unwanted: dict[int, list[int]] = {}
    for block, place in enumerate(places[num_wanted:], start=num_wanted):
        if place.tier is not None and place.tier not in used and not place.is_coming:
            unwanted.setdefault(place.tier, []).append(block)
    return unwanted


class LoadOrCompute(RequestFeature):
    """The choices of one scheduler half. Used from one thread.

    Args:
        spec: has the sizes of blocks; at least one of its groups needs a whole prefix.
        locator: where the blocks are.
        requests: the scheduler half's requests by name; its own mapping, read only.
        clock: seconds, monotonic.
        measured: knows which hits turned out slower to load; None: they are not measured.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        locator: BlockLocator,
        requests: Mapping[str, RequestState],
        clock: Callable[[], float],
        measured: HitFilter | None = None,
    ) -> None:
        self._measured = measured
        self._locator = locator
        self._requests = requests
        self._choices: dict[RequestState, ChoiceState] = {}
        self._not_loaded_tokens: dict[str, int] = {}
        self._clock = clock
        self._prefill_estimator = PrefillEstimator()
        self._bandwidth_estimator = BandwidthEstimator()
        full = split_by_need(make_group_layouts(spec)).full
        # Blocks of the other groups are taken to be where those of the first are.
        self._layout = full[0]
        rows = [self._layout.block_tokens / layout.block_tokens for layout in full]
        self._rows_per_block = sum(rows)
        pages = [spec.config.groups[layout.idx].page_size_bytes for layout in full]
        page_bytes = sum(page * ratio for page, ratio in zip(pages, rows, strict=True))
        self._block_bytes = round(spec.config.world_size * spec.block_size_factor * page_bytes)

    def limit(self, state: RequestState, first_token: int, end_token: int) -> int | None:
        prefill = self._prefill_estimator.rate()
        if prefill is None:
            return end_token
        choice = self._choice_of(state)
        if choice.wanted_end_token is not None:
            return min(end_token, choice.wanted_end_token)
        choice.unwanted = NOTHING_UNWANTED
        block_tokens = self._layout.block_tokens
        first_block = first_token // block_tokens
        keys = state.keys[self._layout.idx][first_block : max(first_block, end_token // block_tokens)]
        run = self._locator.locate(keys, state.context)
        if run is None:
            return None
        if (
            self._measured is not None
            and run.places
            and self._measured.skips(state, self._count_tokens(run, 0))
        ):
            choice.unwanted = self._describe_unwanted(state, run, first_block, 0)
            return first_token
        if all(place.tier is None for place in run.places):
            return end_token
        costs = self._costs_of(state, first_token, prefill, run.deadline_s)
        num_wanted = plan_load_cut(run.places, run.tiers, costs)
        # An audited request loads nothing anyway: nothing is left out because it is faster computed.
        is_audited = self._measured is not None and self._measured.withholds(state)
        if num_wanted < len(run.places) and not is_audited:
            choice.unwanted = self._describe_unwanted(state, run, first_block, num_wanted)
        wanted_end_token = min(end_token, (first_block + num_wanted) * block_tokens)
        if any(place.tier is not None for place in run.places[:num_wanted]):
            choice.wanted_end_token = wanted_end_token
        return end_token if num_wanted == len(run.places) else wanted_end_token

    def on_pinned(self, state: RequestState, num_loaded_tokens: int) -> None:
        choice = self._choice_of(state)
        unwanted, choice.unwanted = choice.unwanted, NOTHING_UNWANTED
        choice.wanted_end_token = None
        num_begun_tokens = (state.search.num_local_tokens or 0) + num_loaded_tokens
        # An engine may report once more, without a load, that it begins a request whose load has ended.
        choice.num_begun_tokens = max(choice.num_begun_tokens or 0, num_begun_tokens)
        if unwanted is NOTHING_UNWANTED:
            return
        add_tokens(self._not_loaded_tokens, unwanted.tokens)
        if num_loaded_tokens == 0:
            self._locator.end_wait(state.context)
        # Not before the load is pinned: what comes up for a measurement may take the rows of its blocks.
        for tier, keys in unwanted.to_probe.items():
            self._locator.probe(tier, keys)

    def plan_step(self, output: SchedulerOutput, plan: OffloadingConnectorMetadata) -> None:
        num_tokens = 0
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(req_id) if num_scheduled > 1 else None
            if state is not None:
                num_left = state.request.num_prompt_tokens - state.blocks.num_computed_tokens
                num_tokens += max(0, min(num_scheduled, num_left))
        plan.measured_step = self._prefill_estimator.begin_step(num_tokens, self._clock())

    def on_report(self, report: OffloadingWorkerMetadata | None, ended_jobs: Sequence[OpenTransfer]) -> None:
        self._prefill_estimator.end_step(None if report is None else report.measured_step, self._clock())
        if report is not None:
            self._bandwidth_estimator.observe(report.load_bytes, report.load_time_s)

    def on_finished(self, state: RequestState, stop: StopReason, is_traffic: bool) -> None:
        self._choices.pop(state, None)

    def on_reset(self) -> None:
        for choice in self._choices.values():
            choice.wanted_end_token = None
            choice.unwanted = NOTHING_UNWANTED

    def why_computed(self, state: RequestState) -> Withheld | None:
        choice = self._choices.get(state)
        if choice is None or not choice.unwanted.tokens:
            return None
        return Withheld(SLOWER, choice.unwanted.tokens, choice.wanted_end_token)

    def report_prefill(self, num_tokens: int, time_s: float) -> None:
        """Learn from a prefill time that the engine has measured; steps are not timed then.

        Args:
            num_tokens: prompt tokens.
            time_s: seconds for them, without what the engine waited for.
        """
        self._prefill_estimator.observe(num_tokens, time_s)

    def stats(self) -> dict[str, float]:
        prefill = self._prefill_estimator.present_rate()
        bandwidth = self._bandwidth_estimator.present_rate()
        # A rate of 0 is not measured yet.
        rates = {
            "connector.prefill_tokens_per_s": 0.0 if prefill is None else 1 / prefill.token_s,
            "connector.load_bytes_per_s": 0.0 if bandwidth is None else bandwidth.bytes_per_s,
        }
        tokens = dict(self._not_loaded_tokens)  # another thread may read while this one counts
        return rates | {f"connector.not_loaded_tokens.{tier}": float(num) for tier, num in tokens.items()}

    def _choice_of(self, state: RequestState) -> ChoiceState:
        choice = self._choices.get(state)
        if choice is None:
            choice = self._choices[state] = ChoiceState()
        return choice

    def _costs_of(
        self, state: RequestState, first_token: int, prefill: PrefillRate, deadline_s: float
    ) -> PromptCosts:
        begun = (
            other.request.num_prompt_tokens - max(choice.num_begun_tokens, other.blocks.num_computed_tokens)
            for other, choice in self._choices.items()
            if choice.num_begun_tokens is not None and other is not state
        )
        # Requests of which less than a block is left, such as those that load the rest, delay no other.
        queued = [num_tokens for num_tokens in begun if num_tokens >= self._layout.block_tokens]
        return PromptCosts(
            first_token=first_token,
            end_token=state.request.num_tokens,
            block_tokens=self._layout.block_tokens,
            block_bytes=self._block_bytes,
            prefill=prefill,
            to_device=self._bandwidth_estimator.rate(),
            queue_s=sum(queued) * prefill.token_s,
            num_queued=len(queued),
            deadline_s=deadline_s,
            rows_per_block=self._rows_per_block,
        )

    def _describe_unwanted(
        self, state: RequestState, run: LocatedRun, first_block: int, num_wanted: int
    ) -> Unwanted:
        tokens = self._count_tokens(run, num_wanted)
        keys = state.keys[self._layout.idx][first_block:]
        return Unwanted(
            tokens,
            {
                tier: [keys[block] for block in blocks]
                for tier, blocks in list_unwanted(run.places, num_wanted).items()
            },
        )

    def _count_tokens(self, run: LocatedRun, first_block: int) -> dict[str, int]:
        """Return the tokens of a run from a block on by medium or type of their tier. Pure."""
        tokens: dict[str, int] = {}
        for place in run.places[first_block:]:
            name = CPULoadStoreSpec.medium() if place.tier is None else run.tiers[place.tier].name
            tokens[name] = tokens.get(name, 0) + self._layout.block_tokens
        return tokens


def make_load_or_compute(
    spec: OffloadingSpec,
    manager: OffloadingManager,
    requests: Mapping[str, RequestState],
    clock: Callable[[], float],
    measured: HitFilter | None = None,
) -> LoadOrCompute | None:
    """Return the chooser; None when every hit is loaded.

    Args:
        spec: has the settings and groups that decide whether there is a choice.
        manager: where the blocks are.
        requests: the scheduler half's requests by name; its own mapping, read only.
        clock: seconds, monotonic.
        measured: knows which hits turned out slower to load; None: they are not measured.
    """
    is_wanted = spec.config.settings.load_if is LoadIf.FASTER
    if not is_wanted or manager.locator is None:
        return None
    if not split_by_need(make_group_layouts(spec)).full:
        return None
    return LoadOrCompute(spec, manager.locator, requests, clock, measured)
