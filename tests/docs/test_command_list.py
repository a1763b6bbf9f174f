"""The page of the reference lists every command with its summary."""

import re
from pathlib import Path

from kvtier.cli.main import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"


def test_the_page_lists_every_command() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert rows == [(command.name, command.summary) for command in COMMANDS]
