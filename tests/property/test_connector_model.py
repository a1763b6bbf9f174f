"""A model of the connector: random engines must never read a wrong byte, and everybody must come to an end.

The engine of ``tests.checked_engine`` checks each byte before it computes with it, and each job before it is sent. Here
its steps, the copies, the failures and the requests come in random order: drawn by Hypothesis, which makes a failure
small, and by seeded walks, which show that each kind of event is really reached. At the end everything is let run out:
each request has ended, no job is open, no slot is pinned, the invariants hold, and what was computed is found again.
"""

from collections import Counter

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.checked_engine.rules import EngineRules, ResetKind
from tests.property.connector_driver import (
    LAYOUTS,
    NUM_ROOMY_SLOTS,
    NUM_WORKERS,
    ConnectorDriver,
    EngineOptions,
)
from tests.property.connector_walk import HINTS, SHARED_LENGTHS, Walk

from kvtier.testing.examples import num_examples

NUM_WALKS = 400
WALK_OPERATIONS = 120
EVENTS = frozenset(
    {
        "aborted while loaded",
        "aborted while loading",
        "aborted while running",
        "aborted while waiting",
        "aborted with a step under way",
        "blocks of output, prompts stored alone",
        "chunk of a prompt",
        "connector.failed_store_jobs",
        "connector.flushed_store_jobs",
        "connector.refused_stores",
        "dead block freed",
        "device hit",
        "draft accepted",
        "draft rejected",
        "draft rejected with the next step planned",
        "expired_requests",
        "found again",
        "kept running over a reset",
        "load beyond a device hit",
        "load failed",
        "load failed on one worker",
        "load from a tier",
        "load good",
        "load lost",
        "load of output tokens",
        "load of a whole prompt",
        "load of part of a table",
        "load of the rest of a block",
        "load to resume",
        "load within a limit",
        "name used again",
        "name used again while stores are open",
        "no room for a load",
        "output after a pre-emption",
        "output dropped",
        "pre-empted for blocks",
        "pre-empted with a step under way",
        "primary.evicted",
        "missed: group_short",
        "reset",
        "reset of the connector alone",
        "reset with a load under way",
        "reset with a step under way",
        "resumed in the step of its pre-emption",
        "resumed with output",
        "states named",
        "told to wait",
        "told to wait while its prefix is loaded",
        "two steps under way",
        *(f"loaded: {layout}" for layout in LAYOUTS),
    }
)

workers = st.integers(0, NUM_WORKERS - 1)
directions = st.sampled_from(["loads", "stores"])
shared_lengths = st.sampled_from(SHARED_LENGTHS)
draft_lists = st.lists(st.booleans(), max_size=3)


class ConnectorModel(RuleBasedStateMachine):
    """Random orders of everything that may happen to an engine and its connector."""

    @initialize(
        options=st.builds(
            EngineOptions,
            rules=st.builds(
                EngineRules,
                num_steps_ahead=st.integers(0, 1),
                names_resumed_as_new=st.booleans(),
                has_region=st.booleans(),
                calls_preemption_hook=st.booleans(),
                state_interval=st.sampled_from([None, 4, 8, 12, 16]),
            ),
            layout=st.sampled_from(sorted(LAYOUTS)),
            factor=st.integers(1, 2),
            num_slots=st.sampled_from([3, 8, 16, 32, NUM_ROOMY_SLOTS]),
            is_tiered=st.booleans(),
            is_prompt_only=st.booleans(),
            pool_ratio=st.sampled_from([1.0, 1.6, 3.0]),
            is_storing_late=st.booleans(),
            copies_newest_first=st.booleans(),
            computes_last_token=st.booleans(),
        ),
        is_calm=st.booleans(),
    )
    def build(self, options: EngineOptions, is_calm: bool) -> None:
        self.driver = ConnectorDriver(options)
        self.is_calm = is_calm
        self.num_arrived = 0

    @rule(
        stream=st.integers(0, 1),
        shared=shared_lengths,
        num_own=st.integers(0, 6),
        num_new=st.integers(1, 8),
        params=st.sampled_from(HINTS),
    )
    def arrive(
        self, stream: int, shared: int, num_own: int, num_new: int, params: dict[str, object] | None
    ) -> None:
        """A request comes whose prompt begins like others of its stream."""
        self.num_arrived += 1
        own = [10_000 * self.num_arrived + n for n in range(num_own)]
        self.driver.arrive([*range(100 * stream, 100 * stream + shared), *own], num_new, params)

    @rule(stream=st.integers(0, 2), shared=shared_lengths)
    def serve(self, stream: int, shared: int) -> None:
        """A request comes and everybody is served: what the device has forgotten, the tiers have."""
        self.driver.serve(list(range(100 * stream, 100 * stream + shared)), num_new=2)

    @rule(index=st.integers(0, 5), num_cut=st.integers(0, 6), num_steps=st.integers(0, 2))
    def come_again(self, index: int, num_cut: int, num_steps: int) -> None:
        """A request continues what another one has said."""
        self.driver.come_again(index, num_cut, num_new=3)
        for _ in range(num_steps):
            self.driver.step(8)

    @rule(chunk=st.integers(1, 16), drafts=draft_lists)
    def schedule(self, chunk: int, drafts: list[bool]) -> None:
        """The engine plans a step."""
        self.driver.engine.schedule(chunk, drafts)

    @rule()
    def execute(self) -> None:
        """The workers carry out a step."""
        self.driver.engine.execute()

    @rule(is_stopping=st.booleans())
    def process_output(self, is_stopping: bool) -> None:
        """The engine takes the output of a step."""
        self.driver.process_output(is_stopping=is_stopping)

    @rule(num_steps=st.integers(1, 4), chunk=st.integers(4, 16), is_copying=st.booleans(), drafts=draft_lists)
    def run(self, num_steps: int, chunk: int, is_copying: bool, drafts: list[bool]) -> None:
        """Some steps pass."""
        for _ in range(num_steps):
            self.driver.step(chunk, is_copying=is_copying, drafts=drafts)

    @rule(rank=workers, direction=directions, num_jobs=st.integers(1, 3))
    def copy(self, rank: int, direction: str, num_jobs: int) -> None:
        """A handler gets on with its work."""
        self.driver.handler(rank, direction).work(num_jobs)

    @precondition(lambda self: not self.is_calm)
    @rule(harm=st.sampled_from(["fail", "fail", "decline", "forget"]), rank=workers, direction=directions)
    def harm(self, harm: str, rank: int, direction: str) -> None:
        """The next job of a handler will fail, or be declined; or a block will be gone before its load."""
        if harm == "forget":
            self.driver.forget()
        else:
            self.driver.fail(rank, direction, is_declining=harm == "decline")

    @rule(rank=workers, direction=directions, is_eager=st.booleans(), is_newest_first=st.booleans())
    def change_pace(self, rank: int, direction: str, is_eager: bool, is_newest_first: bool) -> None:
        """A handler copies at once from now on, or only when it must; in order, or not."""
        handler = self.driver.handler(rank, direction)
        handler.is_eager, handler.is_newest_first = is_eager, is_newest_first

    @rule(
        what=st.sampled_from(["abort", "preempt", "forget on the device", "refuse"]), index=st.integers(0, 5)
    )
    def disturb(self, what: str, index: int) -> None:
        """A client goes away, the engine takes blocks of a request or of its prefix cache, or there is no room."""
        if what == "abort":
            self.driver.abort(index)
        elif what == "preempt":
            self.driver.preempt(index)
        elif what == "refuse":
            self.driver.refuse(index)
        else:
            self.driver.engine.cache.forget()

    @rule(kind=st.sampled_from(ResetKind), seconds=st.sampled_from([None, 0.5, 6.0]))
    def reset_or_wait(self, kind: ResetKind, seconds: float | None) -> None:
        """The weights change, or the connector alone is told to forget; or deadlines come nearer."""
        if seconds is None:
            self.driver.reset(kind)
        else:
            self.driver.clock.advance(seconds)

    @invariant()
    def invariants_hold(self) -> None:
        """No slot leaks, whatever happened."""
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            for name in +self.driver.seen:
                event(name)


ConnectorModel.TestCase.settings = settings(
    max_examples=num_examples(400), stateful_step_count=50, deadline=None
)
# What has failed is made small for up to five minutes; the usual limit of a test would come first.
TestConnectorModel = pytest.mark.slow(pytest.mark.timeout(num_examples(900))(ConnectorModel.TestCase))


@pytest.mark.walks
def test_seeded_walks_keep_the_laws_and_reach_each_kind_of_event() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        walk = Walk(seed)
        walk.go(WALK_OPERATIONS)
        seen += walk.driver.seen
    assert not EVENTS - seen.keys()
