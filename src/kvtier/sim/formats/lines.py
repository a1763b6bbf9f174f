"""Reads a file of JSON objects, one per line, and the typed fields of such an object.

One line is in memory at a time. The file is opened once for each pass, so it must be a regular file. Every error names
the file, the line, the value and the remedy.
"""

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import TraceError
from kvtier.input_files import bounded_lines
from kvtier.redaction import MAX_SHOWN_CHARS, shorten

logger = logging.getLogger(__name__)

GZIP_MAGIC = b"\x1f\x8b"

MAX_HASH_ID = 2**63
"""Ids become keys of eight bytes."""

MAX_TIME_S = 1e13
"""Later than any calendar date. Up to here a float resolves milliseconds; a much later clock would not advance."""

MAX_WHOLE = 2**63
"""More than any count of tokens; unlimited digits would overflow when they are converted to seconds."""


@dataclass(frozen=True, slots=True)
class Line:
    """One object of a file.

    Attributes:
        path: the file.
        number: number of the line, from 1.
        values: the object.
    """

    path: Path
    number: int
    values: dict[str, Any]  # Any: JSON, typed by the methods below

    def fail(self, value: object, remedy: str) -> TraceError:
        """Return an error about ``value`` in this line."""
        return TraceError(self.path, self.number, value, remedy)

    def seconds(self, name: str, *, unit_s: float = 1.0) -> float:
        """Return a time that the file has in units of ``unit_s`` seconds.

        Raises:
            TraceError: it is not a number from 0 to MAX_TIME_S.
        """
        value = self._present(name)
        latest = MAX_TIME_S / unit_s
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= latest:
            remedy = f"{name} must be a number from 0 to {latest:g}, measured from the start of the trace"
            raise self.fail(value, remedy)
        return value * unit_s

    def whole(self, name: str) -> int:
        """Return an integer of zero or more.

        Raises:
            TraceError: it is not one, or has more than 63 bits.
        """
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_WHOLE:
            raise self.fail(value, f"{name} must be an integer from 0 to 2**63 - 1")
        return value

    def hash_ids(self, name: str = "hash_ids") -> tuple[int, ...]:
        """Return a list of ids.

        Raises:
            TraceError: it is not a list of integers from 0 to 2**63 - 1.
        """
        value = self._present(name)
        if not isinstance(value, list):
            raise self.fail(value, f"{name} must be a list of integers, one for each block of the prompt")
        for hash_id in value:
            if type(hash_id) is not int or not 0 <= hash_id < MAX_HASH_ID:
                raise self.fail(hash_id, f"each of {name} must be an integer from 0 to 2**63 - 1")
        return tuple(value)

    def _present(self, name: str) -> Any:  # noqa: ANN401 - JSON; each caller checks
        if name not in self.values:
            known = shorten(", ".join(sorted(self.values)) or "nothing").strip("'")
            raise self.fail(name, f"this field is missing, the line has {known}; is it another format?")
        return self.values[name]


def read_lines(path: Path, *, may_be_cut: bool = False) -> Iterator[Line]:
    """Yield each object of ``path``, plain or compressed with gzip; blank lines are skipped.

    Args:
        path: the file.
        may_be_cut: whether it may end within a line, like the file of a killed writer; that line is skipped with a
            warning.

    Raises:
        TraceError: the file cannot be read or is not a regular one, or a line is not a JSON object.
    """
    for number, text in _read_texts(path, may_be_cut=may_be_cut):
        if text.isspace():
            continue
        try:
            line = Line(path, number, _parse(path, number, text))
        except TraceError:
            if not may_be_cut or text.endswith("\n"):
                raise
            _warn_cut(path, number)
            return
        yield line


def _read_texts(path: Path, *, may_be_cut: bool) -> Iterator[tuple[int, str]]:
    """Yield each line unchanged, with its number from 1; the last one may lack its line feed."""
    if path.exists() and not path.is_file():
        # A pipe gives each line once, and detecting the format already reads the first ones.
        raise TraceError(
            path, None, "not a regular file", "is read several times: write the trace to a file first"
        )
    number = 0
    try:
        with path.open("rb") as raw:
            is_zipped = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        opener = gzip.open if is_zipped else open
        with opener(path, "rt", encoding="utf-8") as file:
            for number, text in enumerate(bounded_lines(file), start=1):
                yield number, text
    except OSError as error:
        raise TraceError(
            path, None, error.strerror or str(error), "cannot be read: check the path"
        ) from error
    except (EOFError, zlib.error, ValueError) as error:
        if may_be_cut and isinstance(error, EOFError):
            _warn_cut(path, number + 1)
            return
        remedy = "the file is damaged or truncated after this line: fetch it again"
        raise TraceError(path, number, str(error), remedy) from error


def _warn_cut(path: Path, number: int) -> None:
    logger.warning("%s ends within line %d: its writer was killed; the lines before are read", path, number)


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:  # Any: JSON
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            path, number, text[:MAX_SHOWN_CHARS].strip(), f"not JSON ({error}): write one object per line"
        ) from error
    if not isinstance(values, dict):
        raise TraceError(path, number, values, "must be a JSON object such as {...}")
    return values
