"""A folder for control sockets of the test's own, an engine in it, and the program."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.observe.controlled import Engine

from kvtier.cli.main import main

PROMPT = list(range(17))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvtier-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        folder = Path(name) / "kvtier"
        folder.mkdir(mode=0o700)
        monkeypatch.setattr("kvtier.observe.control_client.list_runtime_folders", lambda: [folder])
        monkeypatch.setattr("kvtier.cli.live.overview.list_runtime_folders", lambda: [folder])
        yield folder


@pytest.fixture
def engine(runtime: Path) -> Iterator[Engine]:
    running = Engine(runtime, "serving")
    running.store("a", PROMPT)
    yield running
    running.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_command(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run_command
