"""Files that a user names: read within a limit, and refused in one line when they are not what they should be.

A path may be a pipe that nothing writes to, a device without an end, or a directory; a file may be larger than memory,
no text, or JSON nested deeper than the interpreter's stack.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from kvtier.errors import ConfigError

MAX_SETTINGS_BYTES = 16 * 2**20
"""Bytes of a file with settings, prices or a model's configuration: a thousand times what one has. A larger one is
something else, and reading it would only take memory."""

MAX_LINE_CHARS = 64 * 2**20
"""Characters of one line of a trace: a prompt of some million token ids. A file without line ends would otherwise be
read into memory as a whole."""


def read_text_file(setting: str, path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Return the text of a regular file.

    Args:
        setting: which names it, for errors.
        path: the file.
        max_bytes: its length at most.

    Raises:
        ConfigError: it cannot be read, is no regular file, too long, or no UTF-8.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(max_bytes + 1) if is_regular else b""
    except OSError as error:
        raise ConfigError(setting, str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte, half a surrogate pair
        raise ConfigError(setting, str(path), "cannot be the name of a file") from error
    if not is_regular:
        raise ConfigError(setting, str(path), "is no regular file: write it to a file first")
    if len(content) > max_bytes:
        raise ConfigError(setting, str(path), f"has more than {max_bytes} bytes: is it the right file?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(setting, str(path), f"is no text in UTF-8 (byte {error.start})") from error


def is_file(path: Path) -> bool:
    """Return whether there is such a file; a name that no file can have is none."""
    return _holds(path.is_file)


def is_there(path: Path) -> bool:
    """Return whether there is anything of that name; a name that nothing can have is not."""
    return _holds(path.exists)


def is_dir(path: Path) -> bool:
    """Return whether there is such a directory; a name that none can have is none."""
    return _holds(path.is_dir)


def _holds(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except (OSError, ValueError):  # too long, a zero byte
        return False


def parse_json(setting: str, name: str, text: str, remedy: str) -> object:
    """Return what JSON says. Pure.

    Args:
        setting: which gives it, for errors.
        name: of the file that has it, or the text itself.
        text: the JSON.
        remedy: what it should be.

    Raises:
        ConfigError: it is none.
    """
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        # Without its cause, which holds the whole text, and that may be settings with a password.
        raise ConfigError(setting, name, f"is no JSON ({reason}): {remedy}") from None
    return found


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a text file with their ends.

    Raises:
        ValueError: a line is longer than ``MAX_LINE_CHARS``.
    """
    while line := file.readline(MAX_LINE_CHARS):
        if len(line) == MAX_LINE_CHARS and not line.endswith("\n"):
            raise ValueError(f"a line has more than {MAX_LINE_CHARS} characters")
        yield line
