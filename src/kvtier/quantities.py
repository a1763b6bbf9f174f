"""Values as people write them: sizes and times to live read into numbers, and what is text at all."""

import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import SupportsIndex

from kvtier.errors import ConfigError

BYTE_UNITS = {"": 1, "B": 1}
BYTE_UNITS |= {"K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6}
BYTE_UNITS |= {"G": 10**9, "GB": 10**9, "T": 10**12, "TB": 10**12}
BYTE_UNITS |= {"KI": 2**10, "KIB": 2**10, "MI": 2**20, "MIB": 2**20}
BYTE_UNITS |= {"GI": 2**30, "GIB": 2**30, "TI": 2**40, "TIB": 2**40}

MAX_BYTES = 2**63 - 1
"""The largest length of a file and distance of pointers on the systems that kvtier runs on."""

SIZE_FORMS = (
    'must be a whole number of bytes from 1 to 2^63 - 1, or text with a unit: "8GiB" or "8Gi" '
    '(1024-based: Ki, Mi, Gi, Ti), "8GB" or "8G" (1000-based: K, M, G, T)'
)

MIN_PLAIN_BYTES = 1024
"""The least capacity that may be written without a unit. No block is so small, and who writes 32 means GiB."""

MIN_TTL_S = 1.0
"""The shortest time to live. A file system keeps times to two seconds at worst, so less would mean nothing there."""

MAX_TTL_S = 10 * 366 * 86_400.0
"""The longest time to live, ten years. More is no limit, and would end beyond the times that a file system can hold."""

MAX_DEPTH = 64
"""Levels of lists and mappings that settings may have; deeper ones have no meaning, and would exhaust the stack."""

MAX_SIZE_CHARS = 80
"""Characters of a refused size that a message repeats."""


def parse_ttl(name: str, value: object) -> float:
    """Return a time to live in seconds.

    Raises:
        ConfigError: it is no finite number of seconds from MIN_TTL_S to MAX_TTL_S.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isinstance(value, int | float) or not MIN_TTL_S <= value <= MAX_TTL_S:
        remedy = f"must be a number of seconds from {MIN_TTL_S:g} to {MAX_TTL_S:g}; leave it out for no limit"
        raise ConfigError(name, value, remedy, max_value_chars=MAX_SIZE_CHARS)
    return float(value)


def parse_bytes(name: str, value: object, *, also: str = "") -> int:
    """Return ``value`` as a number of bytes.

    Args:
        name: the setting, for the message.
        value: a whole number, or text with a unit in any case such as ``"64MiB"``, ``"64Mi"``, ``"2 GB"`` or ``"2G"``.
        also: the end of the message: what else the setting takes.

    Raises:
        ConfigError: it is neither, less than one byte or more than MAX_BYTES.
    """
    num_bytes = None if isinstance(value, bool) else _count_bytes(value)
    if num_bytes is None or not 1 <= num_bytes <= MAX_BYTES:
        raise ConfigError(name, value, SIZE_FORMS + also, max_value_chars=MAX_SIZE_CHARS)
    return num_bytes


def parse_capacity(name: str, value: object, *, also: str = "") -> int:
    """Return how much memory or disk something may take, as ``parse_bytes``.

    Raises:
        ConfigError: as ``parse_bytes``, or it is a bare number that only makes sense with a unit.
    """
    num_bytes = parse_bytes(name, value, also=also)
    if num_bytes < MIN_PLAIN_BYTES and not str(value).strip()[-1:].isalpha():
        raise ConfigError(
            name, value, f'is {num_bytes} bytes, less than any block: did you mean "{num_bytes}GiB"?'
        )
    return num_bytes


def require_text(name: str, value: str) -> str:
    """Return ``value`` if it can be encoded, so that it can name a file, a host or a model.

    Raises:
        ConfigError: it has a zero byte or half of a surrogate pair in it.
    """
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(name, value, "must be text: no zero byte and no half of a surrogate pair")
    return value


def require_texts(name: str, value: object, depth: int = MAX_DEPTH) -> None:
    """Check that every name and text in what a user wrote is text.

    Args:
        name: the setting, for the message.
        value: of any type; lists and mappings are searched.
        depth: levels that are searched.

    Raises:
        ConfigError: one is not, or the value is nested too deep.
    """
    if not depth:
        raise ConfigError(name, type(value).__name__, f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        require_text(name, value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str) or not key:
                remedy = "is no name of a setting: a name is a text of at least one character"
                raise ConfigError(name, key, remedy)
            require_texts(require_text(name, key), one, depth - 1)
    elif isinstance(value, list | tuple):
        for one in value:
            require_texts(name, one, depth - 1)


def size_in_words(num_bytes: float) -> str:
    """Return a size in binary units, for people. Pure."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _count_bytes(value: object) -> int | None:
    if not isinstance(value, str | float):
        return operator.index(value) if isinstance(value, SupportsIndex) else None
    # So many digits are more than any size has, and few enough for whole numbers of Python.
    found = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z]{0,3})\s*", str(value), re.ASCII)
    unit = BYTE_UNITS.get(found[2].upper()) if found else None
    return None if found is None or unit is None else int(Fraction(found[1]) * unit)
