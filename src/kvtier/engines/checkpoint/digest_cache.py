"""A cache of file digests on disk, so that an unchanged checkpoint is read once and not at every start.

The key of an entry is the file's path, device, inode, size and both of its times, so a file that was written again has
another key. "Racily clean" files, as Git calls them, are left out: one that changed within ``MIN_AGE_NS`` before it was
read could change again without a new time. A cache that is damaged, or that another user could have written, is
ignored.
"""

import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvtier.engines.checkpoint.files import CheckpointFile
from kvtier.errors import MissingExtraError

try:
    from blake3 import blake3
except ImportError as error:
    raise MissingExtraError("blake3", "vllm") from error

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "KVTIER_CACHE_DIR"
"""Environment variable with the folder of the cache; an empty value disables the cache."""

CACHE_NAME = "weight-digests-1.json"
"""The number changes with the way in which digests are made."""

MAX_ENTRIES = 4096
"""Maximum of entries, about half a megabyte; the least recently used are dropped first."""

MAX_CACHE_BYTES = 1 << 20
"""A longer file is not a cache that kvtier wrote."""

MIN_AGE_NS = 2_000_000_000
"""How long a file must have been unchanged before it was read. A time shorter than the coarsest clock of a file system
(two seconds, on FAT) trusts a file that changed twice within one tick; a longer one only reads a new file once more."""


def default_cache_path() -> Path | None:
    """Return where the cache is: in $KVTIER_CACHE_DIR, else $XDG_CACHE_HOME/kvtier, else ~/.cache/kvtier."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() / CACHE_NAME if chosen else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as containers have
        return None
    return folder / "kvtier" / CACHE_NAME


class DigestCache:
    """File digests by path and state. Used from one thread.

    Args:
        path: the file of the cache; None disables it.
        now_ns: the clock that file times are compared with.
    """

    def __init__(self, path: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns

    def find(self, files: Iterable[CheckpointFile]) -> dict[str, bytes]:
        """Return the cached digests, by the file's name in the checkpoint."""
        known = self._read(logging.WARNING)
        return {file.name: known[key] for file in files if (key := _key_of(file)) in known}

    def now_ns(self) -> int:
        """Return the time, for ``add``."""
        return self._now_ns()

    def add(self, digests: Iterable[tuple[CheckpointFile, bytes]], read_since_ns: int) -> None:
        """Add digests of files that were read after ``read_since_ns``; a cache that cannot be written is a warning."""
        if self._path is None:
            return
        settled = {
            _key_of(file): digest
            for file, digest in digests
            if file.stamp.ctime_ns + MIN_AGE_NS <= read_since_ns
        }
        if not settled:
            return
        # Another process may have written meanwhile: keep its entries. An entry lost to a race is made again.
        kept = {
            key: digest for key, digest in self._read(logging.DEBUG).items() if key not in settled
        } | settled
        try:
            _replace(self._path, _encode(dict(list(kept.items())[-MAX_ENTRIES:])))
        except OSError as error:
            logger.warning(
                "%s cannot be written, so the next start reads all weights again: %s", self._path, error
            )

    def _read(self, level: int) -> dict[str, bytes]:
        if self._path is None:
            return {}
        try:
            entries = _decode(_read_private(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.log(level, "%s is ignored, so weights are read again: %s", self._path, error)
            return {}
        return entries


def _key_of(file: CheckpointFile) -> str:
    name: str = blake3(os.fsencode(file.path) + b"\0" + repr(tuple(file.stamp)).encode()).hexdigest()
    return name


def _encode(entries: dict[str, bytes]) -> bytes:
    body = json.dumps({key: digest.hex() for key, digest in entries.items()})
    return json.dumps({"checksum": blake3(body.encode()).hexdigest(), "digests": body}).encode()


def _decode(content: bytes) -> dict[str, bytes]:
    """Return the entries.

    Raises:
        ValueError: the content is damaged, or no cache.
    """
    document = json.loads(content)
    try:
        body = document["digests"].encode()
        is_intact = document["checksum"] == blake3(body).hexdigest()
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("it is not a cache of digests") from error
    if not is_intact:
        raise ValueError("its checksum is wrong")
    return {key: bytes.fromhex(digest) for key, digest in json.loads(body).items()}


def _read_private(path: Path) -> bytes:
    """Return the bytes of a file that only this user can have written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it belongs to another user, others may write it, or it is too long.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("it must be a regular file of this user with mode 0600")
        if status.st_size > MAX_CACHE_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, more than {MAX_CACHE_BYTES}")
        return file.read(MAX_CACHE_BYTES)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
