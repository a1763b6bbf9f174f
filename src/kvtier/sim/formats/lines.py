"""Reads a file of JSON objects, one a line, and the typed fields of such an object.

It knows no format. It holds one line at a time, but opens the file once for each pass, so the file must be a regular
one; what a caller keeps of the lines is the caller's: ``read_trace`` keeps each request. Every complaint names the
file, the line, the value and the remedy.
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

logger = logging.getLogger(__name__)

GZIP_MAGIC = b"\x1f\x8b"

MAX_HASH_ID = 2**63
"""Ids become keys of eight bytes."""

MAX_TIME_S = 1e13
"""Behind any calendar. Up to here a float tells milliseconds apart; a much later clock stands still when they pass."""

MAX_WHOLE = 2**63
"""Above any count of tokens; unlimited digits would overflow when they become seconds."""


@dataclass(frozen=True, slots=True)
class Line:
    """One object of a file.

    Attributes:
        path: the file.
        number: which line, from 1.
        values: the object.
    """

    path: Path
    number: int
    values: dict[str, Any]  # Any: JSON, typed by the methods below

    def fail(self, value: object, remedy: str) -> TraceError:
        """Return the error that says what is wrong here."""
        return TraceError(self.path, self.number, value, remedy)

    def seconds(self, name: str, *, unit_s: float = 1.0) -> float:
        """Return a time that is written in units of ``unit_s`` seconds.

        Raises:
            TraceError: it is no number of zero or more, or more than MAX_TIME_S.
        """
        value = self._present(name)
        latest = MAX_TIME_S / unit_s
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= latest:
            remedy = f"{name} must be a number from 0 to {latest:g}, measured from the start of the trace"
            raise self.fail(value, remedy)
        return value * unit_s

    def whole(self, name: str) -> int:
        """Return a whole number of zero or more.

        Raises:
            TraceError: it is none, or has more than 63 bits.
        """
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_WHOLE:
            raise self.fail(value, f"{name} must be a whole number from 0 to 2**63 - 1")
        return value

    def hash_ids(self, name: str = "hash_ids") -> tuple[int, ...]:
        """Return a list of ids.

        Raises:
            TraceError: it is no list of whole numbers from 0 to 2**63 - 1.
        """
        value = self._present(name)
        if not isinstance(value, list):
            raise self.fail(
                value, f"{name} must be a list of whole numbers, one for each block of the prompt"
            )
        for hash_id in value:
            if type(hash_id) is not int or not 0 <= hash_id < MAX_HASH_ID:
                raise self.fail(hash_id, f"each of {name} must be a whole number from 0 to 2**63 - 1")
        return tuple(value)

    def _present(self, name: str) -> Any:  # noqa: ANN401 - JSON; each caller checks
        if name not in self.values:
            known = ", ".join(sorted(self.values)) or "nothing"
            raise self.fail(name, f"this field is missing, the line has {known}; is it another format?")
        return self.values[name]


def read_lines(path: Path, *, may_be_cut: bool = False) -> Iterator[Line]:
    """Yield each object of ``path``, plain or compressed with gzip; blank lines are skipped.

    Args:
        path: the file.
        may_be_cut: whether it may end within a line, as the file of a writer that was killed; that line is left out,
            and the log says so.

    Raises:
        TraceError: the file cannot be read or is no regular one, or a line holds no JSON object.
    """
    for number, text in _read_texts(path, may_be_cut=may_be_cut):
        if text.isspace():
            continue
        try:
            line = Line(path, number, _parse(path, number, text))
        except TraceError:
            if not may_be_cut or text.endswith("\n"):
                raise
            _tell_cut(path, number)
            return
        yield line


def _read_texts(path: Path, *, may_be_cut: bool) -> Iterator[tuple[int, str]]:
    """Yield each line as it stands, with its number from 1; the last one may lack its line feed."""
    if path.exists() and not path.is_file():
        # A pipe gives each line once, and finding the format alone reads the first ones.
        raise TraceError(
            path, None, "no regular file", "is read several times: write the trace to a file first"
        )
    number = 0
    try:
        with path.open("rb") as raw:
            is_zipped = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        opener = gzip.open if is_zipped else open
        with opener(path, "rt", encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                yield number, text
    except OSError as error:
        raise TraceError(
            path, None, error.strerror or str(error), "cannot be read: check the path"
        ) from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        if may_be_cut and isinstance(error, EOFError):
            _tell_cut(path, number + 1)
            return
        remedy = "the file is damaged or cut short behind this line: fetch it again"
        raise TraceError(path, number, str(error), remedy) from error


def _tell_cut(path: Path, number: int) -> None:
    logger.warning("%s ends within line %d: its writer was killed; what stands before is read", path, number)


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:  # Any: JSON
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, number, text.strip(), f"no JSON ({error}): write one object a line") from error
    if not isinstance(values, dict):
        raise TraceError(path, number, values, "must be a JSON object such as {...}")
    return values
