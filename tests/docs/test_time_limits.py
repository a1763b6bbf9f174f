"""The tables of docs/guide/time-limits.md have every time limit of the package, with the value that it has."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtier.config import Settings
from kvtier.errors import MissingExtraError
from kvtier.tiering.base import TierSettings
from kvtier.tiering.factory import TIERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvtier"
PAGE = ROOT / "docs" / "guide" / "time-limits.md"
ROW = re.compile(
    r"^\| `(\w+)`(?: of (?:the )?`?([\w ]+?)`?)? \| `([\d.]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE
)

WITHOUT_LIMITS = ("cli", "sim", "testing", "cpu/policies")
"""Folders whose times are those of a program or a model, not limits of a running engine."""

UPPER_ENDS = frozenset({"MIN_TTL_S", "MAX_TTL_S", "MAX_TIMEOUT_S", "MAX_JOB_TIMEOUT_S"})
"""Constants that bound settings; a setting out of range is refused."""

ALIASES = frozenset(
    {"DEFAULT_LOOKUP_DEADLINE_S", "DEFAULT_JOB_TIMEOUT_S", "DEFAULT_TIMEOUT_S", "DEFAULT_TTL_S"}
)
"""Constants that are the defaults of settings, which stand on the page by their own names."""


class Limit(NamedTuple):
    """A row of the page."""

    name: str
    owner: str
    default: float
    where: str


def read_page() -> list[Limit]:
    """Return the rows of all tables."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [Limit(name, owner, float(default), where.strip()) for name, owner, default, where, _ in found]


def constants_of(path: Path) -> dict[str, float]:
    """Return the constants of a module whose names end in seconds."""
    found: dict[str, float] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            if re.fullmatch(r"[A-Z_]+_S", name) and isinstance(value, int | float):
                found[name] = float(value)
    return found


def constants() -> dict[tuple[str, str], float]:
    """Return every time limit that is a constant, by file and name."""
    return {
        (inside, name): value
        for path in sorted(PACKAGE.rglob("*.py"))
        if not (inside := path.relative_to(PACKAGE).as_posix()).startswith(WITHOUT_LIMITS)
        for name, value in constants_of(path).items()
        if name not in UPPER_ENDS | ALIASES
    }


def defaults_of(kind: type) -> dict[str, object]:
    """Return the defaults of a dataclass of settings by name."""
    assert dataclasses.is_dataclass(kind)
    return {field.name: field.default for field in dataclasses.fields(kind)}


def own_defaults(tier: str) -> dict[str, object]:
    """Return the defaults of a tier's own settings; skips the test where its client library is missing."""
    try:
        own = TIERS.resolve(tier).own_settings
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert own is not None
    return defaults_of(own)


LIMITS = read_page()
CONSTANTS = [limit for limit in LIMITS if limit.where.startswith("`")]
SETTINGS = [limit for limit in LIMITS if not limit.where.startswith("`")]


def test_every_row_of_the_page_is_read() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]

    assert len(LIMITS) == len(rows)


@pytest.mark.slow
def test_every_constant_stands_on_the_page_with_its_value() -> None:
    assert {(limit.where.strip("`"), limit.name): limit.default for limit in CONSTANTS} == constants()


@pytest.mark.parametrize("limit", SETTINGS, ids=lambda limit: f"{limit.owner} {limit.name}")
def test_a_setting_has_the_default_of_the_page(limit: Limit) -> None:
    common = defaults_of(Settings) | defaults_of(TierSettings)
    owner = limit.owner or ("fs" if limit.name not in common else "")
    defaults = own_defaults(owner) if owner else common

    assert defaults[limit.name] == limit.default
