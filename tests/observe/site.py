"""A scheduler half over real tiers, as an operator has configured it, and requests that it serves."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tests.connector.fakes import HASH_TOKENS, FakeBlocks, FakeRequest, FakeSpec, make_first_step, report_jobs

from kvtier.base import OffloadKey
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.engines.common.step import StepOutput
from kvtier.misses import Miss, MissCause, NotStored, RequestRecord, not_stored
from kvtier.observe.why import WhyReport, explain_records
from kvtier.testing.clock import ManualClock
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.tiering_driver import ROW_BYTES, ArrayRegion
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.pack_header import PackGeometry, disk_bytes_of
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls
from kvtier.tiering.manager import TieringOffloadingManager

MakeTier = Callable[[OffloadingConfig, memoryview, ManualClock], SecondaryTierManager]

CONFIG = OffloadingConfig(
    "engine",
    ModelIdentity("model", revision="one", dtype="bfloat16", config_digest="aa", config_json='{"rope": 1}'),
    (KVGroup(HASH_TOKENS, ("layer",), ROW_BYTES),),
    HASH_TOKENS,
    hash_seed="0",
)
MakeSite = Callable[..., "Site"]
NUM_RETURNS = 4
PACK_SLOTS = 4
"""Blocks of a pack: few, so that several engines have room in a directory."""

MAX_POLLS = 200_000
"""Only a guard against waiting for ever for a thread of a tier."""


@dataclass(eq=False)
class SaltedRequest(FakeRequest):
    """A request of vLLM's with a salt."""

    cache_salt: str | None = None


@dataclass
class Site:
    """One engine.

    Attributes:
        num_blocks: blocks of host memory.
        make_tiers: builds the tiers behind it.
        config: what the engine says of itself.
        deadline_s: how long a request may wait for tiers.
        cache_policy: eviction policy of host memory.
        store_threshold: accesses of a key before host memory stores it.
    """

    num_blocks: int = 64
    make_tiers: Sequence[MakeTier] = ()
    config: OffloadingConfig = CONFIG
    deadline_s: float = 5.0
    cache_policy: str = "lru"
    store_threshold: int = 1

    def __post_init__(self) -> None:
        self.clock = ManualClock(100.0)
        primary = CPUPrimaryTierOffloadingManager(
            self.num_blocks,
            ArrayRegion(self.num_blocks),
            cache_policy=self.cache_policy,
            store_threshold=self.store_threshold,
            clock=self.clock,
        )
        view = primary.get_kv_memoryview()
        self.tiers = [make(self.config, view, self.clock) for make in self.make_tiers]
        self.manager = TieringOffloadingManager(
            primary, self.tiers, lookup_deadline_s=self.deadline_s, clock=self.clock
        )
        self.half = OffloadingConnectorScheduler(FakeSpec(self.config, self.manager), clock=self.clock)
        self._names = count()

    @property
    def report(self) -> WhyReport:
        """What an operator is told."""
        for record in self.half.records.latest:
            record.check()
        return explain_records(self.half.records.latest)

    @property
    def findings(self) -> list[str]:
        """The names of what he is told."""
        return [finding.name for finding in self.report.findings]

    @property
    def last(self) -> RequestRecord:
        """The record of the last request."""
        return self.half.records.latest[-1]

    def serve(
        self,
        tokens: Sequence[int],
        params: dict[str, object] | None = None,
        *,
        num_device_tokens: int = 0,
        salt: str | None = None,
        key_salt: bytes = b"",
        num_answer_tokens: int = 1,
        settles: bool = True,
    ) -> None:
        """Serve a request to its end, its stores in all tiers included, those in tiers only where it ``settles``."""
        request = SaltedRequest(f"r{next(self._names)}", list(tokens), params, cache_salt=salt)
        found = None
        for _ in range(MAX_POLLS):
            found, _ = self.half.get_num_new_matched_tokens(request, num_device_tokens, key_salt)
            if found is not None:
                break
            self.half.build_connector_meta(StepOutput())
        assert found is not None, "a tier never answered"
        table = list(range((len(tokens) + num_answer_tokens) // HASH_TOKENS + 1))
        tables = (table,) * len(self.config.groups)
        self.half.update_state_after_alloc(request, FakeBlocks(tables), found)
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(StepOutput())))
        num_computed = num_device_tokens + found
        step = make_first_step(request.request_id, tables, request.num_tokens - num_computed, num_computed)
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(step)))
        request.tokens = [*request.tokens, *range(900, 900 + num_answer_tokens)]
        self.half.request_finished(request)
        if settles:
            self.settle()
        else:
            self.half.build_connector_meta(StepOutput())

    def serve_excluded(self, tokens: Sequence[int], reason: str) -> None:
        """Serve a request that its engine does not let kvtier look up, as vLLM's adapter does."""
        request = FakeRequest(f"r{next(self._names)}", list(tokens))
        miss = Miss(MissCause.LIMITED, "", {"reason": reason})
        self.half.records.exclude(request, 0, miss)
        self.half.update_state_after_alloc(request, FakeBlocks(([],)), 0)
        self.half.request_finished(request)

    def settle(self) -> None:
        """Let every tier end what it has accepted."""
        self.manager.drain(30.0)
        self.half.build_connector_meta(StepOutput())

    def close(self) -> None:
        """End the tiers."""
        self.half.shutdown()


def fill_host(site: Site, first: int = 50) -> None:
    """Serve as many other prompts as host memory holds, so that nothing else is there any more."""
    for number in range(first, first + site.num_blocks // 16):
        site.serve(chat(number), {"skip_load": True})


def serve_again(site: Site, num: int = NUM_RETURNS) -> None:
    """Let the prompt come back so often that why it misses is the largest cause."""
    for _ in range(num):
        site.serve(PROMPT, {"skip_store": True})


def miss_in(site: Site) -> Miss:
    """Return the cause of the first missing block of the last request."""
    return site.last.missed[0].miss


def not_stored_now(reason: NotStored, tier: str) -> Miss:
    """Return the miss of a block that was not kept and is missed at the same time of the manual clock."""
    miss = not_stored(reason, tier)
    return miss._replace(detail={**miss.detail, "ago_s": 0.0})


def fs(
    root: Path, num_blocks: int = 1000, settings: TierSettings | None = None, calls: SystemCalls = REAL_CALLS
) -> MakeTier:
    """Return what builds a tier in a directory."""
    num_packs = -(-num_blocks // PACK_SLOTS)
    pack_bytes = disk_bytes_of(PackGeometry(ROW_BYTES, PACK_SLOTS))

    def make(config: OffloadingConfig, view: memoryview, clock: ManualClock) -> SecondaryTierManager:
        common = settings or TierSettings(max_in_flight_store_bytes=2**30)
        tier = FSTier(
            config,
            view,
            common,
            clock=clock,
            calls=calls,
            has_thread=False,
            root_dir=str(root),
            capacity_bytes=num_packs * pack_bytes,
            pack_bytes=pack_bytes,
        )
        tier.keeper.tick()
        return tier

    return make


def look_around(site: Site) -> None:
    """Let the disk tiers of an engine look at their directories now, and not within a second."""
    for tier in site.tiers:
        if isinstance(tier, FSTier):
            tier.keeper.tick(is_due=True)


ROOMY = TierSettings(max_in_flight_store_bytes=2**30)


class RefusingPolicy(LRUCachePolicy):
    """Keeps nothing that is offered."""

    def admit(self, keys: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        return ()


def example(settings: TierSettings = ROOMY, max_blocks: int = 1000) -> MakeTier:
    """Return what builds an example tier."""

    def make(config: OffloadingConfig, view: memoryview, clock: ManualClock) -> SecondaryTierManager:
        return ExampleSecondaryTier(config, view, max_blocks, settings=settings, clock=clock)

    return make


def faulty(faults: Faults, settings: TierSettings = ROOMY) -> MakeTier:
    """Return what builds an example tier with faults, which a test may change later."""

    def make(config: OffloadingConfig, view: memoryview, clock: ManualClock) -> SecondaryTierManager:
        inner = ExampleSecondaryTier(config, view, 1000, settings=settings, clock=clock)
        return FaultyTier(inner, faults, random.Random(1))

    return make


class NeverAnswering(ExampleSecondaryTier):
    """A tier that holds everything and delivers nothing."""

    def lookup(self, key: object, req_context: object) -> bool | None:
        return None


def never_answering(config: OffloadingConfig, view: memoryview, clock: ManualClock) -> SecondaryTierManager:
    """Build such a tier."""
    return NeverAnswering(config, view, 1000, settings=ROOMY, clock=clock)


def with_model(**fields: str) -> OffloadingConfig:
    """Return the configuration of an engine whose model differs in ``fields``."""
    return replace(CONFIG, model=replace(CONFIG.model, **fields))


def with_settings(**settings: object) -> OffloadingConfig:
    """Return the configuration of an engine with other settings."""
    return replace(CONFIG, extra_config=settings)


def chat(number: int, num_tokens: int = 64) -> list[int]:
    """Return a prompt that shares nothing with others."""
    return [number, *range(1000 * number, 1000 * number + num_tokens - 1)]


PROMPT = chat(1)
