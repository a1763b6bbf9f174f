"""Tables of numbers on the terminal, and the console that is wide enough for them."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.errors import ConfigError

PLAIN_COLUMNS = 200
"""Width where the output is no terminal: rich would take 80 columns there and cut numbers. A program that reads the
rows loses nothing by more; with a handful of tiers they have about 120."""


def make_console() -> Console:
    """Return the console of the tables: as wide as the terminal, or wide enough for what is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_COLUMNS)


def make_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table without rows. Pure."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1))
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def check_writable(option: str, path: Path) -> None:
    """Open the file before there are results.

    Raises:
        ConfigError: it cannot be written. What it holds stays until there are results.
    """
    try:
        path.open("a").close()
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}): give a file in an existing directory"
        raise ConfigError(option, str(path), remedy) from error


def write_result(option: str, path: Path, text: str) -> None:
    """Write the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be written: {error.strerror}") from error
