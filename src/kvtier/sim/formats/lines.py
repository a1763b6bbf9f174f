"""Reads a file of JSON objects, one per line or in one array, and the typed fields of such an object.

One line is in memory at a time, or the text of the array. The file is opened once for each pass, so it must be a
regular file. Every error names the file, the line, the value and the remedy.
"""

import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvtier.errors import MissingExtraError, TraceError
from kvtier.input_files import bounded_lines
from kvtier.redaction import MAX_SHOWN_CHARS, shorten

try:
    from compression import zstd  # Python 3.14
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

logger = logging.getLogger(__name__)

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

ZSTD_NAME = zstd.__name__ if zstd else "backports.zstd"
DAMAGES = (EOFError, zlib.error, ValueError) + ((zstd.ZstdError,) if zstd else ())
"""What reading a damaged file raises."""

ARRAY = re.compile(r"\s*\[\s*(?:[\[{\]]|$)")
"""The beginning of an array of objects; a line that is a list begins with a number."""

GAP = re.compile(r"\s*,?\s*")

MAX_ARRAY_CHARS = 2**30
"""Characters of a file that is one array, because all of it is in memory. One object per line has no such limit."""

BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
"""Names of the values of a line that is a list: a batch of vLLM's events, as vLLM sends it."""

LENGTHS_ONLY = (
    "has no ids of blocks (hash_ids): which prompts begin alike decides what a cache finds, and lengths alone do not "
    "say it. Give a trace with hash_ids, or record one with kvtier record"
)

MIN_HASH_ID, MAX_HASH_ID = -(2**63), 2**64
"""Hashes of 64 bits, with a sign or without."""

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

    def hash_ids(self, name: str = "hash_ids") -> list[int | str]:
        """Return a list of ids.

        Raises:
            TraceError: it is not a list of texts or integers of 64 bits.
        """
        value = self._present(name)
        if not isinstance(value, list):
            raise self.fail(value, f"{name} must be a list of ids, one for each block of the prompt")
        for hash_id in value:
            if type(hash_id) is not str and (
                type(hash_id) is not int or not MIN_HASH_ID <= hash_id < MAX_HASH_ID
            ):
                raise self.fail(hash_id, f"each of {name} must be an integer of 64 bits or text")
        return value

    def _present(self, name: str) -> Any:  # noqa: ANN401 - JSON; each caller checks
        if name not in self.values:
            known = shorten(", ".join(sorted(self.values)) or "nothing").strip("'")
            raise self.fail(name, f"this field is missing, the line has {known}; is it another format?")
        return self.values[name]


def read_lines(path: Path, *, may_be_cut: bool = False) -> Iterator[Line]:
    """Yield each object of ``path``, plain or compressed with gzip or zstd; blank lines are skipped.

    Args:
        path: the file.
        may_be_cut: whether it may end within a line, like the file of a killed writer; that line is skipped with a
            warning.

    Raises:
        TraceError: the file cannot be read or is not a regular one, or a line is not a JSON object.
        MissingExtraError: it is compressed with zstd, and the library is not installed.
    """
    texts, is_first = _read_texts(path, may_be_cut=may_be_cut), True
    for number, text in texts:
        if text.isspace():
            continue
        if is_first and ARRAY.match(text):
            yield from _read_array(path, number, text, texts)
            return
        try:
            line = Line(path, number, _parse(path, number, text, is_first=is_first))
        except TraceError:
            if not may_be_cut or text.endswith("\n"):
                raise
            _warn_cut(path, number)
            return
        is_first = False
        yield line


def _read_array(path: Path, number: int, begin: str, rest: Iterator[tuple[int, str]]) -> Iterator[Line]:
    """Yield each object of an array that begins with the text ``begin`` in line ``number``."""
    parts, num_chars = [begin], len(begin)
    for _, part in rest:
        parts.append(part)
        num_chars += len(part)
        if num_chars > MAX_ARRAY_CHARS:
            raise TraceError(
                path, None, "a long array", f"over {MAX_ARRAY_CHARS} characters: write one object per line"
            )
    text, decoder = "".join(parts), json.JSONDecoder()
    after = text.index("[") + 1
    while not text.startswith("]", start := _skip_gap(text, after)):
        number += text.count("\n", after, start)
        try:
            values, after = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise _not_json(path, number, text[start : start + MAX_SHOWN_CHARS], error) from error
        yield Line(path, number, _as_object(path, number, values))
        number += text.count("\n", start, after)
    if tail := text[start + 1 :].strip():
        raise TraceError(
            path, None, tail[:MAX_SHOWN_CHARS], "follows the array: give one array, or one object per line"
        )


def _skip_gap(text: str, start: int) -> int:
    gap = GAP.match(text, start)
    return gap.end() if gap else start


def _read_texts(path: Path, *, may_be_cut: bool) -> Iterator[tuple[int, str]]:
    """Yield each line unchanged, with its number from 1; the last one may lack its line feed."""
    if path.exists() and not path.is_file():
        # A pipe gives each line once, and detecting the format already reads the first ones.
        raise TraceError(
            path, None, "not a regular file", "is read several times: write the trace to a file first"
        )
    number = 0
    try:
        with _open(path) as file:
            for number, text in enumerate(bounded_lines(file), start=1):
                yield number, text
    except OSError as error:
        raise TraceError(path, None, None, f"cannot be read ({error.strerror or error})") from error
    except DAMAGES as error:
        if may_be_cut and isinstance(error, EOFError):
            _warn_cut(path, number + 1)
            return
        remedy = "damaged or truncated after this line, or not text with one JSON object per line: fetch or convert it"
        raise TraceError(path, number, str(error), remedy) from error


def _open(path: Path) -> TextIO:
    """Open a file as text, plain or compressed.

    Raises:
        MissingExtraError: it is compressed with zstd, and the library is not installed.
    """
    with path.open("rb") as raw:
        magic = raw.read(len(ZSTD_MAGIC))
    encoding = "utf-8-sig"  # Windows begins a text with a mark of the byte order
    if magic == ZSTD_MAGIC:
        if zstd is None:
            raise MissingExtraError("backports.zstd", "zstd")
        unpacked: TextIO = zstd.open(path, "rt", encoding=encoding)
        return unpacked
    if magic.startswith(GZIP_MAGIC):
        return gzip.open(path, "rt", encoding=encoding)
    return path.open(encoding=encoding)


def _warn_cut(path: Path, number: int) -> None:
    cause = "it is still being written, or its writer was killed; the lines before are read"
    logger.warning("%s ends within line %d: %s", path, number, cause)


def _parse(path: Path, number: int, text: str, *, is_first: bool) -> dict[str, Any]:  # Any: JSON
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        if is_first and "," in text and text.lstrip()[:1] not in "{[":
            raise TraceError(
                path, number, text[:MAX_SHOWN_CHARS].strip(), f"a CSV file {LENGTHS_ONLY}"
            ) from error
        raise _not_json(path, number, text, error) from error
    return _as_object(path, number, values)


def _as_object(path: Path, number: int, values: object) -> dict[str, Any]:  # Any: JSON
    if isinstance(values, list) and len(values) > 1 and isinstance(values[1], list):
        return dict(zip(BATCH_FIELDS, values, strict=False))
    if not isinstance(values, dict):
        raise TraceError(path, number, values, "must be a JSON object such as {...}")
    return values


def _not_json(path: Path, number: int, text: str, error: Exception) -> TraceError:
    return TraceError(
        path, number, text[:MAX_SHOWN_CHARS].strip(), f"not JSON ({error}): write one object per line"
    )
