"""Keeps what native libraries write to standard error out of a table.

It hides nothing of Python's: exceptions are printed after the block.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


@contextmanager
def native_noise_hidden() -> Iterator[None]:
    """Let the process's standard error go nowhere as long as the block.

    Mooncake's library (2026-11, 0.3.13.post1) says "Local segment descriptor not found" as an error whenever a client
    joins a store, and more when its master is gone; its log level can be lowered no further than errors.
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
