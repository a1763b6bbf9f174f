"""From what a user writes for a place to the place: a directory, a URL, or a tier's entry in JSON.

A directory is one of the fs tier, and of a URL the scheme says which tier. An entry as in ``secondary_tiers`` says
everything, also of a tier of your own: ``{"type": "package.module:MyTier", ...}``.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvtier.errors import ConfigError, KVTierError, TierError, UnknownNameError
from kvtier.input_files import parse_json
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.factory import TIERS, check_tier_config
from kvtier.tiering.kit.place import Place

TIERS_OF_SCHEMES = {
    **dict.fromkeys(("s3", "gs", "az", "file", "http", "https", "memory"), "obj"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "valkey"),
    "mooncake": "mooncake",
}
"""What of a URL stands in front of ``://`` -> the tier. A tier of your own may be its own scheme."""

MAX_SHOWN_CHARS = 100
"""Characters of a place that a message repeats."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,11}", re.IGNORECASE)

DIRECTORY_TIER = "fs"

FORMS = (
    "must be a directory (fs), a URL such as s3://bucket, file:///folder (obj), redis://host "
    '(valkey), or a tier as in secondary_tiers: {"type": "mooncake", "master": ..., "allow_any_interface": true}'
)


def open_place(text: str) -> Place:
    """Return the place that a user means.

    Args:
        text: a path, a URL, or an entry of ``secondary_tiers`` as JSON.

    Raises:
        ConfigError: there is no such place, or it is no place of a tier.
        UnknownNameError: an unknown scheme, tier or setting.
        TierError: the place cannot be reached, or the tier's blocks cannot be seen without an engine.
        MissingExtraError: the tier's client library is not installed.
    """
    if text.lstrip().startswith("{"):
        name, tier_class, own = _read_entry(text)
    else:
        name = _find_tier(text)
        tier_class = TIERS.resolve(name)
        own = {}
    if tier_class.place_setting is None:
        _refuse(name)
    return tier_class.open_place(own or {tier_class.place_setting: _as_setting(text)})


def names_of_place_tiers() -> list[str]:
    """Return the tiers whose blocks can be seen without an engine, as far as their libraries are installed."""
    names = []
    for name in TIERS.names():
        with suppress(KVTierError):
            if TIERS.resolve(name).place_setting is not None:
                names.append(name)
    return names


def _read_entry(text: str) -> tuple[str, type[SecondaryTierManager], Mapping[str, object]]:
    entry = parse_json("PLACE", text, text, FORMS)
    assert isinstance(entry, dict), "what begins with a brace and is JSON is an object"
    checked = check_tier_config(entry)
    return checked.name, checked.tier_class, checked.own


def _find_tier(text: str) -> str:
    scheme, separator, _ = text.partition("://")
    if separator:
        name = TIERS_OF_SCHEMES.get(scheme.lower(), scheme)
        if name in TIERS and (scheme.lower() in TIERS_OF_SCHEMES or name not in TIERS_OF_SCHEMES.values()):
            return name
        if not _SCHEME.fullmatch(scheme):  # more stands in front of :// than a scheme, such as a password
            raise _wrong_place(text, FORMS)
        raise UnknownNameError("scheme of a place", scheme, TIERS_OF_SCHEMES)
    if not text or "\0" in text:
        raise _wrong_place(text, FORMS)
    path = _path_of(text)
    # Each refusal without its cause: that of the system names the path, and a mistyped URL with a password is a path.
    try:
        if path.is_dir():
            return DIRECTORY_TIER
        if path.is_file():
            remedy = (
                "is a file; a slab of an older kvtier is read by no tier any more, and may be removed with rm"
            )
            raise _wrong_place(text, f"{remedy}. It {FORMS}")
        path.lstat()
    except FileNotFoundError:
        raise _wrong_place(text, f"does not exist: it {FORMS}") from None
    except OSError as error:
        raise _wrong_place(text, f"cannot be read: {error.strerror}") from None
    raise _wrong_place(text, f"is no directory: it {FORMS}")


def _wrong_place(text: str, remedy: str) -> ConfigError:
    return ConfigError("PLACE", text, remedy, max_value_chars=MAX_SHOWN_CHARS)


def _as_setting(text: str) -> str:
    return text if "://" in text else str(_path_of(text))


def _path_of(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # no home directory of that name
        raise _wrong_place(text, f"{error}: give an absolute path") from None


def _refuse(name: str) -> NoReturn:
    able = ", ".join(names_of_place_tiers())
    raise TierError(name, f"its blocks cannot be seen without an engine; those of {able} can")
