"""The files that a comparison is written to. They are tried before there is anything to write."""

import json
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.report.page import make_page
from kvtier.cli.simulate.report.svg import require_plot
from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go.

    Attributes:
        json_file: gets the numbers; None for nowhere.
        html_file: gets the page; None for nowhere.
        command: the words of the command line, for the page.
    """

    json_file: Path | None
    html_file: Path | None
    command: tuple[str, ...]

    def check_writable(self) -> None:
        """Open each file before there are results, so that a wrong path costs no simulation.

        Raises:
            ConfigError: one cannot be written. What it holds stays until there are results.
            MissingExtraError: the plots of the page cannot be drawn.
        """
        if self.html_file is not None:
            require_plot()
        for option, path in (("--json", self.json_file), ("--html", self.html_file)):
            if path is not None:
                _try_to_open(option, path)

    def write(self, comparison: Comparison) -> None:
        """Write each file.

        Raises:
            ConfigError: one cannot be written.
        """
        if self.json_file is not None:
            _write("--json", self.json_file, json.dumps(comparison.to_json(), indent=1) + "\n")
        if self.html_file is not None:
            _write("--html", self.html_file, make_page(comparison, self.command))


def _try_to_open(option: str, path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}): give a file in an existing directory"
        raise ConfigError(option, str(path), remedy) from error


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be written: {error.strerror}") from error
