"""The tier's own settings, checked and typed.

It opens no file; whether the file can be made is seen when the tier is built.
"""

from dataclasses import dataclass
from pathlib import Path

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.tiering.kit.disk import parse_direct_io, parse_num_threads
from kvtier.tiering.slab.superblock import SlabGeometry, fit_geometry


@dataclass(frozen=True, slots=True)
class SlabSettings:
    """What the user asked of the tier.

    Attributes:
        path: the file, absolute.
        direct_io: True insists on direct I/O, False avoids it, None takes it where it works.
        num_threads: threads that move blocks, None for as many as suit the file and the rows.
        geometry: what the capacity and the primary's rows make of the file.
    """

    path: Path
    direct_io: bool | None
    num_threads: int | None
    geometry: SlabGeometry


def parse_settings(
    *, path: object, capacity_bytes: object, direct_io: object, num_threads: object, row_bytes: int
) -> SlabSettings:
    """Check the tier's arguments. Pure.

    Args:
        path: text or a path; ``~`` is the home directory.
        capacity_bytes: a number or text such as ``"8GiB"``; the length that the file has at most.
        direct_io: a flag, or ``"auto"``.
        num_threads: from 1 to 128, or None.
        row_bytes: length of a block in the primary tier.

    Raises:
        ConfigError: a value that cannot work.
    """
    return SlabSettings(
        path=_parse_path(path),
        direct_io=parse_direct_io(direct_io),
        num_threads=parse_num_threads(num_threads),
        geometry=_parse_capacity(capacity_bytes, row_bytes),
    )


def _parse_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigError("path", value, "must be the path of a file")
    if "\0" in str(value):
        raise ConfigError("path", value, "must not have a zero byte in it")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError("path", value, f"{error}; give an absolute path") from error
    if not path.is_absolute():
        raise ConfigError("path", str(value), "must be an absolute path, since engines start anywhere")
    return path


def _parse_capacity(value: object, row_bytes: int) -> SlabGeometry:
    geometry = fit_geometry(parse_bytes("capacity_bytes", value), row_bytes)
    if geometry.num_slots < 1:
        least_bytes = SlabGeometry(row_bytes, 1).file_bytes
        remedy = f"a file with one block takes {least_bytes} bytes with its headers; give many times that"
        raise ConfigError("capacity_bytes", value, remedy)
    return geometry
