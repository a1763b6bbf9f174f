"""Errors about a field of a value, said of the option that filled it. It checks nothing itself.

What an engine, a host or a tier can be is checked once, where it is defined, for callers from Python too. Whoever typed
a command knows no fields, so each place that fills one from an option says which.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvtier.errors import ConfigError, UnknownNameError


@contextmanager
def said_of(options: Mapping[str, str]) -> Iterator[None]:
    """Name options in the errors that are raised inside.

    Args:
        options: name of a field, or kind of an unknown name -> option that filled it; other errors stay as they are.

    Raises:
        ConfigError: as inside, about the option.
        UnknownNameError: as inside, with the option.
    """
    try:
        yield
    except ConfigError as error:
        if error.setting not in options:
            raise
        raise ConfigError(options[error.setting], error.value, error.remedy) from error
    except UnknownNameError as error:
        if error.kind not in options:
            raise
        raise UnknownNameError(f"{error.kind} for {options[error.kind]}", error.name, error.known) from error
