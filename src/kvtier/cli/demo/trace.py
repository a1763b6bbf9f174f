"""Reads a request trace and turns it into requests of the demo, with scaled lengths.

Requests are served one after another in the order of arrival; the times between them are not replayed. A trace has no
text, only one id per 512 tokens of prompt, and equal ids mean equal content and equal prefix. Each id is replaced by
tokens drawn from a hash of it, so equal ids give equal tokens.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import shake_256
from itertools import islice
from pathlib import Path

from kvtier.cli.demo.conversation import Turn
from kvtier.cli.demo.options import require_at_least
from kvtier.errors import ConfigError
from kvtier.input_files import bounded_lines
from kvtier.redaction import shorten

BLOCK_TOKENS = 512
"""Prompt tokens that one id of a trace stands for."""

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_ms: arrival time, from the start of the trace.
        num_prompt_tokens: length of its prompt.
        num_answer_tokens: length of its answer.
        hash_ids: one id for each ``BLOCK_TOKENS`` tokens of the prompt.
    """

    arrival_ms: float
    num_prompt_tokens: int
    num_answer_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The part of a trace that is served.

    Attributes:
        num_requests: requests from its start.
        scale_ratio: factor for lengths.
        max_answer_tokens: tokens generated for one request, at most.
    """

    num_requests: int
    scale_ratio: float
    max_answer_tokens: int

    def __post_init__(self) -> None:
        require_at_least("--requests", self.num_requests, 1)
        require_at_least("--answer-tokens", self.max_answer_tokens, 1)
        if not 0 < self.scale_ratio <= 1:
            raise ConfigError("--scale", self.scale_ratio, "must be above 0 and at most 1")


def read_trace(path: Path, num_requests: int) -> list[TraceRequest]:
    """Return the first requests of a trace, JSON lines with or without gzip.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not a request.
    """
    try:
        requests = list(islice(_parse_lines(path, _read_lines(path)), num_requests))
    except ConfigError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError("--trace", str(path), f"cannot be read: {error}") from error
    if not requests:
        raise ConfigError("--trace", str(path), "has no request: give a file of JSON lines")
    return requests


def plan_trace(requests: Iterable[TraceRequest], shape: TraceShape) -> list[Turn]:
    """Return one turn per request, in the order of arrival. Pure."""
    ordered = sorted(requests, key=lambda request: request.arrival_ms)
    return [
        Turn(
            label=str(index + 1),
            conversation=index,
            number=1,
            token_ids=tuple(make_prompt(request, index, shape.scale_ratio)),
            num_answer_tokens=min(
                shape.max_answer_tokens, scale_length(request.num_answer_tokens, shape.scale_ratio)
            ),
        )
        for index, request in enumerate(ordered)
    ]


def make_prompt(request: TraceRequest, index: int, scale_ratio: float) -> bytes:
    """Return a prompt of the request's scaled length. Pure.

    Args:
        request: the request.
        index: its number; tokens after the last id are unique to this request.
        scale_ratio: factor for lengths.
    """
    num_block_tokens = scale_length(BLOCK_TOKENS, scale_ratio)
    num_tokens = scale_length(request.num_prompt_tokens, scale_ratio)
    known = b"".join(draw_tokens(f"block {hash_id}", num_block_tokens) for hash_id in request.hash_ids)
    num_missing = max(0, num_tokens - len(known))
    return (known + draw_tokens(f"rest of request {index}", num_missing))[:num_tokens]


def draw_tokens(name: str, num_tokens: int) -> bytes:
    """Return tokens that depend on ``name`` alone; a shorter result is a prefix of a longer one. Pure."""
    return shake_256(name.encode()).digest(num_tokens)


def scale_length(num_tokens: int, scale_ratio: float) -> int:
    """Return a scaled length of at least one token. Pure."""
    return max(1, round(num_tokens * scale_ratio))


def _read_lines(path: Path) -> Iterator[str]:
    if path.exists() and not path.is_file():
        raise ConfigError("--trace", str(path), "is no regular file: write the trace to a file first")
    with path.open("rb") as file:
        is_compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    with gzip.open(path, "rt") if is_compressed else path.open() as lines:
        yield from bounded_lines(lines)


def _parse_lines(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _parse_request(json.loads(line))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            remedy = (
                f"line {number} must be a JSON object with timestamp, input_length, output_length, hash_ids"
            )
            raise ConfigError("--trace", str(path), f"{remedy}: {shorten(error)}") from error


def _parse_request(fields: dict[str, object]) -> TraceRequest:
    hash_ids = fields["hash_ids"]
    lengths = (
        fields["input_length"],
        fields["output_length"],
        *(hash_ids if isinstance(hash_ids, list) else [None]),
    )
    arrival_ms = fields["timestamp"]
    if not isinstance(arrival_ms, int | float):
        raise TypeError(f"timestamp={arrival_ms!r}")
    numbers = [value for value in lengths if isinstance(value, int) and value >= 0]
    if len(numbers) != len(lengths):
        raise ValueError(f"lengths and ids must be whole numbers, got {lengths[:4]}")
    num_prompt_tokens, num_answer_tokens, *ids = numbers
    return TraceRequest(float(arrival_ms), num_prompt_tokens, num_answer_tokens, tuple(ids))
