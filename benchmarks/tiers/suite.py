"""Throughput of the tiers with a server, one after another, each against the plain client of the same server.

A server is started for the run, on the loopback interface, and shares the cores with its clients, so only ratios are
meaningful. A server that is not installed, or does not start, is a line under the table; later failures fail the suite.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.suite import Options
from kvtier.errors import TierError

TIERS = ("valkey", "obj", "mooncake")

Place = dict[str, Any]  # Any: a tier's JSON settings


class TierBenchmark(Protocol):
    """The functions of a module of this package."""

    def open_server(self, folder: Path) -> AbstractContextManager[Place]:
        """Run the tier's server during the block, with its files in ``folder``.

        Raises:
            TierError: it cannot be started; the message has the reason.
        """

    def measure(self, options: Options, place: Place) -> Iterator[Measurement]:
        """Yield the measurements with the servers at ``place``."""


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by tier, direction and block size."""
    # Mooncake's library reads it when it is loaded; without it each call writes several lines.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    for tier in TIERS:
        yield from measure_tier(tier, options)


def measure_tier(tier: str, options: Options) -> Iterator[Measurement]:
    """Yield one tier's measurements, or note why there are none."""
    try:
        module = cast("TierBenchmark", importlib.import_module(f"benchmarks.tiers.{tier}"))
    except ImportError as error:
        options.note(f"{tier} was not measured: {error}")
        return
    with ExitStack() as ends:
        folder = ends.enter_context(options.new_folder())
        try:
            place = ends.enter_context(module.open_server(folder))
        except TierError as error:
            options.note(f"{tier} was not measured: {error}")
            return
        yield from module.measure(options, place)


def labels_of(
    tier: str, operation: str, block_bytes: int, num_threads: int, together: str
) -> dict[str, str | int]:
    """Return the labels of a line. Pure.

    Args:
        tier: the measured tier.
        operation: "put" or "get".
        block_bytes: length of a row.
        num_threads: of the tier and of every other contestant.
        together: number of blocks in one call or object.
    """
    return {
        "tier": tier,
        "operation": operation,
        "block": f"{block_bytes // 1024} KiB",
        "threads": num_threads,
        "together": together,
    }
