"""Everything that may happen to a simulated engine and its connector, as operations; and the laws at rest.

Who draws the operations is somebody else's business: Hypothesis, or a seeded walk.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tests.connector.fakes import HASH_TOKENS
from tests.property.connector_device import (
    CELL_BYTES,
    PAGE_CELLS,
    HostRows,
    SlowHandler,
)
from tests.property.connector_engine import SimEngine
from tests.property.connector_laws import check_records
from tests.property.connector_managers import MoodyCPUManager, MoodyTieringManager
from tests.property.connector_requests import Phase, SimRequest
from tests.property.connector_router import ConnectorRouter

from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.testing.clock import ManualClock
from kvtier.tiering.base import TierSettings
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

NUM_WORKERS = 2
MAX_TOKENS = 48
MAX_REQUESTS = 6
DRAIN_S = 60.0
"""Only a guard: the tier works when it is polled."""

MAX_STEPS_TO_DRAIN = 400
LATE_STEPS = 10
NUM_ROOMY_SLOTS = 400
COUNTERS = (
    "connector.flushed_store_jobs",
    "connector.failed_store_jobs",
    "connector.refused_stores",
    "primary.evicted",
    "expired_requests",
)


def full(block_tokens: int) -> KVGroup:
    """Return a full-attention group."""
    return _group(GroupKind.FULL, block_tokens)


def window(block_tokens: int, window_tokens: int) -> KVGroup:
    """Return a sliding-window group."""
    return _group(GroupKind.WINDOW, block_tokens, window_tokens)


def state(block_tokens: int) -> KVGroup:
    """Return a state-space group."""
    return _group(GroupKind.STATE, block_tokens)


def _group(kind: GroupKind, block_tokens: int, window_tokens: int | None = None) -> KVGroup:
    return KVGroup(block_tokens, ("layer",), PAGE_CELLS * CELL_BYTES, kind, window_tokens)


LAYOUTS: dict[str, tuple[KVGroup, ...]] = {
    "full": (full(4),),
    "window": (window(4, 6),),
    "full and window": (full(4), window(4, 7)),
    "full and short window of larger blocks": (full(4), window(8, 3)),
    "two full sizes": (full(8), full(4), window(4, 6)),
    "large full and windows": (full(8), window(4, 9), window(4, 1)),
    "full and state": (full(4), state(4)),
    "full, window and large state": (full(4), window(4, 6), state(8)),
    "state": (state(4),),
    "full and two states": (full(4), state(4), state(8)),
}


class ResetKind(Enum):
    """What happens around a reset of the connector."""

    AS_VLLM = "as vLLM"
    PREEMPTING = "pre-empting"
    KEEPING = "keeping"
    CONNECTOR = "connector"


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built.

    Attributes:
        layout: the KV groups, by name.
        factor: device blocks in an offloaded block; 1 where block sizes differ or a state is kept.
        num_slots: rows of the primary tier.
        num_steps_ahead: steps that may be planned before the output of the one before was taken.
        is_tiered: whether a secondary tier stands behind the primary.
        is_prompt_only: whether only blocks of prompts are stored.
        pool_ratio: size of the device pool, as a multiple of what the longest request needs.
        names_resumed_as_new: how resumed requests are announced.
        is_storing_late: stores are carried out long after they were begun, unless somebody waits for them.
        copies_newest_first: handlers begin with what was submitted last.
        has_region: nothing moves before the workers have reported the region that they have mapped.
        calls_preemption_hook: workers are told of a step before its loads begin, or by that alone.
        is_choosing: only what is faster than computing is loaded.
        state_interval: tokens between two states that the engine keeps and names; None: it keeps each block's and names
            none. A layout without states makes no use of it.
        computes_last_token: whether a prompt may be loaded whole, whose last token is computed again.
        cache_policy: of the primary tier in front of another.
        tier_settings: what each tier wants, fastest first; of several the first is small.
    """

    layout: str
    factor: int = 1
    num_slots: int = 16
    num_steps_ahead: int = 0
    is_tiered: bool = False
    is_prompt_only: bool = False
    pool_ratio: float = 3.0
    names_resumed_as_new: bool = False
    is_storing_late: bool = False
    copies_newest_first: bool = False
    has_region: bool = False
    calls_preemption_hook: bool = True
    is_choosing: bool = False
    computes_last_token: bool = False
    state_interval: int | None = None
    cache_policy: str = "lru"
    tier_settings: tuple[TierSettings, ...] = (TierSettings(),)


class ConnectorDriver:
    """One engine, its requests, and what may be done to them.

    Attributes:
        engine: the engine.
        requests: each request that ever arrived.
        is_ideal: nothing has failed or been lost so far, so that whatever was computed must be found again.
    """

    def __init__(self, options: EngineOptions) -> None:
        groups = LAYOUTS[options.layout]
        can_join = len({group.block_size_tokens for group in groups}) == 1
        can_join &= all(group.kind is not GroupKind.STATE for group in groups)
        factor = options.factor if can_join else 1
        extra: dict[str, object] = {
            "offload_prompt_only": options.is_prompt_only,
            "load_if": "faster" if options.is_choosing else "always",
        }
        if factor > 1:
            extra["block_size"] = groups[0].block_size_tokens * factor
        config = OffloadingConfig(
            "model",
            ModelIdentity("m"),
            groups,
            HASH_TOKENS,
            world_size=NUM_WORKERS,
            computes_last_token=options.computes_last_token,
            extra_config=extra,
        )
        rows = HostRows(options.num_slots, NUM_WORKERS, factor)
        self.clock = ManualClock()
        alone = MoodyCPUManager(options.num_slots, enable_events=True)
        self.manager: MoodyCPUManager | MoodyTieringManager = alone
        table = alone.table
        tiers: list[ExampleSecondaryTier] = []
        if options.is_tiered:
            primary = CPUPrimaryTierOffloadingManager(
                options.num_slots, rows, options.cache_policy, enable_events=True, clock=self.clock
            )
            table = primary.table
            tiers = make_tiers(config, primary.get_kv_memoryview(), options.tier_settings)
            self.manager = MoodyTieringManager(primary, tiers, True, measures_loads=True, clock=self.clock)
        num_needed = sum(-(-MAX_TOKENS // group.block_size_tokens) for group in groups)
        self.engine = SimEngine(
            config,
            self.manager,
            rows,
            1 + int(num_needed * options.pool_ratio),
            names_resumed_as_new=options.names_resumed_as_new,
            has_region=options.has_region,
            calls_preemption_hook=options.calls_preemption_hook,
            state_interval=options.state_interval,
            is_ready=lambda key: (block := table.get_block(key)) is not None and block.is_ready,
        )
        self.router = ConnectorRouter(self.engine.scheduler, table, tiers)
        for worker in self.engine.workers:
            worker.loads.is_newest_first = worker.stores.is_newest_first = options.copies_newest_first
        self.options = options
        self.max_steps = 1 + options.num_steps_ahead
        self.requests: list[SimRequest] = []
        self.is_ideal = options.num_slots >= NUM_ROOMY_SLOTS and not options.is_choosing
        # A block that leaves a window, or a state that is overtaken, before its neighbours in the same offloaded
        # block are computed cannot be stored.
        self._keeps_blocks = {group.kind for group in groups} == {GroupKind.FULL}
        self._stores_everything = factor == 1 or self._keeps_blocks
        self._align_tokens = _find_align_tokens(groups, factor, options.state_interval)

    @property
    def seen(self) -> Counter[str]:
        """How often each kind of event has happened."""
        return self.engine.seen

    def arrive(self, tokens: list[int], num_new: int, params: dict[str, object] | None = None) -> None:
        """A request comes, unless enough are there; a name that is free again is used again."""
        if len(self.engine.requests) >= MAX_REQUESTS:
            return
        num_tokens = min(len(tokens), MAX_TOKENS - 1)
        name = self._free_name()
        limit = min(MAX_TOKENS, num_tokens + num_new)
        request = SimRequest(name, list(tokens[:num_tokens]), limit, params)
        self.engine.add(request)
        self.requests.append(request)

    def come_again(self, index: int, num_cut: int, num_new: int) -> None:
        """A request continues what another one has said, as the next turn of a conversation."""
        if self.requests:
            spoken = self.requests[-1 - index % len(self.requests)].tokens
            self.arrive(spoken[: max(1, len(spoken) - num_cut)][: MAX_TOKENS - 12], num_new)

    def serve(self, tokens: list[int], num_new: int) -> None:
        """A request comes when the device has forgotten everything, and everybody is served."""
        self.forget_on_device()
        self.arrive(tokens, num_new)
        self.run_out()

    def schedule(self, chunk: int, drafts: list[bool]) -> None:
        """The engine plans a step, unless it is as far ahead as it may be."""
        if len(self.engine.steps) < self.max_steps:
            self.engine.schedule(chunk, drafts)

    def execute(self) -> None:
        """The workers carry out a step."""
        if any(step.report is None for step in self.engine.steps):
            self.engine.execute()

    def process_output(self, *, is_stopping: bool = False) -> None:
        """The engine takes the output of a step."""
        if self.engine.steps and self.engine.steps[0].report is not None:
            self.engine.process_output(is_stopping=is_stopping)
            self.router.read()

    def step(self, chunk: int, *, is_copying: bool = False, drafts: list[bool] | None = None) -> None:
        """Let one step pass as a whole, or planned ahead of the one before where the engine does that."""
        while len(self.engine.steps) >= self.max_steps:
            self.execute()
            self.process_output()
        self.engine.schedule(chunk, drafts or [])
        self.execute()
        while len(self.engine.steps) >= self.max_steps:
            self.process_output()
        if is_copying:
            self.copy_everything()

    def settle_steps(self) -> None:
        """Execute what was planned and take its output."""
        while self.engine.steps:
            self.execute()
            self.process_output()

    def abort(self, index: int) -> None:
        """A client goes away."""
        alive = [request for request in self.engine.requests if request.phase is not Phase.ENDED]
        if alive:
            self.engine.abort(alive[index % len(alive)])

    def preempt(self, index: int) -> None:
        """The engine takes a running request's blocks."""
        if self.engine.running:
            self.engine.preempt(self.engine.running[index % len(self.engine.running)])

    def reset(self, kind: ResetKind) -> None:
        """The weights change, or only the connector is told to forget."""
        if kind is ResetKind.CONNECTOR:
            self.engine.reset_connector()
        elif kind is ResetKind.AS_VLLM:
            if not self.engine.reset():
                return
        else:
            self.settle_steps()
            self.engine.reset_with_loads(is_keeping=kind is ResetKind.KEEPING)
        self.seen["reset"] += 1
        assert self.manager.stats()["primary.held_blocks"] == 0

    def fail(self, rank: int, direction: str, *, is_declining: bool = False) -> None:
        """The next job of a handler will fail, or be declined."""
        handler = self.handler(rank, direction)
        self.is_ideal = False
        if is_declining:
            handler.num_to_decline = 1
        else:
            handler.num_to_fail = 1

    def forget_on_device(self) -> None:
        """Nobody finds a block on the device any more, as if all had been overwritten."""
        self.engine.cache.pool.forget_all()

    def forget(self) -> None:
        """The next block that is to be pinned will be gone."""
        self.is_ideal = False
        self.manager.is_forgetting = True

    def refuse(self, num_offers: int) -> None:
        """The next offers of blocks find no room; they are to be made again."""
        self.manager.num_to_refuse = num_offers
        # What leaves a window before there is room is lost.
        self.is_ideal &= self._keeps_blocks

    def handler(self, rank: int, direction: str) -> SlowHandler:
        """Return one handler of one worker."""
        worker = self.engine.workers[rank]
        return worker.loads if direction == "loads" else worker.stores

    def copy_everything(self) -> None:
        """Let every handler finish; where stores are lazy only loads."""
        for worker in self.engine.workers:
            worker.loads.work(1000)
            if not self.options.is_storing_late:
                worker.stores.work(1000)

    def run_out(self) -> None:
        """Step until nobody is left; a request that waits for ever is found here."""
        for num_steps in range(MAX_STEPS_TO_DRAIN):
            if not self.engine.requests:
                break
            self.step(16, is_copying=True)
            self.clock.advance(0.1)
            if num_steps % LATE_STEPS == LATE_STEPS - 1:
                self.end_stores()
        assert not self.engine.requests, f"still waiting: {[r.request_id for r in self.engine.requests]}"
        self.settle_steps()
        self.check_found_again()

    def end_stores(self) -> None:
        """Let the stores finish."""
        for worker in self.engine.workers:
            worker.stores.work(1000)

    def check_found_again(self) -> None:
        """Whoever comes with a prompt that was computed as a whole finds all of it, if nothing went wrong.

        Only asked at rest; what is in flight is ended first.
        """
        for _ in range(4):
            self.step(16, is_copying=True)
            self.end_stores()
            self.settle_steps()
        stats = self.manager.stats()
        is_roomy = stats["primary.evicted"] == stats["primary.refused"] == 0
        if not (self.is_ideal and is_roomy and self._stores_everything):
            return
        for request in self.requests[-6:]:
            # Not by the tokens of its answer: one that was pre-empted across a reset has them and may have been aborted
            # before its prompt was computed again.
            is_computed = request.num_computed >= request.num_prompt_tokens
            is_whole = is_computed and request.is_whole and request.epoch == self.engine.num_resets
            if is_whole and not request.was_refused and not request.kv_transfer_params:
                self._check_found(request)

    def check(self) -> None:
        """Check the invariants, and look at what the handlers have noticed."""
        self.manager.check()
        for worker in self.engine.workers:
            assert not worker.broken_laws

    def drain(self) -> None:
        """Let everything run out, and look for what is left."""
        self.run_out()
        if isinstance(self.manager, MoodyTieringManager):
            assert self.manager.drain(DRAIN_S).has_ended, "a tier never got what is due"
        stats = self.engine.scheduler.stats()
        for name in COUNTERS:
            self.seen[name] += int(stats.get(name, 0))
        self.seen["dead block freed"] += self.engine.cache.num_freed_early
        self.seen[f"loaded: {self.options.layout}"] += self.seen["load good"]
        assert stats["connector.lost_load_jobs"] == self.manager.num_forgotten
        assert stats["connector.open_jobs"] == 0
        assert stats["connector.requests"] == 0
        assert stats["connector.fenced_jobs"] == 0
        assert stats["primary.evictable_blocks"] == stats["primary.held_blocks"]
        assert stats["primary.orphaned_blocks"] == 0
        assert not self.engine.scheduler.has_open_stores()
        check_records(self.engine.scheduler.records.latest, self.requests)
        for record in self.engine.scheduler.records.latest:
            self.seen.update(f"missed: {cause.value}" for cause, _ in record.missed_by_cause())
        self.check()

    def _check_found(self, request: SimRequest) -> None:
        probe = SimRequest("probe", [*request.tokens[: request.num_prompt_tokens], 0], max_tokens=MAX_TOKENS)
        end = request.num_prompt_tokens // self._align_tokens * self._align_tokens
        for num_local in (0, end // 2 // self._align_tokens * self._align_tokens):
            found, _ = self.engine.scheduler.get_num_new_matched_tokens(probe, num_local)
            assert found == end - num_local
        self.engine.scheduler.request_finished(probe)
        self.seen["found again"] += end > 0

    def _free_name(self) -> str:
        """Return a name, used before if its request has ended and no step or load knows it any more."""
        taken = {request.request_id for request in self.engine.requests}
        taken |= {work.request.request_id for step in self.engine.steps for work in step.works}
        number = next(n for n in range(100) if f"r{n}" not in taken)
        if any(request.request_id == f"r{number}" for request in self.requests):
            self.seen["name used again"] += 1
            self.seen["name used again while stores are open"] += self.engine.scheduler.has_open_stores()
        return f"r{number}"


def _find_align_tokens(groups: Sequence[KVGroup], factor: int, state_interval: int | None) -> int:
    """Return of what each prefix that can be loaded is a multiple."""
    aligned = factor * math.lcm(*(group.block_size_tokens for group in groups))
    has_states = any(group.kind is GroupKind.STATE for group in groups)
    return math.lcm(aligned, state_interval) if has_states and state_interval is not None else aligned


def make_tiers(
    config: OffloadingConfig, view: memoryview, settings: Sequence[TierSettings]
) -> list[ExampleSecondaryTier]:
    """Return tiers that tell routers what they hold, the last of them large."""
    return [
        ExampleSecondaryTier(
            config, view, max_blocks, simulate_async=True, settings=replace(own, emit_events=True)
        )
        for max_blocks, own in zip((12, 60)[-len(settings) :], settings, strict=True)
    ]
