"""The tables of docs/guide/settings.md name exactly the settings that exist, with the defaults that they have.

Those about tiers are written by ``scripts.settings_tables``.
"""

import dataclasses
import json
import re
from enum import Enum
from pathlib import Path

import pytest

from kvtier.config import Settings
from kvtier.tiering.factory import TIERS
from scripts.settings_tables import EVERY_TIER_HEADING, settings_classes, with_tables

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "settings.md"

PRIMARY_HEADING = "The primary tier and the manager"


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


def parse(text: str) -> object:
    """Return a default of the page as a value."""
    value: object = json.loads(text)
    return value


KINDS = settings_classes()
TIER_NAMES = frozenset(TIERS.names())
"""Read before any test runs: some register tiers of their own, and which ran before in this process is chance."""
DEFAULTS = {field.name: plain(field.default) for field in dataclasses.fields(Settings)}
TABLES = read_tables(PAGE.read_text(encoding="utf-8"))


def test_every_section_is_about_settings_that_exist() -> None:
    assert set(TABLES) == {PRIMARY_HEADING, EVERY_TIER_HEADING, *TIER_NAMES}


def test_the_tables_about_tiers_are_what_their_settings_declare() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page, KINDS), "run python -m scripts.settings_tables"


def test_the_table_of_the_primary_names_exactly_the_settings_that_exist() -> None:
    assert set(TABLES[PRIMARY_HEADING]) == set(DEFAULTS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_on_the_page_is_the_default_of_the_code(name: str) -> None:
    written = re.match(r"`([^`]+)`", TABLES[PRIMARY_HEADING][name])
    if written is None:
        assert DEFAULTS[name] is None, f"{name} has a default: write it as code"
    else:
        assert parse(written[1]) == DEFAULTS[name]
