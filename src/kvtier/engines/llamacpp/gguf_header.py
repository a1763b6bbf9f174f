"""The metadata at the beginning of a GGUF file: what of it decides how conversations are cut.

Source: the GGUF specification, version 3, in llama.cpp's ggml repository.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from kvtier.errors import FingerprintError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format for struct."""

STRING, ARRAY = 8, 9

MAX_COUNT = 1 << 32
"""More values, or characters, than any file has."""

LENGTH_DEPENDENT_ROPE = b"rope_factors_long"
"""Name of the tensor of models whose RoPE depends on the length of the context."""

MAX_HEADER_BYTES = 64 << 20
"""Metadata and names of tensors lie within; vocabularies are the largest part of it."""


def read_header(path: Path) -> Mapping[str, object]:
    """Return the metadata of a GGUF file, without arrays.

    Raises:
        FingerprintError: it cannot be read, or is no GGUF file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise FingerprintError(
                    path, "it is no GGUF file", "give the model that llama-server has loaded"
                )
            return _read_values(data)
    except (OSError, ValueError, struct.error, UnicodeDecodeError, IndexError) as error:
        raise FingerprintError(
            path, f"its metadata cannot be read: {error}", "give a whole GGUF file"
        ) from error


def find_window(header: Mapping[str, object]) -> int | None:
    """Return the tokens of the model's sliding window; None where it has none. Pure."""
    value = header.get(f"{header.get('general.architecture')}.attention.sliding_window")
    return value if isinstance(value, int) and value > 0 else None


def depends_on_length(path: Path) -> bool:
    """Return whether the model's RoPE depends on the length of the context.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(LENGTH_DEPENDENT_ROPE, 0, MAX_HEADER_BYTES) >= 0


def _read_values(data: mmap.mmap) -> dict[str, object]:
    _, _, num_values = struct.unpack_from("<IQQ", data, 4)
    offset, values = 24, dict[str, object]()
    for _ in range(min(num_values, MAX_COUNT)):
        name, offset = _read_string(data, offset)
        (kind,) = struct.unpack_from("<I", data, offset)
        value, offset = _read_value(data, kind, offset + 4)
        if value is not None:
            values[name] = value
    return values


def _read_value(data: mmap.mmap, kind: int, offset: int) -> tuple[object, int]:
    if kind == STRING:
        return _read_string(data, offset)
    if kind == ARRAY:
        return None, _skip_array(data, offset)
    if kind not in SCALARS:
        raise ValueError(f"a value of type {kind}")
    (value,) = struct.unpack_from("<" + SCALARS[kind], data, offset)
    return value, offset + struct.calcsize(SCALARS[kind])


def _read_string(data: mmap.mmap, offset: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", data, offset)
    if size > len(data) - offset:
        raise ValueError(f"a text of {size} bytes")
    return data[offset + 8 : offset + 8 + size].decode(), offset + 8 + size


def _skip_array(data: mmap.mmap, offset: int) -> int:
    kind, count = struct.unpack_from("<IQ", data, offset)
    offset += 12
    if kind in SCALARS:
        return offset + struct.calcsize(SCALARS[kind]) * int(count)
    if kind not in (STRING, ARRAY):
        raise ValueError(f"an array of type {kind}")
    for _ in range(min(count, MAX_COUNT)):
        if kind == ARRAY:
            offset = _skip_array(data, offset)
        else:
            (size,) = struct.unpack_from("<Q", data, offset)
            offset += 8 + int(size)
    return offset
