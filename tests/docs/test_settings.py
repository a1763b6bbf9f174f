"""The tables of docs/guide/settings.md name exactly the settings that exist, with the defaults that they have."""

import dataclasses
import inspect
import json
import re
from enum import Enum
from pathlib import Path

import pytest

from kvtier.config import Settings
from kvtier.tiering.base import TierSettings
from kvtier.tiering.factory import NOT_SETTINGS, TIERS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "settings.md"

PRIMARY_HEADING = "The primary tier and the manager"
EVERY_TIER_HEADING = "Every secondary tier"


def read_tables(text: str) -> dict[str, dict[str, str]]:
    """Return, for each heading of the page, the default column of its table by setting."""
    tables: dict[str, dict[str, str]] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        rows = re.findall(r"^\| `(\w+)`[^|]*\|([^|]*)\|", body, flags=re.MULTILINE)
        tables[heading.strip().strip("`")] = {name: default.strip() for name, default in rows}
    return tables


def plain(value: object) -> object:
    """Return a default as JSON would write it."""
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def parse(text: str, like: object) -> object:
    """Return a default of the page as a value; permissions stand there as octal text."""
    value: object = json.loads(text)
    return int(value, 8) if isinstance(value, str) and isinstance(like, int) else value


def defaults_of(kind: type) -> dict[str, object]:
    """Return the defaults of a dataclass by field; of a tier, by argument of its constructor."""
    if dataclasses.is_dataclass(kind):
        return {field.name: plain(field.default) for field in dataclasses.fields(kind)}
    parameters = inspect.signature(kind).parameters
    own = {name: one for name, one in parameters.items() if name not in NOT_SETTINGS}
    return {name: plain(one.default) for name, one in own.items()}


SECTIONS: dict[str, type] = {PRIMARY_HEADING: Settings, EVERY_TIER_HEADING: TierSettings}
SECTIONS |= {name: TIERS.resolve(name) for name in TIERS.names()}
TABLES = read_tables(PAGE.read_text(encoding="utf-8"))


def test_every_section_is_about_settings_that_exist() -> None:
    assert set(TABLES) == set(SECTIONS)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_table_names_exactly_the_settings_that_exist(heading: str) -> None:
    assert set(TABLES[heading]) == set(defaults_of(SECTIONS[heading]))


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_default_on_the_page_is_the_default_of_the_code(heading: str) -> None:
    defaults = defaults_of(SECTIONS[heading])

    for name, cell in TABLES[heading].items():
        written = re.match(r"`([^`]+)`", cell)
        if written is None:
            assert defaults[name] in (None, inspect.Parameter.empty), (
                f"{name} has a default: write it as code"
            )
        else:
            assert parse(written[1], like=defaults[name]) == defaults[name], name
