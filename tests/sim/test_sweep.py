"""A sweep simulates each policy at each size, and the results do not depend on how many processes there were."""

import dataclasses
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, SimulationDiedError, UnknownNameError
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.simulate import simulate
from kvtier.sim.sweep import WITHOUT, Case, Size, Sweep, find_knee, plan_cases, resize, run_cases
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import TraceRequest, make_trace

FAST = LinkSpeed(1e9, 1e9)
ENGINE = EngineModel(10, 100, num_device_blocks=6, prefill_tokens_per_s=10, decode_tokens_per_s=10)
HOST = HostModel(5, speed=FAST, tiers=(TierModel("disk", 20, FAST), TierModel("store", 90, FAST)))
SIZES = (Size(3, "3 B"), Size(30, "30 B"))
TRACE = make_trace(
    [TraceRequest(30.0 * turn, 35, 5, (turn % 3, 10 + turn % 6, 20 + turn % 12)) for turn in range(24)], 10
)


def test_without_a_sweep_there_is_one_case_without_offloading_and_one_for_each_policy() -> None:
    assert plan_cases(ENGINE, HOST, ["arc", "lru"]) == [
        Case(WITHOUT, ENGINE, None),
        Case("arc", ENGINE, dataclasses.replace(HOST, cache_policy="arc")),
        Case("lru", ENGINE, HOST),
    ]


def test_a_sweep_of_the_host_leaves_the_engine_alone_and_simulates_it_once() -> None:
    cases = plan_cases(ENGINE, HOST, ["lru", "arc"], Sweep("host", SIZES))

    assert [case.label for case in cases] == [
        "without",
        "lru at 3 B",
        "arc at 3 B",
        "lru at 30 B",
        "arc at 30 B",
    ]
    assert [case.host.num_blocks for case in cases if case.host] == [3, 3, 30, 30]
    assert {case.engine for case in cases} == {ENGINE}


def test_a_sweep_of_the_device_changes_the_engine_without_offloading_too() -> None:
    cases = plan_cases(ENGINE, HOST, ["lru"], Sweep("device", SIZES))

    assert [(case.label, case.engine.num_device_blocks) for case in cases] == [
        ("without at 3 B", 3),
        ("lru at 3 B", 3),
        ("without at 30 B", 30),
        ("lru at 30 B", 30),
    ]


def test_a_tier_is_resized_by_its_name_and_the_others_stay() -> None:
    _, resized = resize(ENGINE, HOST, "store", 7)

    assert [(tier.name, tier.num_blocks) for tier in resized.tiers] == [("disk", 20), ("store", 7)]
    assert resized.num_blocks == HOST.num_blocks


def test_an_unknown_place_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UnknownNameError, match="unknown place to sweep 'stor': did you mean 'store'"):
        plan_cases(ENGINE, HOST, ["lru"], Sweep("stor", SIZES))


def test_sizes_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ConfigError, match="give at least one size"):
        Sweep("host", ())
    with pytest.raises(ConfigError, match=r"sizes='b': must hold more blocks than a"):
        Sweep("host", (Size(3, "a"), Size(3, "b")))


def test_results_come_in_the_order_of_the_cases_with_their_bounds() -> None:
    cases = plan_cases(ENGINE, HOST, ["lru"], Sweep("host", SIZES))
    told: list[tuple[str, int]] = []

    found = run_cases(TRACE, cases, on_requests=lambda case, number: told.append((case.label, number)))

    assert found == [simulate(TRACE, case.engine, case.host, finds_bound=True) for case in cases]
    assert told == [(case.label, 1) for case in cases for _ in TRACE.requests]
    assert all(one.at_most_ratio is not None and one.not_computed_ratio <= one.at_most_ratio for one in found)


def test_processes_find_the_same_and_tell_of_whole_cases() -> None:
    cases = plan_cases(ENGINE, HOST, ["lru", "arc"])
    told: list[tuple[str, int]] = []

    found = run_cases(
        TRACE, cases, num_processes=2, on_requests=lambda case, number: told.append((case.label, number))
    )

    assert found == run_cases(TRACE, cases)
    assert sorted(told) == sorted((case.label, len(TRACE.requests)) for case in cases)


def test_what_a_process_refuses_is_refused_here() -> None:
    wrong = dataclasses.replace(ENGINE, block_tokens=16)

    with pytest.raises(ConfigError, match="the trace has blocks of 10 tokens"):
        run_cases(TRACE, [Case(WITHOUT, ENGINE, None), Case(WITHOUT, wrong, None)], num_processes=2)


def test_no_process_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_processes=0"):
        run_cases(TRACE, [], num_processes=0)


class Deadly(HostModel):
    """Host memory whose arrival in another process ends that process at once, as a lack of memory would."""

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return os._exit, (9,)


def test_a_process_that_was_ended_from_outside_is_told_as_such() -> None:
    cases = [Case(WITHOUT, ENGINE, None), Case("lru", ENGINE, Deadly(3))]

    with pytest.raises(SimulationDiedError, match="one of 2 simulation processes was killed"):
        run_cases(TRACE, cases, num_processes=2)


def test_a_larger_host_finds_no_less_under_lru_and_reaches_the_bound_with_room_for_all() -> None:
    host = HostModel(1, speed=FAST)
    sizes = tuple(Size(number, str(number)) for number in (2, 8, 24, 100))
    cases = plan_cases(ENGINE, host, ["lru"], Sweep("host", sizes))

    ratios = [one.not_computed_ratio for one in run_cases(TRACE, cases)]

    assert ratios == sorted(ratios)
    assert ratios[-1] == run_cases(TRACE, cases[-1:])[0].at_most_ratio


STUCK = """
import multiprocessing, threading
from tests.sim.test_sweep import ENGINE, HOST, TRACE
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.registry import CACHE_POLICIES
from kvtier.sim.sweep import WITHOUT, Case, run_cases
import dataclasses

class Stuck(LRUCachePolicy):
    def __init__(self, cache_capacity):
        threading.Event().wait()

CACHE_POLICIES.register("stuck", f"{__name__}:Stuck")

def tell(case, number):
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    stuck = Case("stuck", ENGINE, dataclasses.replace(HOST, cache_policy="stuck"))
    run_cases(TRACE, [Case(WITHOUT, ENGINE, None), stuck, stuck], num_processes=2, on_requests=tell)
"""
"""A sweep whose simulations never end, but for the first, after which it names its processes."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_sweep_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "stuck_sweep.py").write_text(STUCK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "stuck_sweep"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as sweep:
        assert sweep.stdout is not None
        processes = [os.pidfd_open(int(pid)) for pid in sweep.stdout.readline().split()]
        sweep.send_signal(number)
        assert sweep.wait(timeout=60) != 0

        assert len(processes) == 2
        for process in processes:
            assert select.select([process], [], [], 60.0)[0], "it goes on without its parent"
            os.close(process)


@pytest.mark.parametrize(
    ("gains", "knee"),
    [
        ((0.0, 0.5, 0.9, 1.0, 1.0), 2),
        ((0.0, 0.9, 0.95, 1.0), 1),
        ((0.0, 1 / 3, 2 / 3, 1.0), None),
        ((0.0, 0.01, 0.1, 1.0), None),
        ((0.5, 0.5, 0.5), None),
        ((1.0, 0.5, 0.2), None),
        ((0.0, 1.0), None),
        ((), None),
    ],
)
def test_a_knee_brings_nine_tenths_of_the_gain_before_the_end(
    gains: tuple[float, ...], knee: int | None
) -> None:
    assert find_knee(gains) == knee


@pytest.mark.parametrize("name", ["host", "device", "CPU"])
def test_no_tier_is_called_what_a_sweep_calls_another_place(name: str) -> None:
    with pytest.raises(ConfigError, match=f"name='{name}'"):
        dataclasses.replace(HOST, tiers=(TierModel(name, 20, FAST),))
