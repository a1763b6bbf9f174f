"""The tier's own settings, checked and typed.

It opens no file; whether the directory can be written is seen when the tier is built.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import SettingsReader, parse_bytes
from kvtier.errors import ConfigError
from kvtier.tiering.kit.disk import DEFAULT_NUM_THREADS, parse_direct_io, parse_num_threads
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.threaded_tier import DEFAULT_NEGATIVE_TTL_S

DEFAULT_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class FSSettings:
    """What the user asked of the tier.

    Attributes:
        root_dir: the directory, absolute.
        capacity_bytes: the most that may be in it, over all namespaces and instances.
        shared: whether blocks of other processes are looked for on the disk.
        negative_ttl_s: seconds for which "not there" is believed.
        file_mode: permissions of files.
        direct_io: True insists on direct I/O, False avoids it, None takes it where it works.
        num_threads: threads that move blocks, None leaves it to the kind of I/O.
        block_bytes: length of a block's file, which is given and not asked for.
    """

    root_dir: Path
    capacity_bytes: int
    shared: bool
    negative_ttl_s: float
    file_mode: int
    direct_io: bool | None
    num_threads: int | None
    block_bytes: int


def parse_settings(
    *,
    root_dir: object,
    capacity_bytes: object,
    shared: object,
    negative_ttl_s: object,
    file_mode: object,
    direct_io: object,
    num_threads: object,
    row_bytes: int,
) -> FSSettings:
    """Check the tier's arguments. Pure.

    Args:
        root_dir: text or a path; ``~`` is the home directory.
        capacity_bytes: a number or text such as ``"8GiB"``.
        shared: a flag.
        negative_ttl_s: seconds.
        file_mode: a number, or octal text such as ``"0660"``.
        direct_io: a flag, or ``"auto"``.
        num_threads: from 1 to 128, or None.
        row_bytes: length of a block in the primary tier.

    Raises:
        ConfigError: a value that cannot work.
    """
    read = SettingsReader({"shared": shared, "negative_ttl_s": negative_ttl_s})
    block_bytes = HEADER_PAGE_BYTES + row_bytes
    return FSSettings(
        root_dir=_parse_root(root_dir),
        capacity_bytes=_parse_capacity(capacity_bytes, block_bytes),
        shared=read.flag("shared", default=True),
        negative_ttl_s=read.seconds("negative_ttl_s", DEFAULT_NEGATIVE_TTL_S),
        file_mode=_parse_file_mode(file_mode),
        direct_io=parse_direct_io(direct_io),
        num_threads=parse_num_threads(num_threads),
        block_bytes=block_bytes,
    )


def plan_num_store_threads(settings: FSSettings, num_cores: int, *, has_direct_io: bool) -> int | None:
    """Return how many of the threads may store at the same time, None for each of them. Pure.

    Through the page cache a store is a copy and a checksum until the kernel makes writers wait: more threads than
    cores take turns, and take the interpreter's lock and the cores from the engine more often.
    """
    if has_direct_io or settings.num_threads is not None:
        return None
    return min(DEFAULT_NUM_THREADS, num_cores)


def _parse_root(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigError("root_dir", value, "must be the path of a directory")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError("root_dir", value, f"{error}; give an absolute path") from error
    if not path.is_absolute():
        raise ConfigError("root_dir", str(value), "must be an absolute path, since engines start anywhere")
    return path


def _parse_capacity(value: object, block_bytes: int) -> int:
    capacity_bytes = parse_bytes("capacity_bytes", value)
    if capacity_bytes < block_bytes:
        remedy = f"one block takes {block_bytes} bytes with its header; give many times that"
        raise ConfigError("capacity_bytes", value, remedy)
    return capacity_bytes


def _parse_file_mode(value: object) -> int:
    is_octal_text = isinstance(value, str) and re.fullmatch(r"(0o|0)?[0-7]{3}", value)
    mode = int(value.removeprefix("0o"), 8) if is_octal_text and isinstance(value, str) else value
    if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o666 or mode & 0o600 != 0o600:
        remedy = 'must let the owner read and write and nobody execute, for example "0600" or "0660"'
        raise ConfigError("file_mode", value, remedy)
    return mode
