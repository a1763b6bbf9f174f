"""Which files of a model or adapter decide what it computes, and whether one of them has changed.

Every file counts except those known not to: a list of what counts would miss what the next format adds. Left out are
tokenizers (blocks are named by token ids), documents, the configuration (its effective values are part of the
namespace) and folders that no engine loads. A file too many costs a miss; a file too few gives wrong answers.
"""

import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import FingerprintError

WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".npy", ".msgpack", ".h5", ".ckpt", ".tensors",
)  # fmt: skip
"""Endings of files that hold weights. A folder without any cannot be named by its weights."""

IRRELEVANT_WEIGHTS = re.compile(
    r"(training_args|optimizer)\.bin|(optimizer|scheduler|scaler)\.pt|rng_state.*\.pth"
)
"""Files that training leaves beside the weights; engines do not load them."""

IRRELEVANT_FILES = re.compile(
    r"""
    \..*                                            # .gitattributes
    | config\.json | generation_config\.json        # effective values, and how tokens are drawn
    | (tokenizer|vocab|special_tokens_map|added_tokens|chat_template|tekken).* | merges\.txt | .*\.jinja
    | .*\.(md|rst|pdf|png|jpg|jpeg|gif|svg|log|lock) | (license|notice|readme|use_policy)(\..*)?
    | trainer_state\.json
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Full names of other files that change no block: their bytes reach an engine in other ways, or not at all."""

IRRELEVANT_FOLDERS = re.compile(
    r"""
    \..* | __pycache__ | original | metal | onnx | openvino | coreml
    | runs | logs | (checkpoint|global_step)[-_]?\d+
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Folders that no engine reads: copies of the same weights in other formats, and what training leaves behind."""

REMEDY = "kvtier names a model by every byte of its files: make it readable and leave it unchanged during the start"


START_SLACK_NS = 50_000_000
"""Tolerance for the ticks of the kernel's clocks: a file written just before the process began is not younger."""


class FileStamp(NamedTuple):
    """The state of a file, which differs after a write; both times, because the first can be set back."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint.

    Attributes:
        name: its path inside the checkpoint; only the ending of its name where the checkpoint is one file.
        path: where its bytes are, links resolved.
        stamp: its state when the checkpoint was listed.
    """

    name: str
    path: Path
    stamp: FileStamp


def find_files(place: Path) -> tuple[CheckpointFile, ...]:
    """Return the files in a folder, or the one file, that decide what the model computes, sorted by name.

    Raises:
        FingerprintError: a file or folder cannot be read.
    """
    if place.is_file():
        return (_describe(place.suffix, place),)
    paths: list[Path] = []
    for folder, folder_names, file_names in os.walk(place, onerror=_refuse, followlinks=True):
        folder_names[:] = [name for name in folder_names if not IRRELEVANT_FOLDERS.fullmatch(name)]
        paths += [Path(folder, name) for name in file_names if _is_relevant(name)]
    described = (_describe(path.relative_to(place).as_posix(), path) for path in paths)
    return tuple(sorted(described, key=lambda file: file.name))


def has_weights(files: tuple[CheckpointFile, ...]) -> bool:
    """Return whether any of the files holds weights. Pure."""
    return any(file.name.endswith(WEIGHT_SUFFIXES) for file in files)


def require_unchanged(files: Iterable[CheckpointFile]) -> None:
    """Refuse files that have changed since they were listed.

    Raises:
        FingerprintError: one has changed or is gone; it names the first.
    """
    for file in files:
        try:
            stamp = stamp_of(file.path.stat())
        except OSError as error:
            raise FingerprintError(file.path, error.strerror or str(error), REMEDY) from error
        if stamp != file.stamp:
            raise FingerprintError(file.path, "it changed while the engine started", REMEDY)


def require_started_after(files: Iterable[CheckpointFile]) -> None:
    """Refuse files that have changed since this process began: what it has loaded may be older.

    Raises:
        FingerprintError: one has changed; it names the first.
    """
    began_ns = process_start_ns() + START_SLACK_NS
    for file in files:
        if file.stamp.ctime_ns > began_ns:
            reason = "it changed after the engine had started, so it may differ from what was loaded"
            raise FingerprintError(file.path, reason, "start the engine again")


def process_start_ns() -> int:
    """Return the start of this process on the clock of file times."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


def stamp_of(status: os.stat_result) -> FileStamp:
    """Return the state of a file. Pure."""
    return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _is_relevant(name: str) -> bool:
    pattern = IRRELEVANT_WEIGHTS if name.endswith(WEIGHT_SUFFIXES) else IRRELEVANT_FILES
    return pattern.fullmatch(name) is None


def _describe(name: str, path: Path) -> CheckpointFile:
    try:
        resolved = path.resolve(strict=True)
        status = resolved.stat()
    except OSError as error:
        raise FingerprintError(path, error.strerror or str(error), REMEDY) from error
    if not stat.S_ISREG(status.st_mode):
        raise FingerprintError(path, "it is not a regular file", REMEDY)
    return CheckpointFile(name, resolved, stamp_of(status))


def _refuse(error: OSError) -> None:
    raise FingerprintError(error.filename, error.strerror or str(error), REMEDY) from error
