"""Tables of numbers on the terminal, and the console that is wide enough for them."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

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
