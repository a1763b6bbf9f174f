"""Turns errors about a field of a value into errors about the command-line option that set it.

Engines, hosts and tiers validate their fields where they are defined, also for callers from Python. A user of the
command line knows options and not fields, so each command maps the fields that it sets to its options.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvtier.errors import ConfigError, NamedClassError, UnknownNameError


@contextmanager
def naming_options(options: Mapping[str, str]) -> Iterator[None]:
    """Replace fields by options in the errors that are raised inside the block.

    Args:
        options: name of a field, or kind of an unknown name -> the option that set it; other errors stay unchanged.

    Raises:
        ConfigError: the same error, about the option.
        UnknownNameError: the same error, with the option.
        NamedClassError: the same error, with the option.
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
