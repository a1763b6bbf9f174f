"""A benchmark suite: a name, a summary, and measurements as they are made."""

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
    """Options of a run.

    Attributes:
        is_quick: fewer sizes and rounds, for a first look; published numbers are not from quick runs.
        folder: folder for files; None: the system's temporary folder.
        note: prints a line under the table, such as a missing peer.
    """

    is_quick: bool
    folder: Path | None
    note: Callable[[str], None]

    def count_rounds(self, num_rounds: int, num_quick_rounds: int) -> RoundCount:
        """Return the number of rounds: exactly the quick ones, or at least ``num_rounds``. Pure."""
        if self.is_quick:
            return fixed(num_quick_rounds)
        return RoundCount(num_rounds, MOST_FACTOR * num_rounds)

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """Create a folder for files, removed after the block."""
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=self.folder) as name:
            yield Path(name)


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark.

    Attributes:
        name: its name on the command line.
        summary: what it measures, and against what, in a line.
        module: the module with its ``measure(options)``; imported when it runs.
        x_label: name of a numeric label to draw lines over; None: bars of the ratios.
    """

    name: str
    summary: str
    module: str
    x_label: str | None = None

    def measure(self, options: Options) -> Iterator[Measurement]:
        """Yield the measurements as they are made.

        Raises:
            ImportError: a library that this suite needs is missing.
        """
        measure: Callable[[Options], Iterator[Measurement]] = importlib.import_module(self.module).measure
        return measure(options)
