"""A simulation keeps the garbage collector from visiting what was there before, and undoes that at its end."""

import gc

from kvtier.sim.model import EngineModel
from kvtier.sim.simulate import simulate
from kvtier.sim.trace import TraceRequest, make_trace

ENGINE = EngineModel(10, block_bytes=100, num_device_blocks=4)
TRACE = make_trace([TraceRequest(0.0, 10, 1, (1,))], 10)


def test_objects_that_are_frozen_for_a_simulation_are_thawed_after_it() -> None:
    gc.unfreeze()
    num_frozen: list[int] = []
    thresholds = gc.get_threshold()
    simulate(TRACE, ENGINE, None, on_request=lambda: num_frozen.append(gc.get_freeze_count()))
    assert num_frozen[0] > 0
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


def test_a_collector_that_is_off_stays_off() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(0, *thresholds[1:])
    seen: list[int] = []
    try:
        simulate(TRACE, ENGINE, None, on_request=lambda: seen.append(gc.get_threshold()[0]))
    finally:
        gc.set_threshold(*thresholds)
    assert seen == [0]


def test_objects_that_somebody_has_frozen_stay_so_after_a_simulation() -> None:
    gc.freeze()
    try:
        num_before = gc.get_freeze_count()
        simulate(TRACE, ENGINE, None)
        assert 0 < gc.get_freeze_count() <= num_before
    finally:
        gc.unfreeze()
