"""A dataclass of settings parses itself: types, defaults, errors that name the setting and the remedy."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.settings import (
    absolute_path,
    choice,
    flag,
    parse_settings,
    seconds_up_to,
    setting,
    settings_of,
    size_bytes,
    text,
    whole,
)


class Colour(Enum):
    """Two colours."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Paint:
    """Settings of each kind."""

    path: Path = field(metadata=setting(absolute_path, "where the paint is"))
    colour: Colour = field(default=Colour.RED, metadata=setting(choice(Colour), "seen from afar"))
    num_coats: int = field(default=2, metadata=setting(whole(1, 9), "one shows the wall"))
    pot_bytes: int | None = field(default=None, metadata=setting(size_bytes, "any pot", unit="bytes"))
    dry_s: float = field(default=1.0, metadata=setting(seconds_up_to(60.0), "by tomorrow"))
    is_glossy: bool = field(default=False, metadata=setting(flag, "shows dust"))
    label: str = field(default="", metadata=setting(text, "none"))
    num_litres: float = field(init=False, default=0.0)


def test_what_is_not_given_has_its_default() -> None:
    assert parse_settings(Paint, {"path": "/pot"}) == Paint(Path("/pot"))


def test_what_is_given_is_typed() -> None:
    values = {
        "path": "/pot",
        "colour": "blue",
        "num_coats": 3,
        "pot_bytes": "1KiB",
        "dry_s": 2,
        "is_glossy": True,
        "label": "wall",
    }
    parsed = parse_settings(Paint, values)
    assert parsed == Paint(Path("/pot"), Colour.BLUE, 3, 1024, 2.0, is_glossy=True, label="wall")
    assert isinstance(parsed.dry_s, float)


def test_null_stands_for_a_default_of_none() -> None:
    assert parse_settings(Paint, {"path": "/pot", "pot_bytes": None}).pot_bytes is None


@pytest.mark.parametrize("name", ["colour", "num_coats", "dry_s", "is_glossy", "label"])
def test_null_is_no_value_of_a_setting_with_another_default(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_settings(Paint, {"path": "/pot", name: None})


def test_a_missing_required_setting_says_what_it_is() -> None:
    with pytest.raises(ConfigError, match="is required: where the paint is") as caught:
        parse_settings(Paint, {})
    assert caught.value.setting == "path"


def test_an_unknown_setting_names_its_owner_and_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match="unknown setting of the painter 'num_coat': did you mean 'num_coats'"
    ):
        parse_settings(Paint, {"path": "/pot", "num_coat": 1}, "the painter")


def test_a_field_without_metadata_is_no_setting() -> None:
    assert "num_litres" not in settings_of(Paint)
    with pytest.raises(UnknownNameError):
        parse_settings(Paint, {"path": "/pot", "num_litres": 1.0})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("path", "pot", "absolute"),
        ("path", 3, "absolute path"),
        ("colour", "green", "'red', 'blue'"),
        ("num_coats", 0, "at least 1"),
        ("num_coats", 10, "at most 9"),
        ("num_coats", True, "whole number"),
        ("pot_bytes", "lots", "8GiB"),
        ("dry_s", 0, "from 0.001 to 60 seconds"),
        ("dry_s", 1e-9, "from 0.001 to 60 seconds"),
        ("dry_s", 61, "from 0.001 to 60 seconds"),
        ("is_glossy", "no", "true or false"),
        ("label", 5, "string"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_a_remedy(name: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        parse_settings(Paint, {"path": "/pot"} | {name: value})
    assert caught.value.setting == name
