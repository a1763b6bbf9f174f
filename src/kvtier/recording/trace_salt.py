"""Ids of blocks in a trace, which reveal nothing of their content.

A block's name is a hash of its tokens, the same in all engines of a kind, so a guess of the prompt gives the name. An
id is therefore a keyed hash (BLAKE2b) of the name. Equal names have equal ids under one secret only. The secret is
drawn at the start and never written, or read from a file so that the recordings of several engines agree.
"""

import os
import stat
from hashlib import blake2b
from pathlib import Path

from kvtier.errors import ConfigError

SECRET_BYTES = 32
"""As long as the digests of blocks; 2**256 secrets cannot be searched."""

MIN_FILE_BYTES = 16
"""A shorter secret could be searched."""

MAX_FILE_BYTES = 4096
"""A longer file is probably a wrong path."""

ID_BYTES = 8
ID_BITS = 63
"""Ids are below 2**63. With ten million blocks two share an id in one of 200,000 recordings."""


class TraceSalt:
    """A secret, and the ids that it gives.

    Args:
        secret: 16 to 64 bytes; keep it from readers of the trace.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def id_of(self, name: bytes) -> int:
        """Return the id of a block's name, from 0 to 2**63 - 1. Pure."""
        digest = blake2b(name, key=self._secret, digest_size=ID_BYTES, person=b"kvtier.trace").digest()
        return int.from_bytes(digest, "big") >> (8 * ID_BYTES - ID_BITS)

    def __repr__(self) -> str:
        return "TraceSalt(...)"


def draw_salt() -> TraceSalt:
    """Return a random salt, unique to this recording."""
    return TraceSalt(os.urandom(SECRET_BYTES))


def read_salt_file(path: Path) -> TraceSalt:
    """Return the salt that a file holds.

    Args:
        path: a file of 16 to 4096 bytes that only its owner may read.

    Raises:
        ConfigError: the file cannot be read, others may read it, or its size is wrong.
    """
    setting = "record_salt_file"
    make = f"make one: (umask 077; head -c {SECRET_BYTES} /dev/urandom > {path})"
    try:
        # O_NONBLOCK: opening a pipe without a writer would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(setting, str(path), f"cannot be read ({error.strerror}): {make}") from error
    if stat.S_IMODE(mode) & 0o077:
        remedy = f"others may read or change it (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
        raise ConfigError(setting, str(path), remedy)
    if not MIN_FILE_BYTES <= len(content) <= MAX_FILE_BYTES:
        limits = f"must be a file of {MIN_FILE_BYTES} to {MAX_FILE_BYTES} bytes"
        raise ConfigError(setting, str(path), f"{limits}: {make}")
    return TraceSalt(blake2b(content, digest_size=SECRET_BYTES).digest())
