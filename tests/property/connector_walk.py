"""A seeded walk over everything that may happen: what it reaches does not change from run to run."""

import random
from collections.abc import Callable
from dataclasses import replace

from tests.checked_engine.memory import SlowHandler
from tests.checked_engine.rules import ResetKind, draw_rules
from tests.property.connector_driver import (
    LAYOUTS,
    NUM_ROOMY_SLOTS,
    NUM_WORKERS,
    ConnectorDriver,
    EngineOptions,
)
from tests.property.parking_policies import ARC_PARKING, LRU_PARKING

from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import CascadeMode, TierSettings

HINTS: list[dict[str, object] | None] = [
    None,
    None,
    None,
    None,
    {"skip_load": True},
    {"skip_store": True},
    {"max_load_tokens": 9, "max_store_tokens": 13},
    {"max_load_tokens": 17},
    {"max_store_tokens": 8},
]
DEMANDING = TierAdmission(min_reuse_probability=0.5, horizon_s=60.0)
CHOOSY = [
    TierSettings(admission=DEMANDING),
    TierSettings(admission=DEMANDING, cascade=CascadeMode.ON_EVICT),
    TierSettings(admission=DEMANDING, cascade=CascadeMode.ON_EVICT, store_threshold=2, fill=True),
    TierSettings(store_threshold=2, fill=True),
    TierSettings(cascade=CascadeMode.MUST_WRITE),
    TierSettings(),
]
POLICIES = ["lru", "hazard", "hazard", LRU_PARKING, ARC_PARKING]
SHARED_LENGTHS = [40, 33, 24, 20, 16, 13, 8, 5]


def draw_options(rng: random.Random, *, is_roomy: bool) -> EngineOptions:
    """Return an engine to walk with, whose primary tier never evicts if it is roomy."""
    return EngineOptions(
        rules=draw_rules(rng),
        layout=rng.choice(sorted(LAYOUTS)),
        factor=rng.randint(1, 2),
        num_slots=NUM_ROOMY_SLOTS if is_roomy else rng.choice([3, 8, 16, 32]),
        is_tiered=rng.random() < 0.6,
        is_prompt_only=rng.random() < 0.25,
        pool_ratio=rng.choice([1.0, 1.0, 1.6, 3.0]),
        is_storing_late=rng.random() < 0.5,
        copies_newest_first=rng.random() < 0.3,
        computes_last_token=rng.random() < 0.5,
    )


class Walk:
    """Draws operations and does them.

    Args:
        seed: where chance comes from.
        is_choosing: whether only what is faster than computing is loaded, from tiers.
        is_choosy: whether tiers and host want less than everything.
    """

    def __init__(self, seed: int, *, is_choosing: bool = False, is_choosy: bool = False) -> None:
        self.rng = random.Random(seed)
        # Half of the walks are such that whatever is computed must be found again.
        self.is_ideal = self.rng.random() < 0.5
        self.is_calm = self.is_ideal or self.rng.random() < 0.3
        options = draw_options(self.rng, is_roomy=self.is_ideal)
        if is_choosing:
            options = replace(
                options, is_tiered=True, is_choosing=True, num_slots=self.rng.choice([3, 8, 16])
            )
        if is_choosy:
            options = replace(
                options,
                is_tiered=True,
                num_slots=self.rng.choice([3, 8, 16]),
                cache_policy=self.rng.choice(POLICIES),
                tier_settings=tuple(self.rng.choices(CHOOSY, k=self.rng.randint(1, 2))),
            )
        self.driver = ConnectorDriver(options)
        self._num_arrived = 0

    def go(self, num_operations: int) -> None:
        """Do so many operations, check the invariants after each, and let everything run out."""
        often: list[Callable[[], None]] = [self._arrive, self._step, self._step, self._advance, self._copy]
        sometimes = [self._serve, self._run_out, self._abort, self._preempt, self._change_pace, self._wait]
        sometimes += [self.driver.engine.cache.forget] * 2 + [self._reset, self._refuse]
        sometimes += [self._reset_and_return]
        if self.driver.options.is_choosing:
            often += [self._change_speed, self._wait]
        if self.driver.options.tier_settings != (TierSettings(),):
            often += [self._wait, self._serve]
        harm = [self._fail, self._fail, self._forget]
        for _ in range(num_operations):
            drawn = self.rng.random()
            kinds = often if drawn < 0.7 else sometimes if drawn < 0.95 or self.is_calm else harm
            self.rng.choice(kinds)()
            self.driver.check()
        self.driver.drain()

    def _serve(self) -> None:
        stream = 100 * self.rng.randrange(5)
        length = self.rng.choice(SHARED_LENGTHS)
        self.driver.serve(list(range(stream, stream + length)), self.rng.choice([1, 1, 2, 5, 8]))

    def _refuse(self) -> None:
        self.driver.refuse(self.rng.randint(1, 6))

    def _arrive(self) -> None:
        rng = self.rng
        self._num_arrived += 1
        if rng.random() < 0.25:
            self.driver.come_again(rng.randrange(6), rng.randrange(7), rng.randint(1, 8))
            return
        stream = 100 * rng.randrange(2)
        own = [10_000 * self._num_arrived + n for n in range(rng.choice([0, 1, 3, 6]))]
        prompt = [*range(stream, stream + rng.choice(SHARED_LENGTHS)), *own]
        self.driver.arrive(prompt, rng.randint(1, 12), rng.choice(HINTS))

    def _step(self) -> None:
        drafts = [self.rng.random() < 0.5 for _ in range(self.rng.choice([0, 0, 1, 3]))]
        self.driver.step(self.rng.randint(1, 16), is_copying=self.rng.random() < 0.3, drafts=drafts)

    def _advance(self) -> None:
        drafts = [self.rng.random() < 0.5 for _ in range(self.rng.choice([0, 1, 3]))]
        do: list[Callable[[], None]] = [
            lambda: self.driver.engine.schedule(self.rng.randint(1, 16), drafts),
            self.driver.engine.execute,
            lambda: self.driver.process_output(is_stopping=self.rng.random() < 0.1),
        ]
        self.rng.choice(do)()

    def _copy(self) -> None:
        self._draw_handler().work(self.rng.randint(1, 3))

    def _change_pace(self) -> None:
        handler = self._draw_handler()
        handler.is_eager = not handler.is_eager and self.rng.random() < 0.5
        handler.is_newest_first = self.rng.random() < 0.4

    def _draw_handler(self) -> SlowHandler:
        return self.driver.handler(self.rng.randrange(NUM_WORKERS), self.rng.choice(["loads", "stores"]))

    def _abort(self) -> None:
        self.driver.abort(self.rng.randrange(6))

    def _preempt(self) -> None:
        self.driver.preempt(self.rng.randrange(6))

    def _reset(self) -> None:
        self.driver.reset(self.rng.choice(list(ResetKind)))

    def _reset_and_return(self) -> None:
        """Somebody stores, goes, and comes again right after a reset, while the old stores are under way."""
        self._arrive()
        for _ in range(2):
            self.driver.step(16)
        self.driver.abort(self.rng.randrange(6))
        self.driver.reset(self.rng.choice(list(ResetKind)))
        self.driver.engine.cache.forget()
        for _ in range(self.rng.randint(1, 3)):
            self.driver.come_again(self.rng.randrange(3), num_cut=0, num_new=4)
            self.driver.step(16)

    def _run_out(self) -> None:
        self.driver.run_out()

    def _wait(self) -> None:
        self.driver.clock.advance(self.rng.choice([0.5, 6.0]))

    def _change_speed(self) -> None:
        """The engine computes faster or slower than before, or so it says."""
        token_s = self.rng.choice([1e-6, 0.01, 1.0, 1000.0])
        choice = self.driver.engine.scheduler.load_or_compute
        if choice is not None:
            for _ in range(40):
                choice.report_prefill(100, 100 * token_s)

    def _fail(self) -> None:
        rng = self.rng
        direction = rng.choice(["loads", "loads", "stores"])
        self.driver.fail(rng.randrange(NUM_WORKERS), direction, is_declining=rng.random() < 0.3)

    def _forget(self) -> None:
        self.driver.forget()
