"""Simulates one trace many times: without offloading, and with each policy at each size of one place.

It has no rule of a simulation. ``plan_cases`` says what is to be simulated, ``run_cases`` does it, in processes of its
own if asked; the results are in the order of the cases and equal however many processes there were.
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
from kvtier.sim.results import DEVICE, Simulation
from kvtier.sim.simulate import simulate
from kvtier.sim.trace import Trace

HOST = "host"
WITHOUT = "without"
"""Stands where a policy's name would: the same engine without offloading."""


@dataclass(frozen=True, slots=True)
class Size:
    """One capacity of what is swept.

    Attributes:
        num_blocks: the capacity.
        label: what people call it, such as "64GiB".
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
        ConfigError: there is none, or one is not above the one before.
    """

    place: str
    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError("sizes", "", "a sweep has at least one size")
        for smaller, size in pairwise(self.sizes):
            if size.num_blocks <= smaller.num_blocks:
                remedy = f"must hold more blocks than {smaller.label}, which holds {smaller.num_blocks}"
                raise ConfigError("sizes", size.label, remedy)


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation of several.

    Attributes:
        policy: of host memory; WITHOUT for none.
        engine: what serves.
        host: what is behind it; None without offloading.
        size: of the swept place; None when nothing is swept, or when the swept place has no part in it.
    """

    policy: str
    engine: EngineModel
    host: HostModel | None
    size: Size | None = None

    @property
    def label(self) -> str:
        """What to call it: the policy, and the size where there are several."""
        return f"{self.policy} at {self.size.label}" if self.size else self.policy


def plan_cases(
    engine: EngineModel, host: HostModel, policies: Sequence[str], sweep: Sweep | None = None
) -> list[Case]:
    """Return a case without offloading and one for each policy, by size where one place is swept. Pure.

    Args:
        engine: the engine.
        host: host memory and tiers; its own policy does not count.
        policies: registered names.
        sweep: the place to vary; the engine without offloading has one case unless it is the device's memory.

    Raises:
        UnknownNameError: there is no such place.
    """
    hosts = [replace(host, cache_policy=policy) for policy in policies]
    without = Case(WITHOUT, engine, None)
    if sweep is None:
        return [without, *(Case(one.cache_policy, engine, one) for one in hosts)]
    cases = [] if sweep.place == DEVICE else [without]
    for size in sweep.sizes:
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
        UnknownNameError: there is no such place.
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
        num_processes: how many at a time; 1 takes this process.
        on_requests: told, for a progress bar, how many more requests of a case are done: one at a time in this
            process, all at once from another.

    Raises:
        ConfigError: the trace's blocks have another length than an engine's, or there is no process.
        SimulationDiedError: a process has ended before its simulation.
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
    # A spawned process begins clean: a forked one would inherit the locks of the caller's threads as they are.
    with ProcessPoolExecutor(num_processes, get_context("spawn"), _end_with_parent) as executor:
        futures = []
        for case in cases:
            future = executor.submit(simulate, trace, case.engine, case.host, finds_bound=True)
            future.add_done_callback(partial(note, case))
            futures.append(future)
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise SimulationDiedError(num_processes) from error
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            # Leaving the block waits for simulations that have begun, which may take minutes.
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _end_with_parent() -> None:
    """Let an interrupt from the keyboard end this process at once and without a traceback: its parent tells.

    A parent that is killed tells nothing, and an executor's process would wait for more work from it for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None, "it is run in a process of its own"
    threading.Thread(target=_end_after, args=(parent,), name="kvtier-sweep-end", daemon=True).start()


def _end_after(process: BaseProcess) -> None:
    process.join()
    os._exit(1)
