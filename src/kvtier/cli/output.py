"""What several commands print and write: tables of numbers, a console wide enough for them, checks, result files."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.errors import ConfigError, MissingExtraError

PLAIN_COLUMNS = 200
"""Width where the output is not a terminal. Rich would take 80 columns and cut numbers; rows have about 120 with a
handful of tiers."""


PLOT_MODULE = "matplotlib"


class CheckResult(Enum):
    """Result of a check."""

    GOOD = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        subject: what was checked.
        result: how the check ended.
        found: what was found and, if it is not good, what to do.
    """

    subject: str
    result: CheckResult
    found: str


def size_in_words(num_bytes: float) -> str:
    """Return a size in binary units, for people. Pure."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def make_console() -> Console:
    """Return a console for tables: as wide as the terminal, or ``PLAIN_COLUMNS`` where there is none."""
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
    """Check that a result file can be written, before there are results.

    Raises:
        ConfigError: it cannot be written. Its content is kept until ``write_result``.
    """
    try:
        path.open("a").close()
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}): give a file in an existing directory"
        raise ConfigError(option, str(path), remedy) from error


def write_result(option: str, path: Path, text: str) -> None:
    """Write a result file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be written: {error.strerror}") from error


def require_plot() -> None:
    """Check that plots can be drawn, before there are results.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec(PLOT_MODULE) is None:
        raise MissingExtraError(PLOT_MODULE, "plot")
