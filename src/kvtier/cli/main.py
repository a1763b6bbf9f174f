"""The ``kvtier`` command: finds the requested command and turns errors into exit statuses.

A command's module is imported only when that command is invoked, so that `kvtier doctor` works where the libraries of
`kvtier demo` are missing or broken. A command is a function with a signature for typer, named like the command, in the
module that ``COMMANDS`` names.

Exit status: 0 done, 1 the command found something wrong or no engine runs, 2 invalid input or a missing library (one
line on stderr names it), 130 interrupted.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from kvtier import __version__
from kvtier.errors import ConfigError, KVTierError, MissingExtraError, NoEngineError

if TYPE_CHECKING:
    import typer

NOTHING_FOUND_STATUS = 1
WRONG_INPUT_STATUS = 2
INTERRUPTED_STATUS = 130

EXTRA_OF_MODULE = {
    "typer": "cli",
    "rich": "cli",
    "xxhash": "fs",
    "torch": "transformers",
    "transformers": "transformers",
    "tokenizers": "transformers",
    "matplotlib": "plot",
    "plotly": "plot",
    "msgspec": "record",
    "zmq": "record",
    "prometheus_client": "observe",
    "cryptography": "encryption",
    "aiohttp": "llama",
    "blake3": "llama",
}
"""Optional module -> the extra of the package that installs it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the program.

    Attributes:
        name: the command's name, which is also the function's.
        module: the module that has the function.
        summary: its line in the list of commands.
    """

    name: str
    module: str
    summary: str

    def load(self) -> Callable[..., Any]:  # Any: only typer calls it, by its signature
        """Import the command's function.

        Raises:
            MissingExtraError: a library that it needs is not installed.
        """
        found: Callable[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return found


COMMANDS = (
    Command(
        "audit", "kvtier.cli.live.audit", "Show whether a running engine's hits are right, and worth it."
    ),
    Command("bench", "kvtier.cli.bench", "Measure kvtier on this machine, against what it allows."),
    Command("demo", "kvtier.cli.demo.command", "Answer questions about documents with a small device pool."),
    Command("doctor", "kvtier.cli.doctor", "Check what kvtier needs on this machine."),
    Command("drain", "kvtier.cli.live.steer", "Wait until a running engine's tiers have what is pending."),
    Command("inspect", "kvtier.cli.place.inspect", "Show what a tier has stored: whose, how much, how old."),
    Command("keys", "kvtier.cli.keys", "Manage the keys of encrypted tiers; drop a tenant's."),
    Command(
        "llama", "kvtier.cli.llama", "Keep the conversations of a llama-server, over restarts and swaps."
    ),
    Command("pin", "kvtier.cli.live.steer", "Keep a prefix in a running engine's host memory for a time."),
    Command("prefetch", "kvtier.cli.live.steer", "Bring a prefix from the tiers into host memory."),
    Command("ps", "kvtier.cli.live.overview", "List the engines that run, and how full their tiers are."),
    Command("purge", "kvtier.cli.place.purge", "Remove blocks that a tier has stored."),
    Command(
        "recent", "kvtier.cli.live.overview", "Show where the last prompts of a running engine came from."
    ),
    Command("record", "kvtier.cli.record.command", "Record the requests of a running engine as a trace."),
    Command("simulate", "kvtier.cli.simulate.command", "Replay a request trace: how much would kvtier help?"),
    Command("size", "kvtier.cli.size", "How many tokens of a model fit into host memory?"),
    Command("stats", "kvtier.cli.live.overview", "Print every number of a running engine."),
    Command("top", "kvtier.cli.live.top", "Watch a running engine: origins, causes, tiers, queues."),
    Command("unpin", "kvtier.cli.live.steer", "End the lease of a prefix, or every lease."),
    Command("verify", "kvtier.cli.place.verify", "Read what a tier has stored and check every checksum."),
    Command("why", "kvtier.cli.why", "Say why prompt tokens were computed, and what to do."),
)

REMOVED_COMMANDS = {
    "models": "was removed: the page of results 'Models that were tried' lists them, and an engine of transformers "
    "refuses a model that it cannot serve",
    "plan": "was removed: kvtier size says how much memory a model's tokens take, and kvtier simulate --sweep what "
    "each size of host memory or a tier finds",
}
"""Commands of earlier releases -> what to use instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name and return its exit status.

    Args:
        arguments: what follows the program's name; None: the command line.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return run(given)
    except KVTierError as error:
        return report(error)
    except ModuleNotFoundError as error:
        extra = EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return report(MissingExtraError(error.name or "", extra))
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


def run(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the command. Errors of the command are not caught.

    Raises:
        ConfigError: the command was removed.
    """
    invoked = next((argument for argument in arguments if not argument.startswith("-")), None)
    if invoked in REMOVED_COMMANDS:
        raise ConfigError("COMMAND", invoked, REMOVED_COMMANDS[invoked])
    try:
        make_app(invoked)(args=list(arguments), prog_name="kvtier")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def make_app(invoked: str | None) -> "typer.Typer":
    """Build the program with every command listed and only ``invoked`` imported."""
    import typer

    # Plain tracebacks and messages: rich ones print the values of local variables, secrets among them.
    app = typer.Typer(
        name="kvtier",
        help="Keep the KV cache of a large language model alive after device memory runs out.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def options(
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit

    for command in COMMANDS:
        function = command.load() if command.name == invoked else _not_loaded
        app.command(command.name, help=help_of(function), short_help=command.summary)(function)
    return app


def help_of(function: Callable[..., Any]) -> str:
    """Return a command's docstring without its section for readers of the code."""
    return (inspect.getdoc(function) or "").partition("\n\nRaises:")[0]


def report(error: KVTierError) -> int:
    """Print ``error`` as one line on stderr and return its status: wrong input, but for an engine that is not there."""
    line = " ".join(str(error).split())
    # What a terminal would obey, or cannot be encoded, is shown as an escape.
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    sys.stderr.write(f"kvtier: {shown}\n")
    return NOTHING_FOUND_STATUS if isinstance(error, NoEngineError) else WRONG_INPUT_STATUS


def _not_loaded() -> None:
    """Stand in for a command that is not invoked."""


if __name__ == "__main__":
    sys.exit(main())
