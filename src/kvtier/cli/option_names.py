"""Errors about a field of a value, said of the option that filled it. It checks nothing itself.

What an engine, a host or a tier can be is checked once, where it is defined, for callers from Python too. Whoever typed
a command knows no fields, so each place that fills one from an option says which.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvtier.errors import ConfigError, NamedClassError, UnknownNameError


@contextmanager
def said_of(options: Mapping[str, str]) -> Iterator[None]:
    """Name options in the errors that are raised inside.

    Args:
        options: name of a field, or kind of an unknown name -> option that filled it; other errors stay as they are.

    Raises:
        ConfigError: as inside, about the option.
        UnknownNameError: as inside, with the option.
        NamedClassError: likewise.
    """
    try:
        yield
    except ConfigError as error:
        if error.setting not in options:
            raise
        option, max_chars = options[error.setting], error.max_value_chars
        raise ConfigError(option, error.value, error.remedy, max_value_chars=max_chars) from error
    except UnknownNameError as error:
        if error.kind not in options:
            raise
        kind = f"{error.kind} for {options[error.kind]}"
        raise UnknownNameError(kind, error.name, error.known, meant=error.meant, also=error.also) from error
    except NamedClassError as error:
        if error.kind not in options:
            raise
        kind = f"{error.kind} for {options[error.kind]}"
        raise NamedClassError(kind, error.name, error.reason) from error
