"""What a benchmark is to those who run it: a name, what it measures, and lines as they come."""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.rounds import MOST_FACTOR, RoundCount, fixed


@dataclass(frozen=True, slots=True)
class Options:
    """How a suite is run.

    Attributes:
        is_quick: fewer sizes and rounds, for a look; the numbers of a page are not quick ones.
        folder: where files are written, None for the system's temporary folder.
        note: takes a line that belongs under the table, a peer that is not installed for example.
    """

    is_quick: bool
    folder: Path | None
    note: Callable[[str], None]

    def count_rounds(self, num_rounds: int, num_quick_rounds: int) -> RoundCount:
        """Return how many rounds count: the quick ones and no more, else at least ``num_rounds``. Pure."""
        if self.is_quick:
            return fixed(num_quick_rounds)
        return RoundCount(num_rounds, MOST_FACTOR * num_rounds)

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """Make a folder for files, which is there as long as the block."""
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=self.folder) as name:
            yield Path(name)


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark.

    Attributes:
        name: what a person types.
        summary: what it measures, and against what, in a line.
        module: where its ``measure(options)`` is; imported when it is run.
        x_label: name of a numeric label to draw lines over; None draws bars of the ratios.
    """

    name: str
    summary: str
    module: str
    x_label: str | None = None

    def measure(self, options: Options) -> Iterator[Measurement]:
        """Yield the measurements as they are made.

        Raises:
            ImportError: a library that this suite cannot do without is missing.
        """
        measure: Callable[[Options], Iterator[Measurement]] = importlib.import_module(self.module).measure
        return measure(options)
