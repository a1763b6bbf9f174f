"""A model of the connector: random engines must never read a wrong byte, and everybody must come to an end.

The engine of ``connector_engine`` checks each byte before it computes with it. Here its steps, the copies, the
failures and the requests come in random order, and at the end everything is let run out: each request has ended,
no job is open, no slot is pinned, and the books are whole.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.property.connector_device import BLOCK_TOKENS, TOKEN_BYTES, HostRows, SlowHandler
from tests.property.connector_engine import Phase, SimEngine, SimRequest

from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.testing.clock import ManualClock
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

NUM_WORKERS = 2
MAX_STEPS_TO_DRAIN = 400
MAX_REQUESTS = 6
LAYOUTS: dict[str, tuple[int | None, ...]] = {"full": (None,), "hybrid": (None, 7), "window": (6,)}

workers = st.integers(0, NUM_WORKERS - 1)
directions = st.sampled_from(["loads", "stores"])
shared_lengths = st.sampled_from([24, 20, 16, 13, 8, 5])
hints = st.sampled_from(
    [None, None, None, {"skip_load": True}, {"max_load_tokens": 9, "max_store_tokens": 13}]
)


def make_config(windows: tuple[int | None, ...], factor: int) -> OffloadingConfig:
    """Return a configuration of these groups."""
    groups = tuple(
        KVGroup(
            BLOCK_TOKENS,
            (f"layer.{idx}",),
            BLOCK_TOKENS * TOKEN_BYTES,
            GroupKind.FULL if window is None else GroupKind.WINDOW,
            window,
        )
        for idx, window in enumerate(windows)
    )
    extra = {"block_size": BLOCK_TOKENS * factor}
    return OffloadingConfig(
        "model", ModelIdentity("m"), groups, BLOCK_TOKENS, world_size=NUM_WORKERS, extra_config=extra
    )


class ConnectorModel(RuleBasedStateMachine):
    """Random orders of everything that may happen to an engine and its connector."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        factor=st.integers(1, 2),
        num_slots=st.sampled_from([3, 8, 16, 32]),
        num_steps_ahead=st.integers(0, 1),
        is_tiered=st.booleans(),
    )
    def build(self, layout: str, factor: int, num_slots: int, num_steps_ahead: int, is_tiered: bool) -> None:
        windows = LAYOUTS[layout]
        config = make_config(windows, factor)
        rows = HostRows(num_slots, NUM_WORKERS, factor)
        self.clock = ManualClock()
        self.manager: CPUOffloadingManager | TieringOffloadingManager = CPUOffloadingManager(num_slots)
        if is_tiered:
            primary = CPUPrimaryTierOffloadingManager(num_slots, rows)
            tier = ExampleSecondaryTier(config, primary.get_kv_memoryview(), 12, simulate_async=True)
            self.manager = TieringOffloadingManager(primary, [tier], clock=self.clock)
        self.engine = SimEngine(config, self.manager, rows, num_device_blocks=1 + 12 * len(windows))
        self.max_steps = 1 + num_steps_ahead
        self.num_requests = 0
        self.requests: list[SimRequest] = []

    @rule(
        stream=st.integers(0, 1),
        shared=shared_lengths,
        num_own=st.integers(1, 6),
        num_new=st.integers(1, 8),
        params=hints,
    )
    def arrive(
        self, stream: int, shared: int, num_own: int, num_new: int, params: dict[str, object] | None
    ) -> None:
        """A request comes whose prompt begins like others of its stream."""
        own = [10_000 * (self.num_requests + 1) + n for n in range(num_own)]
        self.arrive_with([*range(100 * stream, 100 * stream + shared), *own], num_new, params)

    @rule(stream=st.integers(0, 2), shared=shared_lengths)
    def serve(self, stream: int, shared: int) -> None:
        """A request comes and everybody is served: what the device forgets, the tiers have."""
        self.arrive_with(list(range(100 * stream, 100 * stream + shared)), num_new=2)
        self.run_out()

    @rule(index=st.integers(0, 5), num_cut=st.integers(0, 6), num_steps=st.integers(0, 2))
    def come_again(self, index: int, num_cut: int, num_steps: int) -> None:
        """A request continues what another one has said, as the next turn of a conversation."""
        if self.requests:
            spoken = self.requests[index % len(self.requests)].tokens
            self.arrive_with(spoken[: max(1, len(spoken) - num_cut)][:36], num_new=3)
        for _ in range(num_steps):
            self.step(8, is_copying=False)

    @precondition(lambda self: len(self.engine.steps) < self.max_steps)
    @rule(chunk=st.integers(1, 16), drafts=st.lists(st.booleans(), max_size=3))
    def schedule(self, chunk: int, drafts: list[bool]) -> None:
        """The engine plans a step."""
        self.engine.schedule(chunk, drafts)

    @precondition(lambda self: any(step.report is None for step in self.engine.steps))
    @rule()
    def execute(self) -> None:
        """The workers carry out a step."""
        self.engine.execute()

    @precondition(lambda self: self.engine.steps and self.engine.steps[0].report is not None)
    @rule(is_stopping=st.booleans())
    def process_output(self, is_stopping: bool) -> None:
        """The engine takes the output of a step."""
        self.engine.process_output(is_stopping=is_stopping)

    @rule(num_steps=st.integers(1, 4), chunk=st.integers(4, 16), is_copying=st.booleans())
    def run(self, num_steps: int, chunk: int, is_copying: bool) -> None:
        """Some whole steps pass."""
        for _ in range(num_steps):
            self.step(chunk, is_copying=is_copying)

    @rule(rank=workers, direction=directions, num_jobs=st.integers(1, 3))
    def copy(self, rank: int, direction: str, num_jobs: int) -> None:
        """A handler gets on with its work."""
        self.handler(rank, direction).work(num_jobs)

    @rule(rank=workers, direction=directions, is_declining=st.booleans())
    def fail(self, rank: int, direction: str, is_declining: bool) -> None:
        """The next job of a handler will fail, or be declined."""
        handler = self.handler(rank, direction)
        if is_declining:
            handler.num_to_decline = 1
        else:
            handler.num_to_fail = 1

    @rule(rank=workers, direction=directions, is_eager=st.booleans())
    def change_pace(self, rank: int, direction: str, is_eager: bool) -> None:
        """A handler copies at once from now on, or only when it must."""
        self.handler(rank, direction).is_eager = is_eager

    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        """A client goes away."""
        alive = [request for request in self.engine.requests if request.phase is not Phase.ENDED]
        if alive:
            self.engine.abort(alive[index % len(alive)])

    @rule(index=st.integers(0, 5))
    def preempt(self, index: int) -> None:
        """The engine takes a running request's blocks."""
        if self.engine.running:
            self.engine.preempt(self.engine.running[index % len(self.engine.running)])

    @rule()
    def reset(self) -> None:
        """The weights change, when no step is under way; copies may be."""
        self.settle_steps()
        self.engine.reset()

    @rule(seconds=st.sampled_from([0.5, 6.0]))
    def let_time_pass(self, seconds: float) -> None:
        """Deadlines come nearer."""
        self.clock.advance(seconds)

    @invariant()
    def books_are_whole(self) -> None:
        """No slot leaks, whatever happened."""
        if hasattr(self, "manager"):
            self.manager.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.drain()

    def arrive_with(self, tokens: list[int], num_new: int, params: dict[str, object] | None = None) -> None:
        """Add a request, unless enough are there."""
        if len(self.engine.requests) < MAX_REQUESTS:
            self.num_requests += 1
            request = SimRequest(f"r{self.num_requests}", list(tokens), len(tokens) + num_new, params)
            self.engine.add(request)
            self.requests.append(request)

    def step(self, chunk: int, *, is_copying: bool) -> None:
        """Let one whole step pass, and what was planned before it."""
        self.engine.schedule(chunk, [])
        self.settle_steps()
        if is_copying:
            self.copy_everything()

    def settle_steps(self) -> None:
        """Execute what was planned and take its output."""
        while self.engine.steps:
            if any(step.report is None for step in self.engine.steps):
                self.engine.execute()
            self.engine.process_output()

    def handler(self, rank: int, direction: str) -> SlowHandler:
        """Return one handler of one worker."""
        worker = self.engine.workers[rank]
        return worker.loads if direction == "loads" else worker.stores

    def copy_everything(self) -> None:
        """Let every handler finish."""
        for worker in self.engine.workers:
            worker.loads.work(1000)
            worker.stores.work(1000)

    def run_out(self) -> None:
        """Step until nobody is left; a request that waits for ever is found here."""
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.engine.requests:
                break
            self.step(16, is_copying=True)
            self.clock.advance(0.1)
        assert not self.engine.requests, f"still waiting: {[r.request_id for r in self.engine.requests]}"

    def drain(self) -> None:
        """Let everything run out, and look for what is left."""
        self.run_out()
        for _ in range(4):
            self.step(16, is_copying=True)
        stats = self.engine.scheduler.stats()
        assert stats["connector.open_jobs"] == 0
        assert stats["connector.requests"] == 0
        assert stats["connector.fenced_jobs"] == 0
        assert stats["primary.evictable_blocks"] == stats["primary.held_blocks"]
        assert stats["primary.orphaned_blocks"] == 0
        self.manager.check()


ConnectorModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestConnectorModel = ConnectorModel.TestCase
