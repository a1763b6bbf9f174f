"""The cost of a killed or hanging server for the scheduler's thread, step by step.

A thousand requests of four blocks wait for a tier that holds them all: half for loads, half for the results of
lookups. While they wait the server is left alone ("well"), stopped, or killed. A step is what a scheduler does: it
polls each request, searches for those whose state has changed, loads and ends those with a result, and ends the step.
Requests with a result are replaced, by at most sixteen per step, so that a step is that of a queue and not of a burst;
the arrival of the first thousand is reported separately. Between steps the thread sleeps, as it does while a model
computes.

A run is one value: the steps of an outage differ, and a median over windows of them would hide the single cost of a
deadline or of another attempt to reach the server. The bar is for a server that is out: 1 ms a step, at the 99th
percentile. From a server that is well blocks arrive in each step, and the step has the cost of loading sixteen
requests. "own" is the thread's processor time; the rest is waiting for the interpreter or a lock that the tier's
threads hold. There is no floor. The signal goes to the server's own process; the memory behind Mooncake's master
belongs to another process, which continues.
"""

import logging
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement
from benchmarks.harness.native_noise import native_noise_hidden
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import HANG_GUARD_S, make_config, make_rows
from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cli.demo.backends import SERVERS, open_backend
from kvtier.errors import KVTierError
from kvtier.tiering.base import ReachableTier
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

NUM_REQUESTS = 1000
REQUEST_BLOCKS = 4
NUM_SLOTS = 5 * NUM_REQUESTS
NUM_PROMPTS = 2 * NUM_REQUESTS
"""More prompts than the primary holds, so that a repeated prompt is in the tier only."""

NUM_STORED = NUM_PROMPTS * REQUEST_BLOCKS
MAX_ARRIVALS = 16
"""New requests per step once the queue is full; more would measure arrivals, fewer leave the queue empty."""

ROW_BYTES = 4096
STORE_BLOCKS = 500
DEADLINE_S, QUICK_DEADLINE_S = 5.0, 1.0
AFTERMATH_S, QUICK_AFTERMATH_S = 7.0, 1.0
"""Seconds that the steps continue after an outage beyond the deadline: the default includes the breaker, which is open
for five seconds and then tries the server again. A server that is well has no aftermath."""

SLOW_TO_FILL = "obj"
"""Skipped in a quick run: its server starts and accepts blocks more slowly than the others together."""

PAUSE_S = 0.005
BAR_MS = 1.0
P99 = "p99 step"


class Fate(Enum):
    """What happens to the server, in the order in which it can be tried on one."""

    WELL = "well"
    STOPPED = "SIGSTOP"
    KILLED = "SIGKILL"


@dataclass(frozen=True, slots=True)
class Step:
    """Duration of one step, and the number of waiting requests after it."""

    time_ms: float
    own_ms: float
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Run:
    """Durations of the steps of one run.

    Attributes:
        arrival_ms: the step in which half of the requests came, and the loads of the others were submitted.
        steps: the steps after it.
    """

    arrival_ms: float
    steps: Sequence[Step]

    def times_ms(self) -> dict[str, float]:
        """Return the durations of steps, by measure."""
        times_ms = [step.time_ms for step in self.steps]
        own_ms = [step.own_ms for step in self.steps]
        return {
            P99: float(np.percentile(times_ms, 99)),
            "own p99": float(np.percentile(own_ms, 99)),
            "median step": float(np.median(times_ms)),
            "longest step": max(times_ms),
            "arrival": self.arrival_ms,
        }

    def describe(self) -> str:
        """Return how reliable the times are."""
        num_over = sum(step.time_ms > BAR_MS for step in self.steps)
        mean_waiting = float(np.mean([step.num_waiting for step in self.steps]))
        return f"{len(self.steps):,} steps, {num_over:,} above {BAR_MS:g} ms, {mean_waiting:.0f} requests waiting"


class BenchRows:
    """Rows in ordinary memory."""

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows, page-aligned."""
        return make_rows(NUM_SLOTS, ROW_BYTES)

    def cleanup(self) -> None:
        """Do nothing."""


class Engine:
    """A manager over one tier, with a queue of requests.

    Args:
        settings: the tier's settings, including its type.
        deadline_s: seconds that a request may wait.
    """

    def __init__(self, settings: dict[str, Any], deadline_s: float) -> None:  # Any: a tier's JSON
        primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, BenchRows(), store_threshold=0)
        tier = create_secondary_tier(settings, primary.get_kv_memoryview(), make_config(ROW_BYTES))
        assert isinstance(tier, ReachableTier)
        tier.check_reachable()
        self.manager = TieringOffloadingManager(primary, [tier], lookup_deadline_s=deadline_s)
        self.queue: dict[ReqContext, Sequence[OffloadKey]] = {}
        self._numbers = count()

    def fill_tier(self) -> None:
        """Store the blocks that requests will need."""
        for begin in range(0, NUM_STORED, STORE_BLOCKS):
            self._store(range(begin, begin + STORE_BLOCKS))
            assert self.manager.drain(HANG_GUARD_S).has_ended, "the tier has not stored its blocks"
            self.manager.end_step()

    def arrive(self, num_requests: int) -> None:
        """Add requests, each with its own prompt or with one that was evicted from the primary."""
        for _ in range(num_requests):
            number = next(self._numbers) % NUM_PROMPTS
            first = number * REQUEST_BLOCKS
            self.queue[ReqContext(str(number))] = [key_of(first + n) for n in range(REQUEST_BLOCKS)]

    def step(self) -> int:
        """Run one step; return how many requests wait after it."""
        manager = self.manager
        # Selected first: a copy of the whole queue in each step would be time of the garbage collector.
        for request in [request for request in self.queue if not manager.is_waiting(request)]:
            keys = self.queue[request]
            num_hits = self._search(request, keys)
            if num_hits is not None:
                self._admit(request, keys[:num_hits])
        manager.end_step()
        return len(self.queue)

    def await_change(self) -> None:
        """Run empty steps until the state of a request has changed."""
        end_s = time.perf_counter() + HANG_GUARD_S
        while all(map(self.manager.is_waiting, self.queue)):
            assert time.perf_counter() < end_s, "the tier answers no lookup"
            self.manager.end_step()
            time.sleep(PAUSE_S)

    def _search(self, request: ReqContext, keys: Sequence[OffloadKey]) -> int | None:
        """Return the leading hits, None while one of them is in flight."""
        num_hits, is_pending = 0, False
        for key in keys:
            answer = self.manager.lookup(key, request)
            if answer is False:
                break
            is_pending |= answer is None
            num_hits += 1
        return None if is_pending else num_hits

    def _admit(self, request: ReqContext, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self.manager.prepare_load(keys, request)
            self.manager.complete_load(keys, request)
        self.manager.request_finished(request)
        del self.queue[request]

    def _store(self, numbers: Sequence[int]) -> None:
        request = ReqContext("store")
        keys = [key_of(number) for number in numbers]
        output = self.manager.prepare_store(keys, request)
        assert output is not None, "the primary has no room: a store of the tier did not end"
        self.manager.complete_store(keys, request)
        self.manager.request_finished(request)


class Server:
    """The server's processes.

    Args:
        pids: their process ids.
    """

    def __init__(self, pids: Collection[int]) -> None:
        assert pids, "a server without a process"
        self._pids = pids

    @contextmanager
    def struck(self, fate: Fate) -> Iterator[None]:
        """Apply ``fate`` to the processes; a stopped one continues after the block."""
        if fate is not Fate.WELL:
            self._signal(signal.SIGKILL if fate is Fate.KILLED else signal.SIGSTOP)
        try:
            yield
        finally:
            if fate is Fate.STOPPED:
                self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield the durations of steps, by tier and by what happens to its server."""
    logger = logging.getLogger("kvtier")
    level = logger.level
    logger.setLevel(logging.ERROR)  # an outage is logged as a warning, and here it is intended
    try:
        for tier in SERVERS:
            if options.is_quick and tier == SLOW_TO_FILL:
                options.note(f"{tier} is skipped in a quick run")
                continue
            yield from measure_tier(tier, options)
    finally:
        logger.setLevel(level)


def measure_tier(tier: str, options: Options) -> Iterator[Measurement]:
    """Yield the times for each fate of the tier's server, or note why there is no server."""
    bystanders = children_of({os.getpid()})
    with ExitStack() as ends:
        folder = ends.enter_context(options.new_folder())
        try:
            settings = ends.enter_context(open_backend(tier, folder))
            settings["type"] = tier
            with native_noise_hidden():
                fill(settings)
        except KVTierError as error:
            options.note(f"{tier} was not measured: {error}")
            return
        # The only new child is the program that starts the server.
        server = Server(children_of(children_of({os.getpid()}) - bystanders))
        for fate in Fate:
            with native_noise_hidden():
                run = run_once(settings, server, fate, is_quick=options.is_quick)
            options.note(f"{tier}, {fate.value}: {run.describe()}")
            for what, time_ms in run.times_ms().items():
                labels: dict[str, str | int] = {"tier": tier, "server": fate.value, "measure": what}
                is_out = fate is not Fate.WELL
                bar = Bar(None, BAR_MS) if is_out and what == P99 else None
                yield Measurement(labels, "ms", Better.LOWER, {OURS: (time_ms,)}, bar)


def fill(settings: dict[str, Any]) -> None:  # Any: a tier's JSON
    """Fill the tier with an engine that ends afterwards, so that the next one's memory is empty."""
    engine = Engine(settings, DEADLINE_S)
    engine.fill_tier()
    engine.manager.shutdown()


def run_once(settings: dict[str, Any], server: Server, fate: Fate, *, is_quick: bool) -> Run:  # Any: JSON
    """Time the steps of an engine whose server suffers ``fate`` while the whole queue waits."""
    deadline_s = QUICK_DEADLINE_S if is_quick else DEADLINE_S
    engine = Engine(settings, deadline_s)
    engine.arrive(NUM_REQUESTS // 2)
    engine.step()
    engine.await_change()  # the next step submits their loads
    engine.arrive(NUM_REQUESTS - NUM_REQUESTS // 2)
    begun_s = time.perf_counter()
    engine.step()
    arrival_ms = (time.perf_counter() - begun_s) * 1e3
    with server.struck(fate):
        steps = run_steps(engine, deadline_s + aftermath_s(fate, is_quick=is_quick))
    engine.manager.shutdown()
    return Run(arrival_ms, steps)


def aftermath_s(fate: Fate, *, is_quick: bool) -> float:
    """Return how long the steps continue beyond the deadline. Pure."""
    if fate is Fate.WELL:
        return 0.0
    return QUICK_AFTERMATH_S if is_quick else AFTERMATH_S


def run_steps(engine: Engine, duration_s: float) -> list[Step]:
    """Run steps for ``duration_s``."""
    steps: list[Step] = []
    end_s = time.perf_counter() + duration_s
    while time.perf_counter() < end_s:
        time.sleep(PAUSE_S)
        engine.arrive(min(MAX_ARRIVALS, NUM_REQUESTS - len(engine.queue)))
        begun_s, own_begun_s = time.perf_counter(), time.thread_time()
        num_waiting = engine.step()
        ended_s, own_ended_s = time.perf_counter(), time.thread_time()
        steps.append(Step((ended_s - begun_s) * 1e3, (own_ended_s - own_begun_s) * 1e3, num_waiting))
    return steps


def children_of(parents: Collection[int]) -> set[int]:
    """Return the child processes of ``parents``."""
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if parent_of(path) in parents}


def parent_of(stat: Path) -> int | None:
    """Return the parent of the process with ``/proc/<pid>/stat``; None when it has ended."""
    try:
        # A program's name may contain spaces and brackets: the state and the parent follow the last bracket.
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def key_of(number: int) -> OffloadKey:
    """Return the key of block ``number``."""
    return make_offload_key(number.to_bytes(32, "big"), 0)
