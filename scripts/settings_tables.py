"""Write the tables of settings.md about tiers, and those of engines, from the dataclasses that declare the settings.

    python -m scripts.settings_tables           exit status 1 when a table was not as it should be; it is then rewritten

A table stands under the heading of its tier; what is around it stays.
"""

import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from kvtier.engines.llamacpp.settings import LlamaSettings
from kvtier.engines.sglang.settings import SGLangSettings
from kvtier.errors import MissingExtraError
from kvtier.settings import settings_of
from kvtier.tiering.base import TierSettings
from kvtier.tiering.factory import TIERS

PAGE = Path("docs/guide/settings.md")
SGLANG_PAGE = Path("docs/guide/sglang.md")
LLAMA_PAGE = Path("docs/guide/llamacpp.md")
ENGINE_HEADING = "Settings"
EVERY_TIER_HEADING = "Every secondary tier"
HEAD = ("| setting | default | reason of the default |", "|---|---|---|")

_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def main() -> int:
    """Rewrite the pages; return 1 when that changed one."""
    pages: dict[Path, dict[str, type[Any]]] = {  # Any: dataclasses
        PAGE: settings_classes(),
        SGLANG_PAGE: {ENGINE_HEADING: SGLangSettings},
        LLAMA_PAGE: {ENGINE_HEADING: LlamaSettings},
    }
    has_changed = False
    for page, kinds in pages.items():
        before = page.read_text(encoding="utf-8")
        after = with_tables(before, kinds)
        page.write_text(after, encoding="utf-8")
        print(f"{page}: {'as the code says' if after == before else 'rewritten'}")
        has_changed |= after != before
    return int(has_changed)


def with_tables(page: str, kinds: Mapping[str, type[Any]]) -> str:  # Any: dataclasses
    """Return the page with the table under each heading of ``kinds`` as the code says. Pure."""
    for heading, kind in kinds.items():
        start = page.index(f"\n## {heading}\n")
        found = _TABLE.search(page, start)
        assert found is not None, f"there is no table under {heading}"
        page = page[: found.start()] + table_of(kind) + page[found.end() :]
    return page


def settings_classes() -> dict[str, type[Any]]:  # Any: each is a dataclass of its own
    """Return the dataclass whose table stands under each heading, without tiers whose client library is missing."""
    found: dict[str, type[Any]] = {EVERY_TIER_HEADING: TierSettings}
    for name in TIERS.names():
        with suppress(MissingExtraError):
            kind = TIERS.resolve(name).own_settings
            if kind is not None:
                found[f"`{name}`"] = kind
    return found


def table_of(kind: type[Any]) -> str:  # Any: as above
    """Return the Markdown table of the settings that a dataclass declares. Pure."""
    defaults = {one.name: one.default for one in fields(kind)}
    rows = []
    for name, setting in settings_of(kind).items():
        unit = f" ({setting.unit})" if setting.unit else ""
        default = setting.default_text or text_of(defaults[name])
        rows.append(f"| `{name}`{unit} | {default} | {setting.reason} |")
    return "\n".join([*HEAD, *rows]) + "\n"


def text_of(default: object) -> str:
    """Return a default as the table has it. Pure."""
    if default is MISSING:
        return "required"
    if default is None:
        return "none"
    return f"`{json.dumps(default.value if isinstance(default, Enum) else default)}`"


if __name__ == "__main__":
    sys.exit(main())
