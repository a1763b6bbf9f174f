"""The arguments of ``kvtier simulate`` as typer reads them: names, kinds and a line of help each. No values."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.simulate.options import TIER_FORM
from kvtier.cli.simulate.sweep_option import SWEEP_FORM
from kvtier.cli.simulate.tier_setting import TIER_SETTING_FORM
from kvtier.sim.formats.registry import TRACE_FORMATS

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="Requests, plain or gzip.")]
TraceFormat = Annotated[
    str | None,
    typer.Option("--format", help=f"One of {', '.join(TRACE_FORMATS.names())}; else it is found."),
]
Requests = Annotated[int | None, typer.Option(help="Only the first requests of the trace.")]

Device = Annotated[str, typer.Option(help="Memory of the device cache.")]
Host = Annotated[str, typer.Option(help="Host memory behind it.")]
Tiers = Annotated[list[str] | None, typer.Option(help=f"A tier behind that, any number: {TIER_FORM}.")]
TierSettings = Annotated[
    list[str] | None, typer.Option(help=f"A setting of one tier, any number: {TIER_SETTING_FORM}.")
]
Policies = Annotated[str, typer.Option(help="Eviction policies of host memory, by comma.")]
StoreThreshold = Annotated[int, typer.Option(help="Accesses before a block is stored.")]
LoadIfText = Annotated[
    str, typer.Option("--load-if", help="Load hits of tiers always, or if faster than computing them.")
]
SweepText = Annotated[
    str | None, typer.Option("--sweep", help=f"Several capacities of one place: {SWEEP_FORM}.")
]

KVBytes = Annotated[
    str, typer.Option("--kv-bytes-per-token", help="Keys and values of a token, all layers and devices.")
]
Prefill = Annotated[float, typer.Option(help="Prompt tokens computed in a second.")]
Decode = Annotated[float, typer.Option(help="Tokens a second of each answer.")]
MaxRunning = Annotated[int, typer.Option(help="Requests that run at the same time.")]

Jobs = Annotated[int, typer.Option(help="Simulations at the same time, each in a process of its own.")]
JSONFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers as JSON.")]
HTMLFile = Annotated[
    Path | None, typer.Option("--html", help="Write a page with tables and plots, viewable offline.")
]
