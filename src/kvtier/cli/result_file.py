"""A file that a command writes its results to. It is tried before there are any, so that a wrong path costs no work."""

from pathlib import Path

from kvtier.errors import ConfigError


def check_writable(option: str, path: Path) -> None:
    """Open the file before there are results.

    Raises:
        ConfigError: it cannot be written. What it holds stays until there are results.
    """
    try:
        path.open("a").close()
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}): give a file in an existing directory"
        raise ConfigError(option, str(path), remedy) from error


def write_result(option: str, path: Path, text: str) -> None:
    """Write the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be written: {error.strerror}") from error
