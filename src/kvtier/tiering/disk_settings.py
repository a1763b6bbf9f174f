"""What tiers on a disk ask of their user in the same words: how many threads, and whether with direct I/O.

It opens nothing; whether direct I/O works is seen when a tier is built.
"""

from kvtier.config import SettingsReader
from kvtier.errors import ConfigError

DEFAULT_NUM_THREADS = 4
"""Threads that move blocks. Fewer leave a fast disk idle between system calls; more wait for the same device,
for the same cores and, with small blocks, for the interpreter."""

DIRECT_NUM_THREADS = 8
LARGE_ROW_BYTES = 512 * 2**10
"""The same for direct I/O on rows of at least this size: such threads wait for the device and little else, so more
of them keep it busy. With smaller rows they would wait for the interpreter."""

MAX_THREADS = 128


def parse_num_threads(value: object) -> int | None:
    """Return a number of threads; None leaves it to ``plan_num_threads``. Pure.

    Raises:
        ConfigError: neither None nor a whole number from 1 to 128.
    """
    if value is None:
        return None
    threads = SettingsReader({"num_threads": value}).whole("num_threads", DEFAULT_NUM_THREADS, minimum=1)
    if threads > MAX_THREADS:
        raise ConfigError("num_threads", threads, f"must be at most {MAX_THREADS}")
    return threads


def plan_num_threads(num_threads: int | None, row_bytes: int, *, has_direct_io: bool) -> int:
    """Return how many threads move rows of ``row_bytes`` bytes, when the user asked for ``num_threads``. Pure."""
    if num_threads is not None:
        return num_threads
    return DIRECT_NUM_THREADS if has_direct_io and row_bytes >= LARGE_ROW_BYTES else DEFAULT_NUM_THREADS


def parse_direct_io(value: object) -> bool | None:
    """Return whether direct I/O is insisted on or avoided, None for ``"auto"``: taken where it works. Pure.

    Raises:
        ConfigError: neither a flag nor ``"auto"``.
    """
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ConfigError("direct_io", value, 'must be true, false or "auto"')
    return value
