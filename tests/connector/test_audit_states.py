"""A model with recurrent states under the audit: whatever an engine does, right blocks are right and no pin is left.

The engine is made up, its bytes are real: a device block holds what follows from the tokens before its end, and a wrong
device block would be seen. It names the states that it keeps as vLLM does, or has them in their place of the block
table, and takes every device block as soon as it may.
"""

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.checked_engine.requests import Plan
from tests.connector.fakes import HASH_TOKENS, FakeBlocks, FakeRequest

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    HandlerEntry,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig, StatePart
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engines.common.step import NamedStates, NewRequest, StepOutput, WorkerOutput, begin_step, end_step
from kvtier.testing.clock import ManualClock

BLOCK_TOKENS = 2 * HASH_TOKENS
PAGE_BYTES = 512
PADDED_BYTES = 640
GROUPS = (
    KVGroup(BLOCK_TOKENS, ("attention",), PAGE_BYTES),
    KVGroup(
        BLOCK_TOKENS, ("state",), PAGE_BYTES, GroupKind.STATE, state_parts=(StatePart("float32", PAGE_BYTES),)
    ),
)
ATTENTION, STATE = range(2)
NUM_SLOTS = 40
NUM_DEVICE_BLOCKS = 48
NO_BLOCK = -1
"""Where the engine keeps no state and names none."""

KINDS = ("equal", "close", "wrong", "lost")


def content(group: int, tokens: Sequence[int]) -> torch.Tensor:
    """Return what a block holds whose last token is the last of these."""
    rng = np.random.default_rng([group, len(tokens), *tokens])
    return torch.from_numpy(rng.standard_normal(PAGE_BYTES // 4).astype(np.float32)).view(torch.int8)


class LateHandler(OffloadingHandler):
    """Copies when a draw or a caller that waits says so, never when a thread happens to run.

    Args:
        inner: copies.
        rng: draws at each get_finished whether everything has ended or nothing.
    """

    def __init__(self, inner: OffloadingHandler, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng
        self._held: dict[TransferJobId, TransferSpec] = {}
        self._declined: list[TransferResult] = []

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        self._held[job_id] = spec
        return True

    def get_finished(self) -> list[TransferResult]:
        if self._rng.random() < 0.5:
            self._copy()
        declined, self._declined = self._declined, []
        return declined + self._inner.get_finished()

    def wait(self, job_ids: set[TransferJobId]) -> None:
        if not job_ids.isdisjoint(self._held):
            self._copy()

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _copy(self) -> None:
        held, self._held = self._held, {}
        for job_id, spec in held.items():
            if not self._inner.transfer_async(job_id, spec):
                self._declined.append(TransferResult(job_id, success=False))
        self._inner.wait(set(held))


class LateSpec(CPUOffloadingSpec):
    """Host memory whose copies begin late.

    Args:
        config: of the spec.
        rng: draws when copies begin.
    """

    def __init__(self, config: OffloadingConfig, rng: random.Random) -> None:
        super().__init__(config)
        self._rng = rng

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        for source, destination, handler in super().get_handlers(kv_caches):
            yield HandlerEntry(source, destination, LateHandler(handler, self._rng))


@dataclass(eq=False)
class Running:
    """A request that the engine computes.

    Attributes:
        request: the request.
        tables: its block table of each group; a state that is not kept is NO_BLOCK.
        num_computed: tokens that are computed.
        is_new: whether no step has named it yet.
        is_resumed: whether it was pre-empted, and no step has named it since.
        owned: its device blocks.
    """

    request: FakeRequest
    tables: tuple[list[int], list[int]]
    num_computed: int
    is_new: bool = True
    is_resumed: bool = False
    owned: list[int] = field(default_factory=list)


class HybridEngine:
    """An engine with a group of attention and one of states.

    Args:
        seed: of everything that it decides.
        names_states: whether it names the states that it keeps, as vLLM does.
        audit_ratio: share of requests that are audited.

    Attributes:
        next_end: up to which token the next step computes its request, where a test decides that.
        clock: the time; a step takes a second, so that whether loading pays does not depend on the machine.
    """

    def __init__(self, seed: int, *, names_states: bool, audit_ratio: float) -> None:
        self.rng = random.Random(seed)
        self._names_states = names_states
        config = OffloadingConfig(
            f"hybrid-{uuid.uuid4()}",
            ModelIdentity("model", dtype="float32"),
            GROUPS,
            HASH_TOKENS,
            kv_dtype="float32",
            extra_config={
                "cpu_bytes_to_use": NUM_SLOTS * PAGE_BYTES,
                "audit_ratio": audit_ratio,
                "audit_seed": seed,
                "audit_limit": 10**9,
            },
        )
        self.spec = CPUOffloadingSpec(config)
        self._worker_spec = LateSpec(replace(config, rank=0), random.Random(f"late {seed}"))
        self.clock = ManualClock()
        self.half = OffloadingConnectorScheduler(self.spec, clock=self.clock, wall_clock=self.clock)
        self.worker = OffloadingConnectorWorker(self._worker_spec, pause=lambda _: None)
        self.device = torch.zeros((NUM_DEVICE_BLOCKS, PADDED_BYTES), dtype=torch.int8)
        tensor, ref = CanonicalKVCacheTensor(self.device, PADDED_BYTES), CanonicalKVCacheRef(0, PAGE_BYTES)
        self.worker.register_kv_caches(CanonicalKVCaches([tensor], [[ref], [ref]]))
        self._free = list(range(NUM_DEVICE_BLOCKS))
        self._loading: dict[str, Running] = {}
        self.running: dict[str, Running] = {}
        self._waiting: list[Running] = []
        self._preempted: set[str] = set()
        self._num_requests = 0
        self.next_end: int | None = None

    def add(self, tokens: list[int]) -> None:
        """Begin a request, and its load if it has one."""
        self._num_requests += 1
        request = FakeRequest(f"r{self._num_requests}", list(tokens))
        num_loaded, is_asynchronous = self.half.get_num_new_matched_tokens(request, 0)
        if num_loaded is None:
            self.half.request_finished(request)
            return
        one = Running(request, ([], []), num_loaded)
        if not self._grow(one, num_loaded):
            self.half.request_finished(request)
            return
        if num_loaded:
            (state,) = self._take(1)
            one.owned.append(state)
            one.tables[STATE][:] = [*[NO_BLOCK] * (num_loaded // BLOCK_TOKENS - 1), state]
        self.half.update_state_after_alloc(request, FakeBlocks(one.tables), num_loaded)
        (self._loading if is_asynchronous else self.running)[request.request_id] = one

    def step(self) -> None:
        """Compute a part of every request that runs, and end loads."""
        plan, kept, written = Plan(), {}, []
        for req_id, one in self.running.items():
            end = self._choose_end(one)
            first = [len(table) for table in one.tables]
            if not self._grow(one, end, keeps_state=end % BLOCK_TOKENS == 0):
                continue
            new = tuple(table[start:] for table, start in zip(one.tables, first, strict=True))
            self._schedule(plan, one, new)
            plan.num_tokens[req_id] = end - one.num_computed
            written += self._writes(one, end)
            if self._names_states and end % BLOCK_TOKENS == 0 and one.tables[STATE][-1] != NO_BLOCK:
                kept[req_id] = [(STATE, one.tables[STATE][-1], end)]
            one.num_computed = end
        output = plan.output(self._preempted, NamedStates(kept) if self._names_states else None)
        self._preempted = set()
        self._carry_out(output, written)

    def abort(self, req_id: str) -> None:
        """End a request, complete or not."""
        one = self.running.pop(req_id)
        self.half.request_finished(one.request)
        self._release(one)

    def preempt(self, req_id: str) -> None:
        """Take a request's device blocks."""
        one = self.running.pop(req_id)
        self._preempted.add(req_id)
        self._release(one)
        one.tables, one.num_computed = ([], []), 0
        one.is_resumed = not one.is_new
        self._waiting.append(one)

    def resume(self) -> None:
        """Begin again what was pre-empted; nothing of it is on the device, and nothing is loaded."""
        while self._waiting:
            one = self._waiting.pop()
            self.running[one.request.request_id] = one

    def reset(self) -> None:
        """Forget every block, on the device and in kvtier."""
        self.half.reset()

    def end(self) -> None:
        """End every request and come to rest."""
        for _ in range(100):
            if not self._loading:
                break
            self.worker.wait_for_loads()
            self.step()
        self.resume()
        for req_id in list(self.running):
            self.abort(req_id)
        self._carry_out(StepOutput(), [])
        while self.half.has_open_stores():
            self.worker.worker.wait(set(self.half.jobs.by_id))
            self._carry_out(StepOutput(), [])

    def stat(self, name: str) -> float:
        """Return one of kvtier's counters or gauges."""
        return self.half.stats()[name]

    def close(self) -> None:
        """Shut everything down."""
        self.worker.shutdown()
        self.half.shutdown()
        self._worker_spec.shutdown()
        self.spec.shutdown()

    def _choose_end(self, one: Running) -> int:
        """Return how far the next step computes a request, as chunks do: to the end of a block, or anywhere."""
        if self.next_end is not None:
            end, self.next_end = self.next_end, None
            return end
        num_tokens = one.request.num_tokens
        if one.num_computed >= num_tokens:
            one.request.tokens.append(7)
            return num_tokens + 1
        end = min(num_tokens, one.num_computed + self.rng.randint(1, 30))
        boundary = end // BLOCK_TOKENS * BLOCK_TOKENS
        return boundary if boundary > one.num_computed and self.rng.random() < 0.7 else end

    def _grow(self, one: Running, end: int, *, keeps_state: bool = False) -> bool:
        """Allocate the device blocks up to a token; return whether there was room."""
        attention, states = one.tables
        num_missing = max(0, -(-end // BLOCK_TOKENS) - len(attention))
        if num_missing + 1 > len(self._free):
            return False
        new = self._take(num_missing)
        attention += new
        one.owned += new
        num_states = end // BLOCK_TOKENS
        if keeps_state and len(states) < num_states:
            (state,) = self._take(1)
            states += [*[NO_BLOCK] * (num_states - len(states) - 1), state]
            one.owned.append(state)
        return True

    def _take(self, num: int) -> list[int]:
        """Return free device blocks, the last that became free first: they are written to as soon as they may be."""
        return [self._free.pop() for _ in range(num)]

    def _release(self, one: Running) -> None:
        self._free += one.owned
        one.owned = []

    def _schedule(self, plan: Plan, one: Running, new: tuple[list[int], ...]) -> None:
        req_id, table = one.request.request_id, tuple(list(table) for table in one.tables)
        if one.is_new:
            plan.new.append(NewRequest(req_id, table, one.num_computed))
        else:
            blocks = table if one.is_resumed else new
            plan.cached.append((req_id, one.is_resumed, blocks, one.num_computed))
        one.is_new = one.is_resumed = False

    def _writes(self, one: Running, end: int) -> list[tuple[int, torch.Tensor]]:
        """Return what a step writes: the blocks of attention that become full, and a state that ends a block."""
        tokens = one.request.tokens
        written = [
            (one.tables[ATTENTION][block], content(ATTENTION, tokens[: (block + 1) * BLOCK_TOKENS]))
            for block in range(one.num_computed // BLOCK_TOKENS, end // BLOCK_TOKENS)
        ]
        if end % BLOCK_TOKENS == 0 and one.tables[STATE][-1] != NO_BLOCK:
            written.append((one.tables[STATE][-1], content(STATE, tokens[:end])))
        return written

    def _carry_out(self, step: StepOutput, written: list[tuple[int, torch.Tensor]]) -> None:
        self.clock.advance(1.0)
        metadata = self.half.build_connector_meta(step)
        begin_step(self.worker, metadata)
        for block, page in written:
            self.device[block, :PAGE_BYTES] = page
        loads, report = end_step(self.worker, metadata)
        for req_id, failed_blocks in loads.items():
            one = self._loading.pop(req_id)
            if failed_blocks is not None:
                self._release(one)
                one.tables, one.num_computed = ([], []), 0
            self._check_loaded(one)
            self.running[req_id] = one
        self.half.update_connector_output(WorkerOutput(report))

    def _check_loaded(self, one: Running) -> None:
        if one.num_computed:
            for group in (ATTENTION, STATE):
                loaded = self.device[one.tables[group][one.num_computed // BLOCK_TOKENS - 1], :PAGE_BYTES]
                assert torch.equal(loaded, content(group, one.request.tokens[: one.num_computed]))


@pytest.fixture
def engines() -> Iterator[list[HybridEngine]]:
    """Engines that are closed when the test ends."""
    made: list[HybridEngine] = []
    yield made
    for engine in made:
        engine.close()


def make_prompt(rng: random.Random) -> list[int]:
    """Return a prompt that often begins as others do."""
    family = random.Random(rng.randrange(3))
    shared = [family.randrange(100) for _ in range(64)]
    return shared[: rng.randrange(9, 64)] + [rng.randrange(3) for _ in range(rng.randrange(9))]


def act(engine: HybridEngine) -> None:
    """Let one thing happen that can happen to an engine."""
    rng = engine.rng
    what = rng.choices(("add", "step", "abort", "preempt", "resume", "reset"), weights=(30, 50, 12, 5, 8, 1))[
        0
    ]
    if what == "add":
        engine.add(make_prompt(rng))
    elif what in ("abort", "preempt") and engine.running:
        getattr(engine, what)(rng.choice(list(engine.running)))
    elif what == "resume":
        engine.resume()
    elif what == "reset":
        engine.reset()
    else:
        engine.step()


@pytest.mark.parametrize("names_states", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_right_blocks_are_right_and_no_pin_is_left(
    engines: list[HybridEngine], seed: int, *, names_states: bool
) -> None:
    engines.append(engine := HybridEngine(seed, names_states=names_states, audit_ratio=0.5))
    manager: Any = engine.half.manager  # Any: every manager of these specs can check itself
    for _ in range(250):
        act(engine)
        manager.check()
    engine.end()

    manager.check()
    counts = {kind: engine.stat(f"audit.{kind}_blocks") for kind in KINDS}
    assert counts["wrong"] == counts["close"] == 0
    assert counts["equal"] > 0
    assert engine.stat("primary.free_blocks") + engine.stat("primary.evictable_blocks") == NUM_SLOTS
    assert engine.half.audit is not None
    assert not engine.half.audit._states  # each went with its request


def serve(engine: HybridEngine, tokens: list[int], *ends: int) -> None:
    """Compute a prompt whose steps end at these tokens, and end its request."""
    engine.add(tokens)
    ((req_id, one),) = engine.running.items()
    for end in (*ends, len(tokens)):
        engine.next_end = end
        engine.step()
    assert one.num_computed == len(tokens)
    engine.abort(req_id)
    engine.end()


@pytest.mark.parametrize("names_states", [True, False])
def test_the_state_of_a_hit_is_compared_when_a_step_ends_with_it(
    engines: list[HybridEngine], *, names_states: bool
) -> None:
    engines.append(engine := HybridEngine(0, names_states=names_states, audit_ratio=1.0))
    tokens = list(range(35))
    serve(engine, tokens, 32)
    serve(engine, tokens, 10, 32)

    assert engine.stat("audit.equal_blocks") == 4 + 1
    assert engine.stat("audit.lost_blocks") == 0


@pytest.mark.parametrize("names_states", [True, False])
def test_a_state_that_a_step_passes_over_is_lost_and_unpinned_in_that_step(
    engines: list[HybridEngine], *, names_states: bool
) -> None:
    engines.append(engine := HybridEngine(0, names_states=names_states, audit_ratio=1.0))
    tokens = list(range(45))
    serve(engine, tokens[:35], 32)
    engine.add(tokens)
    engine.next_end = 43
    engine.step()
    lost = engine.stat("audit.lost_blocks")
    engine.end()

    assert lost == 1
    assert engine.stat("audit.lost_blocks") == 1
    assert engine.stat("audit.equal_blocks") == 4


@pytest.mark.parametrize("names_states", [True, False])
@pytest.mark.parametrize("happening", ["abort", "reset"])
def test_a_request_that_ends_before_its_state_is_computed_unpins_it(
    engines: list[HybridEngine], happening: str, *, names_states: bool
) -> None:
    engines.append(engine := HybridEngine(0, names_states=names_states, audit_ratio=1.0))
    tokens = list(range(35))
    serve(engine, tokens, 32)
    engine.add(tokens)
    engine.next_end = 16
    engine.step()
    if happening == "abort":
        engine.abort(next(iter(engine.running)))
    else:
        engine.reset()

    assert engine.stat("audit.lost_blocks") == 2 + 1
    engine.end()
    assert engine.stat("primary.free_blocks") + engine.stat("primary.evictable_blocks") == NUM_SLOTS


@pytest.mark.parametrize("names_states", [True, False])
def test_a_wrong_state_is_found_and_leaves_host_memory(
    engines: list[HybridEngine], *, names_states: bool
) -> None:
    engines.append(engine := HybridEngine(0, names_states=names_states, audit_ratio=1.0))
    tokens = list(range(35))
    serve(engine, tokens, 32)
    rows: Any = engine._worker_spec._handlers  # Any: reached through the spec
    held = rows.rows.numpy()
    right = content(STATE, tokens[:32]).numpy()
    (slot,) = [slot for slot in range(NUM_SLOTS) if (held[slot, :PAGE_BYTES] == right).all()]
    held[slot, 7] ^= 0x40
    serve(engine, tokens, 10, 32)

    assert engine.stat("audit.wrong_blocks") == 1
    assert engine.stat("audit.equal_blocks") == 4
    serve(engine, tokens, 10, 32)  # of attention alone no prefix can be loaded; the state is stored anew
    serve(engine, tokens, 32)
    assert engine.stat("audit.wrong_blocks") == 1
    assert engine.stat("audit.requests") == 2
