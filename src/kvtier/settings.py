"""Settings as a frozen dataclass: one declaration is the table, the parser and the row of the documentation.

Each field of such a dataclass carries its parser and the reason of its default::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class MySettings:
        path: Path = field(metadata=setting(absolute_path, "the file"))
        num_threads: int = field(default=4, metadata=setting(whole(1, 128), "fewer leave the device idle"))

``parse_settings`` makes one out of the user's JSON. A check of several fields together belongs into ``__post_init__``.
``scripts/settings_tables.py`` writes the tables of ``docs/guide/settings.md``.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from kvtier.config import SettingsReader
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.quantities import parse_capacity, parse_ttl, require_text, require_texts


class IsDataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # Any: as the standard library has it


T = TypeVar("T", bound=IsDataclass)

Parser = Callable[[str, object], Any]  # Any: the type is that of the field
"""Returns the typed value of a setting, given its name and what the user wrote; raises ConfigError."""

REMOVED_SETTINGS = {
    "blocks_per_object": "was removed after 0.1, as it did not speed up puts: leave it out",
    "shared": "was removed after 0.1, as an fs directory is always shared: leave it out",
    "negative_ttl_s": "was removed after 0.1, as lookups in an fs directory are answered from memory: leave it out",
}
"""Settings that tiers of earlier versions had, and what to do. Any value is refused, because none has an effect."""

_KEY = "kvtier setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field of a settings dataclass carries.

    Attributes:
        parse: checks and types what the user wrote.
        reason: why the default is what it is, or what the setting is for; Markdown.
        unit: unit or range of the values; Markdown.
        default_text: the default in words; "" shows the value.
    """

    parse: Parser
    reason: str
    unit: str = ""
    default_text: str = ""


def setting(parse: Parser, reason: str, *, unit: str = "", default_text: str = "") -> Mapping[str, Setting]:
    """Return the metadata of a field that is a setting; arguments as the attributes of ``Setting``."""
    return {_KEY: Setting(parse, reason, unit, default_text)}


def settings_of(kind: type[IsDataclass]) -> dict[str, Setting]:
    """Return the settings of a dataclass by name: those without a default first, otherwise in their order."""
    ordered = sorted(fields(kind), key=lambda one: one.default is not MISSING)
    return {one.name: one.metadata[_KEY] for one in ordered if _KEY in one.metadata}


def parse_settings(kind: type[T], values: Mapping[str, object], owner: str = "") -> T:
    """Return the settings that ``values`` describes; null stands for a default of none.

    Args:
        kind: a dataclass whose fields carry ``setting(...)``.
        values: what the user wrote, by name.
        owner: whose settings they are, for the message about an unknown name: "tier 'fs'".

    Raises:
        UnknownNameError: there is no such setting; the message names the nearest one.
        ConfigError: a required setting is missing, a value is of the wrong type or range, or a setting was removed.
    """
    known = settings_of(kind)
    require_texts("settings", values)
    for name in sorted(values):
        if name not in known and name in REMOVED_SETTINGS:
            raise ConfigError(name, values[name], REMOVED_SETTINGS[name])
        if name not in known:
            raise UnknownNameError(f"setting of {owner}" if owner else "setting", name, set(known))
    parsed: dict[str, object] = {}
    for one in fields(kind):
        if one.name not in known:
            continue
        own = known[one.name]
        if one.name in values:
            value = values[one.name]
            parsed[one.name] = None if value is None and one.default is None else own.parse(one.name, value)
        elif one.default is MISSING:
            raise ConfigError(one.name, None, f"is required: {own.reason}")
    return kind(**parsed)


def flag(name: str, value: object) -> bool:
    """Parse true or false."""
    return SettingsReader({name: value}).flag(name, default=False)


def text(name: str, value: object) -> str:
    """Parse a string."""
    return SettingsReader({name: value}).text(name, "")


def seconds(name: str, value: object) -> float:
    """Parse a duration in seconds, zero included."""
    return SettingsReader({name: value}).seconds(name, 0.0)


def ttl(name: str, value: object) -> float:
    """Parse a time to live in seconds, from one second to ten years."""
    return parse_ttl(name, value)


MIN_TIMEOUT_S = 0.001
"""The shortest time-out. Threads cannot wait for less, and no disk or server answers in so little: each call would
fail, which looks like a fault of the disk or server."""


def seconds_up_to(limit_s: float) -> Parser:
    """Return a parser of time-outs from ``MIN_TIMEOUT_S`` to ``limit_s`` seconds."""

    def parse(name: str, value: object) -> float:
        duration_s = seconds(name, value)
        if not MIN_TIMEOUT_S <= duration_s <= limit_s:
            raise ConfigError(name, value, f"must be from {MIN_TIMEOUT_S:g} to {limit_s:g} seconds")
        return duration_s

    return parse


def whole(minimum: int, maximum: int | None = None) -> Parser:
    """Return a parser of whole numbers from ``minimum`` to ``maximum``; None: without an upper end."""

    def parse(name: str, value: object) -> int:
        number = SettingsReader({name: value}).whole(name, minimum, minimum=minimum)
        if maximum is not None and number > maximum:
            raise ConfigError(name, number, f"must be at most {maximum}")
        return number

    return parse


def size_bytes(name: str, value: object) -> int:
    """Parse a positive number of bytes, or text such as ``"8GiB"``."""
    return parse_capacity(name, value)


def choice(kind: type[Enum]) -> Parser:
    """Return a parser of the members of ``kind`` and of their values."""

    def parse(name: str, value: object) -> Enum:
        return SettingsReader({name: value}).choice(name, next(iter(kind)))

    return parse


def absolute_path(name: str, value: object) -> Path:
    """Parse an absolute path; ``~`` is the home directory."""
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigError(name, value, "must be the absolute path of a file or directory")
    require_text(name, str(value))
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError(name, value, f"{error}; give an absolute path") from None
    if not path.is_absolute():
        raise ConfigError(name, str(value), "must be an absolute path, since engines start anywhere")
    return path
