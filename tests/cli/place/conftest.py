"""A place with blocks of two namespaces, and the commands on it."""

import json
import time
from collections.abc import Callable

import pytest
from tests.cli.place.places import A, B, MemoryPlace, put_down

from kvtier.cli import main

PLACE = json.dumps({"type": "tests.cli.place.places:MemoryTier", "where": "here"})

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of one namespace, one of another; one is ten days old."""
    for name, value in (("blocks_by_address", {}), ("states", {}), ("num_ended", 0), ("was_forced", False)):
        monkeypatch.setattr(MemoryPlace, name, value)
    now_s = time.time()
    put_down(A, "a-new", 60, now_s)
    put_down(A, "a-old", 10 * 86_400, now_s)
    put_down(B, "b-new", 60, now_s)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns its status, its output and its errors."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        status = main.main(list(arguments))
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run_command
