"""What a server that is killed or hangs costs the scheduler's thread, step by step.

A thousand requests of four blocks wait for a tier, which has them all: half for loads, half for answers to their
lookups. While they wait the server is left alone ("well"), killed, or stopped. A step is what a scheduler does then: it
polls each request, searches those that have news, loads and ends those that have an answer, and ends the step. Requests
that had an answer are replaced, by at most sixteen a step, so that a step is a queue's and not a burst's; the arrival
of the first thousand is told apart. Between steps the thread sleeps, as it does while a model computes, and tiers work.

    python -m benchmarks.outage [--quick] [--json FILE]

The bar: 1 ms a step, at the 99th percentile. "own" is the thread's processor time, the rest waits for the interpreter
or a lock, which the tier's threads have. A process of the server's own is what the signal goes to; the memory
behind Mooncake's master belongs to another process, which stays.
"""

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cli.demo.backends import SERVERS, open_backend
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import KVTierError
from kvtier.tiering.base import ReachableTier
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

NUM_REQUESTS = 1000
REQUEST_BLOCKS = 4
NUM_SLOTS = 5 * NUM_REQUESTS
NUM_PROMPTS = 2 * NUM_REQUESTS
"""More than the primary holds, so that a prompt which comes again is in the tier only."""

NUM_STORED = NUM_PROMPTS * REQUEST_BLOCKS
MAX_ARRIVALS = 16
"""New requests a step once the queue has been filled; more would measure arrivals, fewer leave the queue empty."""

ROW_BYTES = 4096
STORE_BLOCKS = 500
DEADLINE_S, QUICK_DEADLINE_S = 5.0, 1.5
AFTERMATH_S, QUICK_AFTERMATH_S = 10.0, 1.5
"""How much longer than the deadline the steps go on: the default sees the breaker try the server again."""

PAUSE_S = 0.005
BAR_MS = 1.0
HANG_GUARD_S = 120.0


class Fate(Enum):
    """What becomes of the server, in the order in which it can be tried on one."""

    WELL = "well"
    STOPPED = "SIGSTOP"
    KILLED = "SIGKILL"


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took, and how many requests waited after it."""

    time_ms: float
    own_ms: float
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Line:
    """What a step costs, in milliseconds.

    Attributes:
        tier: the tier's type.
        fate: what became of its server.
        num_steps: steps that were timed.
        mean_waiting: requests that waited in one, on average.
        arrival_ms: the step in which half of them came, and the loads of the others were submitted.
        median_ms: of the steps after it.
        p99_ms: their 99th percentile.
        own_p99_ms: 99th percentile of the processor time that the thread itself takes in a step.
        worst_ms: the longest of them.
        num_over: those above the bar.
    """

    tier: str
    fate: str
    num_steps: int
    mean_waiting: float
    arrival_ms: float
    median_ms: float
    p99_ms: float
    own_p99_ms: float
    worst_ms: float
    num_over: int

    @property
    def verdict(self) -> str:
        """Whether the bar is met."""
        return "met" if self.p99_ms <= BAR_MS else "NOT met"


class BenchRows:
    """Rows in ordinary memory."""

    def create_kv_memoryview(self) -> memoryview:
        """Return them, page-aligned."""
        raw = np.zeros(NUM_SLOTS * ROW_BYTES + 4096, dtype=np.int8)
        start = -raw.ctypes.data % 4096
        return raw[start : start + NUM_SLOTS * ROW_BYTES].reshape(NUM_SLOTS, ROW_BYTES).data

    def cleanup(self) -> None:
        """Do nothing."""


class Engine:
    """A manager over one tier, with a queue of requests.

    Args:
        settings: the tier's, with its type.
        deadline_s: seconds that a request may wait.
    """

    def __init__(self, settings: dict[str, Any], deadline_s: float) -> None:  # Any: a tier's JSON
        primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, BenchRows(), store_threshold=0)
        tier = create_secondary_tier(settings, primary.get_kv_memoryview(), make_config())
        assert isinstance(tier, ReachableTier)
        tier.check_reachable()
        self.manager = TieringOffloadingManager(primary, [tier], lookup_deadline_s=deadline_s)
        self.queue: dict[ReqContext, Sequence[OffloadKey]] = {}
        self._numbers = count()

    def fill_tier(self) -> None:
        """Store what requests will ask for."""
        for begin in range(0, NUM_STORED, STORE_BLOCKS):
            self._store(range(begin, begin + STORE_BLOCKS))
            if not self.manager.drain(HANG_GUARD_S):
                raise SystemExit("the tier has not stored its blocks")
            self.manager.end_step()

    def arrive(self, num_requests: int) -> None:
        """Let requests come, each with a prompt of its own or of one long gone."""
        for _ in range(num_requests):
            number = next(self._numbers) % NUM_PROMPTS
            first = number * REQUEST_BLOCKS
            self.queue[ReqContext(str(number))] = [key_of(first + n) for n in range(REQUEST_BLOCKS)]

    def step(self) -> int:
        """Run one step; return how many requests wait after it."""
        manager = self.manager
        # Told apart first: a copy of the whole queue in each step would be the garbage collector's time.
        for request in [request for request in self.queue if not manager.is_waiting(request)]:
            keys = self.queue[request]
            num_hits = self._search(request, keys)
            if num_hits is not None:
                self._admit(request, keys[:num_hits])
        manager.end_step()
        return len(self.queue)

    def await_news(self) -> None:
        """Run empty steps until a request is worth a search."""
        end_s = time.perf_counter() + HANG_GUARD_S
        while all(map(self.manager.is_waiting, self.queue)):
            if time.perf_counter() > end_s:
                raise SystemExit("the tier answers no lookup")
            self.manager.end_step()
            time.sleep(PAUSE_S)

    def _search(self, request: ReqContext, keys: Sequence[OffloadKey]) -> int | None:
        """Return the leading hits, None while one of them is on its way."""
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
        if output is None:
            raise SystemExit("the primary has no room: a store of the tier did not end")
        self.manager.complete_store(keys, request)
        self.manager.request_finished(request)


class Server:
    """The server's processes.

    Args:
        pids: of them.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    @contextmanager
    def struck(self, fate: Fate) -> Iterator[None]:
        """Let ``fate`` happen to them; one that was stopped goes on after the block."""
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


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter deadline and fewer steps")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--tier", choices=sorted(SERVERS), help="only this one")
    arguments = parser.parse_args()
    logging.getLogger("kvtier").setLevel(
        logging.ERROR
    )  # an outage is told in a warning, and here it is no news
    print(f"ms a step with {NUM_REQUESTS} requests of {REQUEST_BLOCKS} blocks; bar: {BAR_MS} ms at p99")
    print(f"{'tier':<10}{'server':<9}{'steps':>6}{'waiting':>9}{'arrival':>9}", end="")
    print(f"{'median':>9}{'p99':>9}{'own p99':>9}{'worst':>9}{'over':>6}  bar", flush=True)
    lines: list[Line] = []
    for tier in [arguments.tier] if arguments.tier else SERVERS:
        lines += measure_tier(tier, is_quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    return 0


def measure_tier(tier: str, *, is_quick: bool) -> list[Line]:
    """Measure each fate of the tier's server, or say why there is none."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-outage-") as directory:
        try:
            with open_backend(tier, Path(directory)) as settings:
                server = Server(find_server())
                settings["type"] = tier
                fill(settings)
                for fate in Fate:
                    lines.append(measure(settings, server, fate, is_quick=is_quick))
                    print_line(lines[-1])
        except KVTierError as error:
            print(f"{tier:<10}left out: {error}", flush=True)
    return lines


def fill(settings: dict[str, Any]) -> None:  # Any: a tier's JSON
    """Fill the tier, with an engine whose memory ends with it: the next one knows nothing of what is below."""
    engine = Engine(settings, DEADLINE_S)
    engine.fill_tier()
    engine.manager.shutdown()


def measure(settings: dict[str, Any], server: Server, fate: Fate, *, is_quick: bool) -> Line:  # Any: JSON
    """Time the steps of an engine whose server meets ``fate`` while the whole queue waits."""
    deadline_s = QUICK_DEADLINE_S if is_quick else DEADLINE_S
    engine = Engine(settings, deadline_s)
    engine.arrive(NUM_REQUESTS // 2)
    engine.step()
    engine.await_news()  # the next step submits their loads
    engine.arrive(NUM_REQUESTS - NUM_REQUESTS // 2)
    begun_s = time.perf_counter()
    engine.step()
    arrival_ms = (time.perf_counter() - begun_s) * 1e3
    with server.struck(fate):
        steps = run_steps(engine, deadline_s + (QUICK_AFTERMATH_S if is_quick else AFTERMATH_S))
    engine.manager.shutdown()
    times_ms = [step.time_ms for step in steps]
    return Line(
        settings["type"],
        fate.value,
        len(steps),
        float(np.mean([step.num_waiting for step in steps])),
        arrival_ms,
        float(np.median(times_ms)),
        float(np.percentile(times_ms, 99)),
        float(np.percentile([step.own_ms for step in steps], 99)),
        max(times_ms),
        sum(time_ms > BAR_MS for time_ms in times_ms),
    )


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


def find_server() -> list[int]:
    """Return the processes that our children have started: each child is a program that starts a server."""
    parents = {int(path.parent.name): parent_of(path) for path in Path("/proc").glob("[0-9]*/stat")}
    programs = {pid for pid, parent in parents.items() if parent == os.getpid()}
    return [pid for pid, parent in parents.items() if parent in programs]


def parent_of(stat: Path) -> int | None:
    """Return the parent of the process behind ``/proc/<pid>/stat``, None when it has ended."""
    try:
        # A program's name may hold spaces and brackets: what follows the last bracket is state and parent.
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def key_of(number: int) -> OffloadKey:
    """Return the key of block ``number``."""
    return make_offload_key(number.to_bytes(32, "big"), 0)


def make_config() -> OffloadingConfig:
    """Return a configuration of one group."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer",), page_size_bytes=ROW_BYTES)
    return OffloadingConfig("bench", ModelIdentity("bench"), (group,), hash_block_size=16)


def print_line(line: Line) -> None:
    """Print one line of the table."""
    load = f"{line.tier:<10}{line.fate:<9}{line.num_steps:>6}{line.mean_waiting:>9.0f}{line.arrival_ms:>9.2f}"
    typical = f"{line.median_ms:>9.3f}{line.p99_ms:>9.3f}{line.own_p99_ms:>9.3f}{line.worst_ms:>9.3f}"
    print(f"{load}{typical}{line.num_over:>6}  {line.verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
