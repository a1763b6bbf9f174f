"""Everything that may happen to a simulated engine and its connector, as operations; and the laws at rest.

Who draws the operations is somebody else's business: Hypothesis, or a seeded walk.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.checked_engine.engine import CheckedEngine
from tests.checked_engine.laws import Router, block_of, check_records
from tests.checked_engine.memory import PAGE_BYTES, HostRows, SlowHandler
from tests.checked_engine.requests import CheckedRequest, Phase
from tests.checked_engine.rules import EngineRules, ResetKind
from tests.connector.fakes import HASH_TOKENS
from tests.property.connector_managers import MoodyCPUManager, MoodyTieringManager

from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.request_state import RequestState
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.testing.clock import ManualClock
from kvtier.tiering.base import TierSettings
from kvtier.tiering.example import ExampleSecondaryTier

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
    return KVGroup(block_tokens, ("layer",), PAGE_BYTES, kind, window_tokens)


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


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built.

    Attributes:
        rules: how the engine goes about its steps.
        layout: the KV groups, by name.
        factor: device blocks in an offloaded block; 1 where block sizes differ or a state is kept.
        num_slots: rows of the primary tier.
        is_tiered: whether a secondary tier stands behind the primary.
        is_prompt_only: whether only blocks of prompts are stored.
        pool_ratio: size of the device pool, as a multiple of what the longest request needs.
        is_storing_late: stores are carried out long after they were begun, unless somebody waits for them.
        copies_newest_first: handlers begin with what was submitted last.
        is_choosing: only what is faster than computing is loaded.
        computes_last_token: whether a prompt may be loaded whole, whose last token is computed again.
        cache_policy: of the primary tier in front of another.
        tier_settings: what each tier wants, fastest first; of several the first is small.
    """

    rules: EngineRules
    layout: str
    factor: int = 1
    num_slots: int = 16
    is_tiered: bool = False
    is_prompt_only: bool = False
    pool_ratio: float = 3.0
    is_storing_late: bool = False
    copies_newest_first: bool = False
    is_choosing: bool = False
    computes_last_token: bool = False
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
        num_device_blocks = 1 + int(num_needed * options.pool_ratio)
        self.engine = CheckedEngine(config, self.manager, table, rows, num_device_blocks, options.rules)
        self.router, self._table = Router(), table
        self._tiers = dict(zip(("example", "example.1"), tiers, strict=False))
        for worker in self.engine.workers:
            worker.loads.is_newest_first = worker.stores.is_newest_first = options.copies_newest_first
        self.options = options
        self.requests: list[CheckedRequest] = []
        self.is_ideal = options.num_slots >= NUM_ROOMY_SLOTS and not options.is_choosing
        # A block that leaves a window, or a state that is overtaken, before its neighbours in the same offloaded
        # block are computed cannot be stored.
        self._keeps_blocks = {group.kind for group in groups} == {GroupKind.FULL}
        self._stores_everything = factor == 1 or self._keeps_blocks
        self._align_tokens = _find_align_tokens(groups, factor, options.rules.state_interval)

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
        request = CheckedRequest(name, list(tokens[:num_tokens]), limit, params)
        self.engine.add(request)
        self.requests.append(request)

    def come_again(self, index: int, num_cut: int, num_new: int) -> None:
        """A request continues what another one has said, as the next turn of a conversation."""
        if self.requests:
            spoken = self.requests[-1 - index % len(self.requests)].tokens
            self.arrive(spoken[: max(1, len(spoken) - num_cut)][: MAX_TOKENS - 12], num_new)

    def serve(self, tokens: list[int], num_new: int) -> None:
        """A request comes when the device has forgotten everything, and everybody is served."""
        self.engine.cache.forget()
        self.arrive(tokens, num_new)
        self.run_out()

    def process_output(self, *, is_stopping: bool = False) -> None:
        """The engine takes the output of a step."""
        self.engine.process_output(is_stopping=is_stopping)
        self.read_events()

    def step(self, chunk: int, *, is_copying: bool = False, drafts: Sequence[bool] = ()) -> None:
        """Let one step pass."""
        self.engine.step(chunk, drafts)
        self.read_events()
        if is_copying:
            self.copy_everything()

    def read_events(self) -> None:
        """A router reads the events: no block is believed to be somewhere where it is not."""
        self.router.read(self.engine.scheduler.take_events())
        self.router.check_host(self._table)
        for name, tier in self._tiers.items():
            lies = self.router.believed.get(name, set()) - set(map(block_of, tier.blocks))
            assert not lies, f"{name} is believed to hold {lies}"

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
        if self.engine.reset(kind, self.engine.weights + 1):
            assert self.manager.stats()["primary.held_blocks"] == 0

    def fail(self, rank: int, direction: str, *, is_declining: bool = False) -> None:
        """The next job of a handler will fail, or be declined."""
        handler = self.handler(rank, direction)
        self.is_ideal = False
        if is_declining:
            handler.num_to_decline = 1
        else:
            handler.num_to_fail = 1

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
        self.engine.settle()
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
            self.engine.settle()
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
        assert not self.engine.broken_laws()

    def _list_remembered(self) -> list[RequestState]:
        """Return the requests of which a feature knows something."""
        half = self.engine.scheduler
        chosen = () if half.load_or_compute is None else half.load_or_compute._choices
        return [*half.records._begun, *half.records._loading, *chosen]

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
        assert not self._list_remembered(), "a feature keeps what it knew of a request that has ended"
        for record in self.engine.scheduler.records.latest:
            self.seen.update(f"missed: {cause.value}" for cause, _ in record.missed_by_cause())
        self.check()

    def _check_found(self, request: CheckedRequest) -> None:
        probe = CheckedRequest(
            "probe", [*request.tokens[: request.num_prompt_tokens], 0], max_tokens=MAX_TOKENS
        )
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
