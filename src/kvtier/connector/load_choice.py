"""How far a request is loaded when ``load_if`` is "faster": the measurements, and the question put to them.

It starts no load and keeps nobody waiting: a limit is what it gives, and the search goes no further than that. Without
tiers, with ``load_if`` "always", and as long as nobody knows how fast the engine computes, there is no limit.

The choice is made once, when it is known where the blocks are and before the first of them is brought up. A request
that then waits for blocks of a tier keeps it: to think again half way would throw away what has come. One that waits
for nothing but room on the device is asked for in every step, and then the choice is made anew.
"""

from collections.abc import Callable, Mapping

from kvtier.base import OffloadingManager, OffloadingSpec
from kvtier.config import LoadIf
from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.load_cut import PromptCosts, list_unwanted, plan_load_cut
from kvtier.connector.metrics import SchedulerCounters
from kvtier.connector.prefill_meter import PrefillMeter
from kvtier.connector.prefix_search import split_by_need
from kvtier.connector.protocols import SchedulerOutput, SurveyingManager
from kvtier.connector.request_state import NOTHING_UNWANTED, RequestState, Unwanted
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.load_cost import PrefillRate
from kvtier.tiering.link_meter import LinkMeter
from kvtier.tiering.survey import LocatedRun


class LoadChoice:
    """The choices of one scheduler half. Used from one thread.

    Args:
        spec: says whether there is a choice, and how large blocks are.
        manager: where the blocks are.
        requests: those that the scheduler half knows, by name; its own mapping, which is read.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        manager: OffloadingManager,
        requests: Mapping[str, RequestState],
        clock: Callable[[], float],
    ) -> None:
        full, _ = split_by_need(make_group_layouts(spec))
        is_wanted = spec.config.settings.load_if is LoadIf.FASTER and bool(full)
        self._survey = manager.survey if is_wanted and isinstance(manager, SurveyingManager) else None
        self._requests = requests
        self._clock = clock
        self._prefill = PrefillMeter()
        self._to_device = LinkMeter()
        if full:
            # Blocks of the other groups are taken to be where those of the first are.
            self._layout = full[0]
            rows = [self._layout.block_tokens / layout.block_tokens for layout in full]
            self._rows_per_block = sum(rows)
            pages = [spec.config.groups[layout.idx].page_size_bytes for layout in full]
            self._block_bytes = round(
                spec.config.world_size
                * spec.block_size_factor
                * sum(page * ratio for page, ratio in zip(pages, rows, strict=True))
            )

    def find_limit(self, state: RequestState, first_token: int, max_end_token: int) -> int | None:
        """Return up to which token a request is to be loaded; None when a tier cannot tell yet what it has.

        Args:
            state: the request, its keys grown.
            first_token: leading tokens that the device has.
            max_end_token: what the answer must not exceed.
        """
        prefill = None if self._survey is None else self._prefill.rate()
        if self._survey is None or prefill is None:
            return max_end_token
        if state.wanted_end_token is not None:
            return min(max_end_token, state.wanted_end_token)
        state.unwanted = NOTHING_UNWANTED
        block_tokens = self._layout.block_tokens
        first_block = first_token // block_tokens
        keys = state.keys[self._layout.idx][first_block : max(first_block, max_end_token // block_tokens)]
        run = self._survey.locate(keys, state.context)
        if run is None:
            return None
        if all(place.tier is None for place in run.places):
            return max_end_token
        costs = self._costs_of(state, first_token, prefill, run.deadline_s)
        num_wanted = plan_load_cut(run.places, run.tiers, costs)
        if num_wanted < len(run.places):
            state.unwanted = self._describe_unwanted(state, run, first_block, num_wanted)
        end_token = min(max_end_token, (first_block + num_wanted) * block_tokens)
        if any(place.tier is not None for place in run.places[:num_wanted]):
            state.wanted_end_token = end_token
        return max_end_token if num_wanted == len(run.places) else end_token

    def note_begun(self, state: RequestState, num_external_tokens: int, counters: SchedulerCounters) -> None:
        """Take note that the engine begins a request; what is loaded of it is pinned by now.

        Effects: Counts the tokens that were found and are computed. Tiers that were found too slow may be measured
        anew. The wait of a request that loads nothing ends.
        """
        unwanted, state.unwanted = state.unwanted, NOTHING_UNWANTED
        state.wanted_end_token = None
        num_begun_tokens = (state.num_local_tokens or 0) + num_external_tokens
        # An engine may say once more, without a load, that it begins a request whose load has ended.
        state.num_begun_tokens = max(state.num_begun_tokens or 0, num_begun_tokens)
        if self._survey is None or unwanted is NOTHING_UNWANTED:
            return
        counters.count_not_loaded(unwanted.tokens)
        if num_external_tokens == 0:
            self._survey.end_wait(state.context)
        for tier, keys in unwanted.to_probe.items():
            self._survey.probe(tier, keys)

    def begin_step(self, output: SchedulerOutput) -> int | None:
        """Note a step; return the number under which its report tells how long it took."""
        if self._survey is None:
            return None
        num_tokens = 0
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(req_id) if num_scheduled > 1 else None
            if state is not None:
                num_left = state.request.num_prompt_tokens - state.num_computed_tokens
                num_tokens += max(0, min(num_scheduled, num_left))
        return self._prefill.begin_step(num_tokens, self._clock())

    def take_report(self, report: OffloadingWorkerMetadata | None) -> None:
        """Learn from what the workers of a step reported."""
        if self._survey is None:
            return
        self._prefill.end_step(None if report is None else report.measured_step, self._clock())
        if report is not None:
            self._to_device.add(report.load_bytes, report.load_time_s)

    def tell_prefill(self, num_tokens: int, time_s: float) -> None:
        """Take the word of an engine that knows how long it has computed prompts; steps are not timed then.

        Args:
            num_tokens: prompt tokens.
            time_s: seconds for them, without what the engine waited for.
        """
        if self._survey is not None:
            self._prefill.tell(num_tokens, time_s)

    def stats(self) -> dict[str, float]:
        """Return what was measured, by dotted name; 0 is not known yet. Nothing when there is no choice."""
        if self._survey is None:
            return {}
        prefill, to_device = self._prefill.rate(), self._to_device.rate()
        return {
            "connector.prefill_tokens_per_s": 0.0 if prefill is None else 1 / prefill.token_s,
            "connector.load_bytes_per_s": 0.0 if to_device is None else to_device.bytes_per_s,
        }

    def _costs_of(
        self, state: RequestState, first_token: int, prefill: PrefillRate, deadline_s: float
    ) -> PromptCosts:
        begun = (
            other.request.num_prompt_tokens - max(other.num_begun_tokens, other.num_computed_tokens)
            for other in self._requests.values()
            if other.num_begun_tokens is not None and other is not state
        )
        # Requests of which less than a block is left, such as those that load the rest, keep nobody waiting.
        queued = [num_tokens for num_tokens in begun if num_tokens >= self._layout.block_tokens]
        return PromptCosts(
            first_token=first_token,
            end_token=state.request.num_tokens,
            block_tokens=self._layout.block_tokens,
            block_bytes=self._block_bytes,
            prefill=prefill,
            to_device=self._to_device.rate(),
            queue_s=sum(queued) * prefill.token_s,
            num_queued=len(queued),
            deadline_s=deadline_s,
            rows_per_block=self._rows_per_block,
        )

    def _describe_unwanted(
        self, state: RequestState, run: LocatedRun, first_block: int, num_wanted: int
    ) -> Unwanted:
        tokens: dict[str, int] = {}
        for place in run.places[num_wanted:]:
            name = CPULoadStoreSpec.medium() if place.tier is None else run.tiers[place.tier].name
            tokens[name] = tokens.get(name, 0) + self._layout.block_tokens
        keys = state.keys[self._layout.idx][first_block:]
        return Unwanted(
            tokens,
            {
                tier: [keys[block] for block in blocks]
                for tier, blocks in list_unwanted(run.places, num_wanted).items()
            },
        )
