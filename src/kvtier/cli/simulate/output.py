"""The files that a comparison is written to. They are tried before there is anything to write."""

import json
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.result_file import check_writable, write_result
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.report.page import make_page
from kvtier.cli.simulate.report.svg import require_plot


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
                check_writable(option, path)

    def write(self, comparison: Comparison) -> None:
        """Write each file.

        Raises:
            ConfigError: one cannot be written.
        """
        if self.json_file is not None:
            write_result("--json", self.json_file, json.dumps(comparison.to_json(), indent=1) + "\n")
        if self.html_file is not None:
            write_result("--html", self.html_file, make_page(comparison, self.command))
