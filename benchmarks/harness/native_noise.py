"""Keeps output of native libraries on standard error out of a table.

Python's exceptions are printed after the block.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


@contextmanager
def native_noise_hidden() -> Iterator[None]:
    """Discard the process's standard error during the block.

    Mooncake's library (2026-11, 0.3.13.post1) logs the error "Local segment descriptor not found" whenever a client
    joins a store, and more after the end of its master; its log level cannot be lowered below errors.
    """
    kept = os.dup(STDERR)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDERR)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)
