"""Runs the demo: the planned turns without kvtier, then with it, then the last ones again in a new process.

The runs do not overlap, because unfinished stores of one would slow the other.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier.cli.demo.conversation import Turn
from kvtier.cli.demo.directory import TierDirectory
from kvtier.cli.demo.options import SetUp
from kvtier.cli.demo.report import Report, compare
from kvtier.cli.demo.restart import choose_last_turns, serve_after_restart
from kvtier.cli.demo.serving import build_model, config_with, config_without, serve_turns, warm_up
from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import EngineStateError
from kvtier.tiering.factory import TIERS

BeginStage = Callable[[str, int], Callable[[], None]]
"""Begins a stage with a name and a number of steps; the function it returns is called after each step."""

MAX_RESTART_TURNS = 5
"""Turns that the new process serves. Each takes a load and an answer; more turns would show nothing new."""

DRAIN_S = 60.0
"""Seconds that the tier may take to finish its pending stores."""


def run_demo(
    set_up: SetUp,
    directory: TierDirectory,
    turns: Sequence[Turn],
    settings: Mapping[str, Any],  # Any: JSON
    begin_stage: BeginStage,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Serve ``turns`` without and with kvtier, the last ones again after a restart, and return the results.

    Args:
        set_up: model, sizes and tier settings.
        directory: where the tier keeps its blocks.
        turns: in the order in which they are served.
        settings: the options of the demo, for the report.
        begin_stage: shows progress.
        clock: seconds, monotonic.

    Raises:
        ModelError: the model has no KV cache.
        DevicePoolError: a prompt does not fit the device pool.
        RestartError: the new process failed.
    """
    started_s = clock()
    on_built = begin_stage("model", 1)
    model = build_model(set_up.model)
    on_built()
    with KVTierEngine(model, config_without(set_up.pools)) as engine:
        warm_up(engine)
        without = serve_turns(engine, turns, begin_stage("without kvtier", len(turns)))
    with KVTierEngine(model, config_with(set_up)) as engine:
        warm_up(engine)
        with_tiers = serve_turns(engine, turns, begin_stage("with kvtier", len(turns)))
        if not engine.drain(DRAIN_S).has_ended:
            raise EngineStateError(f"the {set_up.pools.tier} tier took no more blocks within {DRAIN_S:.0f} s")
    before = choose_last_turns(without, MAX_RESTART_TURNS)
    after = serve_after_restart(set_up, directory, before, begin_stage("new process", len(before)))
    return Report(
        tier=TIERS.resolve(set_up.pools.tier).get_tier_type(),
        model=f"{type(model).__name__}, {model.num_parameters() / 1e6:.0f} M parameters",
        turns=compare(with_tiers, without),
        restarted=compare(after, before),
        settings=settings,
        wall_s=clock() - started_s,
    )
