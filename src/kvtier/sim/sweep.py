"""Simulates one trace many times: without offloading, and with each policy at each size of one place.

``plan_cases`` returns the cases, ``run_cases`` simulates them, in several processes if requested. The results are in
the order of the cases and do not depend on the number of processes.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess

from kvtier.errors import ConfigError, SimulationDiedError, UnknownNameError
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.results import DEVICE, HOST, Simulation
from kvtier.sim.simulate import simulate
from kvtier.sim.trace import Trace

KNEE_SHARE = 0.9
"""Share of what the largest capacity brings. A curve of hits has no sharp bend: with more the knee is where the last
doubling was wasted, with less it is in the middle of the rise."""

WITHOUT = "without"
"""In place of a policy's name: the same engine without offloading."""


@dataclass(frozen=True, slots=True)
class Size:
    """One capacity of the swept place.

    Attributes:
        num_blocks: the capacity.
        label: its name for users, such as "64GiB".
    """

    num_blocks: int
    label: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """One place whose capacity is varied.

    Attributes:
        place: "device", "host" or the name of a tier.
        sizes: its capacities, ascending.

    Raises:
        ConfigError: there is no size, or one is not above the one before.
    """

    place: str
    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError("sizes", "", "give at least one size")
        for smaller, size in pairwise(self.sizes):
            if size.num_blocks <= smaller.num_blocks:
                remedy = f"must hold more blocks than {smaller.label}, which holds {smaller.num_blocks}"
                raise ConfigError("sizes", size.label, remedy)


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation of several.

    Attributes:
        policy: of host memory; WITHOUT: no offloading.
        engine: the engine.
        host: host memory and tiers; None without offloading.
        size: of the swept place; None without a sweep, or when the case does not depend on the swept place.
    """

    policy: str
    engine: EngineModel
    host: HostModel | None
    size: Size | None = None

    @property
    def label(self) -> str:
        """Name of the case: the policy, and the size if there are several."""
        return f"{self.policy} at {self.size.label}" if self.size else self.policy


def plan_cases(
    engine: EngineModel, host: HostModel, policies: Sequence[str], sweep: Sweep | None = None
) -> list[Case]:
    """Return a case without offloading and one for each policy, by size where one place is swept. Pure.

    Without host memory, unless that is swept, there are no cases with policies.

    Args:
        engine: the engine.
        host: host memory and tiers; its own policy is ignored.
        policies: registered names.
        sweep: the place to vary; the engine without offloading has one case unless the place is the device.

    Raises:
        UnknownNameError: the place does not exist.
    """
    has_host = host.num_blocks > 0 or (sweep is not None and sweep.place == HOST)
    hosts = [replace(host, cache_policy=policy) for policy in policies] if has_host else []
    without = Case(WITHOUT, engine, None)
    if sweep is None:
        return [without, *(Case(one.cache_policy, engine, one) for one in hosts)]
    cases = [] if sweep.place == DEVICE else [without]
    for size in sweep.sizes:
        resize(
            engine, host, sweep.place, size.num_blocks
        )  # an unknown place is refused without host memory too
        resized = [resize(engine, one, sweep.place, size.num_blocks) for one in hosts]
        if sweep.place == DEVICE:
            cases.append(Case(WITHOUT, replace(engine, num_device_blocks=size.num_blocks), None, size))
        cases += [Case(one.cache_policy, its_engine, one, size) for its_engine, one in resized]
    return cases


def resize(
    engine: EngineModel, host: HostModel, place: str, num_blocks: int
) -> tuple[EngineModel, HostModel]:
    """Return both with another capacity of ``place``: "device", "host" or a tier's name. Pure.

    Raises:
        UnknownNameError: the place does not exist.
    """
    names = [tier.name for tier in host.tiers]
    if place == DEVICE:
        return replace(engine, num_device_blocks=num_blocks), host
    if place == HOST:
        return engine, replace(host, num_blocks=num_blocks)
    if place not in names:
        raise UnknownNameError("place to sweep", place, [DEVICE, HOST, *names])
    tiers = (replace(tier, num_blocks=num_blocks) if tier.name == place else tier for tier in host.tiers)
    return engine, replace(host, tiers=tuple(tiers))


def find_knee(gains: Sequence[float]) -> int | None:
    """Return the index of the smallest capacity that brings ``KNEE_SHARE`` of the whole gain. Pure.

    None for a curve that still rises at its end, and for one that does not rise.

    Args:
        gains: what each capacity brings, by ascending capacity.
    """
    if not gains or max(gains) <= gains[0]:
        return None
    wanted = gains[0] + KNEE_SHARE * (max(gains) - gains[0])
    knee = next(number for number, gain in enumerate(gains) if gain >= wanted)
    return knee if knee < len(gains) - 1 else None


def run_cases(
    trace: Trace,
    cases: Sequence[Case],
    *,
    num_processes: int = 1,
    on_requests: Callable[[Case, int], object] | None = None,
) -> list[Simulation]:
    """Simulate each case, its bound included, and return the results in the order of ``cases``.

    Args:
        trace: the requests.
        cases: what to simulate.
        num_processes: concurrent processes; 1: this process.
        on_requests: called with a case and its number of newly finished requests, for a progress bar: one at a time
            in this process, all at once from another.

    Raises:
        ConfigError: the trace's blocks have another length than an engine's, or ``num_processes`` is below 1.
        SimulationDiedError: a process ended before its simulation.
    """
    if num_processes < 1:
        raise ConfigError("num_processes", num_processes, "must be at least 1")
    note = on_requests or _ignore
    if num_processes > 1 and len(cases) > 1:
        return _run_in_processes(trace, cases, min(num_processes, len(cases)), note)
    return [
        simulate(trace, case.engine, case.host, on_request=partial(note, case, 1), finds_bound=True)
        for case in cases
    ]


def _ignore(case: Case, num_requests: int) -> None:
    del case, num_requests


def _run_in_processes(
    trace: Trace, cases: Sequence[Case], num_processes: int, on_requests: Callable[[Case, int], object]
) -> list[Simulation]:
    def note(case: Case, future: Future[Simulation]) -> None:
        if not future.cancelled() and future.exception() is None:
            on_requests(case, len(trace.requests))

    others = set(active_children())
    # A spawned process starts clean: a forked one would inherit locks that other threads hold.
    with ProcessPoolExecutor(num_processes, get_context("spawn"), _end_with_parent) as executor:
        futures = []
        try:
            for case in cases:
                future = executor.submit(simulate, trace, case.engine, case.host, finds_bound=True)
                future.add_done_callback(partial(note, case))
                futures.append(future)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise SimulationDiedError(num_processes) from error
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            # Leaving the block waits for running simulations, which may take minutes.
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _end_with_parent() -> None:
    """Make an interrupt from the keyboard end this process at once, without a traceback.

    Also end it when its parent is killed: an executor's process would otherwise wait for work for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None, "called in a child process"
    threading.Thread(target=_end_after, args=(parent,), name="kvtier-sweep-end", daemon=True).start()


def _end_after(process: BaseProcess) -> None:
    process.join()
    os._exit(1)
