"""``kvtier demo``: a model answers questions about documents, without kvtier, with it, and after a restart.

The device pool has room for the longest conversation and little more, so that the others leave it. The runs do not
overlap, because unfinished stores of one would slow the other.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.demo.conversation import Turn, plan_conversations, read_own_documents, take_last_turns
from kvtier.cli.demo.report import Report, print_report, to_json
from kvtier.cli.demo.storage import open_storage
from kvtier.cli.option_names import naming_options
from kvtier.cli.output import Outputs, make_console
from kvtier.cli.processes import ended_like_interrupted
from kvtier.cli.simulate.options import parse_value
from kvtier.errors import ConfigError, EngineStateError
from kvtier.input_files import is_dir
from kvtier.quantities import parse_capacity
from kvtier.tiering.factory import TIER, TIERS, check_tier_config

if TYPE_CHECKING:
    from kvtier.cli.demo.serving import SetUp

TIER_SETTING_FORM = "NAME=VALUE such as max_blocks=5000"

DRAIN_S = 60.0
"""Seconds that the tier may take to finish its pending stores."""

DIFFERENT_TOKENS_STATUS = 1

BeginStage = Callable[[str, int], Callable[[object], None]]
"""Begins a stage with a name and a number of steps; the function it returns is called with the result of each step."""


def demo(
    conversations: Annotated[
        int, typer.Option(min=1, max=100, help="Conversations, each about a document.")
    ] = 5,
    turns: Annotated[int, typer.Option(min=2, max=100, help="Turns of each conversation.")] = 4,
    document_tokens: Annotated[
        int, typer.Option(min=1, max=100_000, help="Tokens of each document that are quoted.")
    ] = 1000,
    model: Annotated[Path | None, typer.Option(help="A local model; by default a random Llama.")] = None,
    cpu_bytes: Annotated[str, typer.Option(help="Host memory behind the device pool.")] = "48MiB",
    tier: Annotated[
        str,
        typer.Option(help="The tier behind host memory: fs, obj, valkey, mooncake, package.module:Class."),
    ] = "fs",
    tier_setting: Annotated[
        list[str] | None, typer.Option(help=f"A setting of the tier, repeatable: {TIER_SETTING_FORM}.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The tier's directory; default: one removed at the end.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write JSON; - is stdout.")] = None,
) -> None:
    """Serve conversations with a device pool that is too small for them, without kvtier and with it.

    The same engine serves them twice: with its own prefix cache alone, then with host memory and a tier. A new process
    then serves the last turns again. Tokens are bytes. Exit status 1 when any answer differs.
    """
    options = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    host_bytes = parse_capacity("--cpu-bytes", cpu_bytes)
    if model is not None and not is_dir(model):
        raise ConfigError("--model", str(model), "must be a directory with a model of transformers")
    with naming_options({TIER: "--tier"}):
        tier_name = TIERS.resolve(tier).get_tier_type()
    given = parse_tier_settings(tier_setting or ())
    outputs = Outputs(json_file, None)
    outputs.check_writable()
    planned = plan_conversations(read_own_documents(), conversations, turns, document_tokens)
    with ended_like_interrupted(), open_storage(tier, directory) as location:
        settings = location | given
        check_tier_config({**settings, "type": tier})
        # Its imports take seconds; wrong arguments need none.
        from kvtier.cli.demo.serving import SetUp, choose_device_blocks

        num_blocks = choose_device_blocks(planned)
        set_up = SetUp(str(model) if model else None, num_blocks, host_bytes, tier, settings)
        with show_progress(Console(stderr=True)) as begin_stage:
            report = run_demo(set_up, planned, tier_name, options, begin_stage)
    print_report(report, make_console(is_stderr=outputs.are_numbers_printed))
    outputs.write(lambda: to_json(report), str)
    if not report.is_identical:
        raise typer.Exit(DIFFERENT_TOKENS_STATUS)


def parse_tier_settings(texts: Iterable[str]) -> dict[str, Any]:  # Any: the tier gives them types
    """Return the settings that ``texts`` give, each in the form TIER_SETTING_FORM.

    Raises:
        ConfigError: the form is wrong, or a setting is given twice.
    """
    found: dict[str, Any] = {}  # Any: as above
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals:
            raise ConfigError("--tier-setting", text, f"must be {TIER_SETTING_FORM}")
        if name in found or name == "type":
            remedy = "is set by --tier" if name == "type" else "is given twice: give it once"
            raise ConfigError("--tier-setting", text, remedy)
        found[name] = parse_value(value)
    return found


def run_demo(
    set_up: "SetUp",
    turns: list[Turn],
    tier_name: str,
    options: dict[str, Any],  # Any: JSON
    begin_stage: BeginStage,
) -> Report:
    """Serve ``turns`` without and with kvtier, the last ones again after a restart, and return the results.

    Raises:
        ModelError: the model has no KV cache.
        EngineStateError: the tier is too slow for what it should store.
        RestartError: the new process failed.
    """
    from kvtier.cli.demo.restart import serve_after_restart
    from kvtier.cli.demo.serving import build_model, config_with, config_without, serve_turns
    from kvtier.engines.transformers import KVTierEngine

    started_s = time.monotonic()
    on_built = begin_stage("model", 1)
    model = build_model(set_up.model)
    on_built(model)
    with KVTierEngine(model, config_without(set_up)) as engine:
        without = serve_turns(engine, turns, begin_stage("without kvtier", len(turns)))
    with KVTierEngine(model, config_with(set_up)) as engine:
        with_kvtier = serve_turns(engine, turns, begin_stage("with kvtier", len(turns)))
        if not engine.drain(DRAIN_S).has_ended:
            raise EngineStateError(f"the {tier_name} tier took no more blocks within {DRAIN_S:.0f} s")
    last = [replace(one.turn, token_ids=one.prompt) for one in take_last_turns(without)]
    return Report(
        tier=tier_name,
        model=f"{type(model).__name__}, {model.num_parameters() / 1e6:.0f} M parameters",
        options=options,
        without=without,
        with_kvtier=with_kvtier,
        restarted=serve_after_restart(set_up, last, begin_stage("new process", len(last))),
        wall_s=time.monotonic() - started_s,
    )


@contextmanager
def show_progress(console: Console) -> Iterator[BeginStage]:
    """Yield a function that begins a stage with its own progress bar."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def begin_stage(name: str, num_steps: int) -> Callable[[object], None]:
            task = progress.add_task(name, total=num_steps)
            return lambda _: progress.advance(task)

        yield begin_stage
