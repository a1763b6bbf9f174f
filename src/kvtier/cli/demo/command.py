"""``kvtier demo``: parse the options, size the device pool, run the demo and print its report.

The device pool has room for the longest prompt and its answer and little more, so that the other conversations spill.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.demo.backends import open_backend
from kvtier.cli.demo.conversation import ConversationShape, Turn, plan_conversations, read_documents
from kvtier.cli.demo.directory import open_directory
from kvtier.cli.demo.options import (
    TIER_SETTING_FORM,
    TIER_TYPES,
    DevicePoolOptions,
    ModelOptions,
    SetUp,
    parse_tier_settings,
    require_new_file,
)
from kvtier.cli.demo.report import Report, to_json
from kvtier.cli.demo.signals import ended_like_interrupted
from kvtier.cli.demo.table import print_report, write_plot
from kvtier.cli.demo.trace import TraceShape, plan_trace, read_trace
from kvtier.cli.output import STDOUT, print_json, require_plot
from kvtier.errors import ConfigError
from kvtier.quantities import parse_bytes
from kvtier.tiering.factory import check_tier_config

BLOCK_TOKENS = 16
"""Tokens in a device block: the engine's default."""

SPARE_RATIO = 1.1
"""Pool over longest prompt. A pool for exactly one prompt never shows a hit on the device; a pool for several shows
little else."""

DIFFERENT_TOKENS_STATUS = 1


def choose_device_blocks(turns: Iterable[Turn], num_asked: int | None) -> int:
    """Return the size of the device pool in blocks. Pure.

    Args:
        turns: every turn.
        num_asked: the user's choice; None: a little more than the longest prompt needs.

    Raises:
        ConfigError: the longest prompt and its answer do not fit into ``num_asked`` blocks.
    """
    num_needed = -(-count_longest_tokens(turns) // BLOCK_TOKENS)
    if num_asked is None:
        return int(num_needed * SPARE_RATIO) + 1
    if num_asked < num_needed:
        remedy = f"must be at least {num_needed}: the longest prompt and its answer need that many"
        raise ConfigError("--device-blocks", num_asked, remedy)
    return num_asked


def count_longest_tokens(turns: Iterable[Turn]) -> int:
    """Return the tokens of the longest conversation, its last answer included. Pure."""
    totals: Counter[int] = Counter()
    for turn in turns:
        totals[turn.conversation] += len(turn.token_ids) + turn.num_answer_tokens
    return max(totals.values(), default=0)


def demo(
    docs: Annotated[
        Path | None, typer.Option(help="Documents of the conversations; default: kvtier's own.")
    ] = None,
    conversations: Annotated[int, typer.Option(help="Conversations, each about a document.")] = 5,
    turns: Annotated[int, typer.Option(help="Turns of each conversation.")] = 4,
    document_tokens: Annotated[int, typer.Option(help="Tokens of each document that are quoted.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(help="Tokens generated in each turn, at most.")] = 8,
    trace: Annotated[
        Path | None, typer.Option(help="Serve a request trace instead of conversations.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of the trace.")] = 40,
    scale: Annotated[float, typer.Option(help="Factor for the lengths in the trace.")] = 0.03125,
    model: Annotated[str | None, typer.Option(help="A local model; by default a random Llama.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 10,
    hidden: Annotated[int, typer.Option(help="Width of the random model.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the random model's weights.")] = 0,
    device_blocks: Annotated[
        int | None, typer.Option(help="Blocks of 16 tokens in the device pool; by default just enough.")
    ] = None,
    cpu_bytes: Annotated[str, typer.Option(help="Host memory behind the device pool.")] = "48MiB",
    tier: Annotated[
        str, typer.Option(help=f"The tier behind host memory: {', '.join(TIER_TYPES)}, package.module:Class.")
    ] = "fs",
    tier_setting: Annotated[
        list[str] | None, typer.Option(help=f"A setting of the tier, repeatable: {TIER_SETTING_FORM}.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The tier's directory; default: one removed at the end.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write JSON; - is stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time to first token per turn.")] = None,
) -> None:
    """Serve a multi-turn workload with a device pool that is too small for it, with kvtier and without.

    The same engine serves the workload twice: with its own prefix cache alone, then with host memory and a tier.
    A new process then serves the last turns again. Tokens are bytes. Exit status 1 when any answer differs.
    """
    settings = {name: _plain(value) for name, value in locals().items()}
    model_options = ModelOptions(model, layers, hidden, seed)
    host_bytes = parse_bytes("--cpu-bytes", cpu_bytes)
    if trace is None:
        shape = ConversationShape(conversations, turns, document_tokens, answer_tokens)
        planned = plan_conversations(read_documents(docs), shape)
    else:
        planned = _plan_trace(trace, TraceShape(requests, scale, answer_tokens))
    pools = DevicePoolOptions(choose_device_blocks(planned, device_blocks), host_bytes, tier)
    given = parse_tier_settings(tier_setting or ())
    _require_outputs(json_file, plot)
    with (
        ended_like_interrupted(),
        open_directory(directory) as tier_directory,
        open_backend(tier, tier_directory.path) as tier_location,
    ):
        set_up = SetUp(model_options, pools, {**tier_location, **given})
        check_tier_config({**set_up.tier_settings, "type": tier})
        with show_progress(Console(stderr=True)) as begin_stage:
            from kvtier.cli.demo.runner import (
                run_demo,
            )  # its imports take seconds; invalid arguments need none

            report = run_demo(set_up, tier_directory, planned, settings, begin_stage)
    publish(report, json_file, plot)
    if not report.is_identical:
        raise typer.Exit(DIFFERENT_TOKENS_STATUS)


def publish(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    """Print the report and write the requested files.

    Raises:
        ConfigError: a file cannot be written.
    """
    print_report(report, Console(stderr=json_file == STDOUT))
    if json_file == STDOUT:
        print_json(to_json(report))
    elif json_file is not None:
        try:
            json_file.write_text(json.dumps(to_json(report), indent=1) + "\n")
        except OSError as error:
            raise ConfigError("--json", str(json_file), f"cannot be written: {error.strerror}") from error
    if plot_file is not None:
        write_plot(report, plot_file)


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yield a function that begins a stage with its own progress bar."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def begin_stage(name: str, num_steps: int) -> Callable[[], None]:
            task = progress.add_task(name, total=num_steps)
            return lambda: progress.advance(task)

        yield begin_stage


def _plan_trace(path: Path, shape: TraceShape) -> list[Turn]:
    return plan_trace(read_trace(path, shape.num_requests), shape)


def _require_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    require_new_file("--json", json_file)
    require_new_file("--plot", plot_file)
    if plot_file is not None:
        require_plot()


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
