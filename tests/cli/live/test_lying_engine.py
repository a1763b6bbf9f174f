"""A process that answers as no engine of this version does ends a command with one clear line."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

RunCommand = Callable[..., tuple[int, str, str]]
HELLO = {"ok": True, "id": "liar", "pid": 1, "engine": "vllm", "model": "m", "started_s": 1.0, "tiers": []}


class LyingEngine:
    """Says who it is as an engine does, and answers every other command with a lie.

    Args:
        path: its socket.
    """

    def __init__(self, path: Path) -> None:
        self.lie: dict[str, object] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, client.makefile("rb") as lines:
                    for line in lines:
                        is_hello = json.loads(line)["do"] == "hello"
                        client.sendall(json.dumps(HELLO if is_hello else self.lie).encode() + b"\n")


@pytest.fixture
def liar(runtime: Path) -> Iterator[LyingEngine]:
    engine = LyingEngine(runtime / "liar.sock")
    yield engine
    engine.close()


STATS_LIES: list[dict[str, object]] = [
    {},
    {"stats": "none", "is_stepping": True},
    {"stats": {"primary.capacity_blocks": "many"}, "is_stepping": True},
    {"stats": {"primary.capacity_blocks": 10**400}, "is_stepping": True},
    {"stats": {"primary.capacity_blocks": [1]}, "is_stepping": True},
    {"stats": {"primary.held_blocks": True}, "is_stepping": True},
    {"stats": {}, "is_stepping": "yes"},
]


@pytest.mark.parametrize("lie", STATS_LIES)
@pytest.mark.parametrize("command", ["stats", "why", "top --once"])
def test_numbers_that_are_none_are_one_line(
    liar: LyingEngine, run: RunCommand, lie: dict[str, object], command: str
) -> None:
    liar.lie = {"ok": True, "records": [], **lie}

    status, _, printed = run(*command.split(), *(["liar"] if command != "why" else []))

    assert status != 0
    assert "does not answer 'stats' as an engine of this version does" in " ".join(printed.split())


def test_ps_lists_it_with_what_is_wrong(liar: LyingEngine, run: RunCommand) -> None:
    liar.lie = {"ok": True, "stats": {"primary.capacity_blocks": "many"}, "is_stepping": True}

    status, printed, _ = run("ps", "--json")

    (row,) = json.loads(printed)
    assert status == 0
    assert "does not answer 'stats'" in row["error"]


@pytest.mark.parametrize("records", [5, [5], [{"tokens": 1}], [None]])
def test_records_that_are_none_are_one_line(liar: LyingEngine, run: RunCommand, records: object) -> None:
    liar.lie = {"ok": True, "records": records}

    status, _, printed = run("recent")

    assert status != 0
    assert "kvtier:" in printed


@pytest.mark.parametrize(
    "lie",
    [{}, {"num_purged": 3}, {"num_purged": {"host": "all"}, "num_in_use": {}, "unable": {}}],
)
def test_a_purge_that_says_nothing_is_one_line(
    liar: LyingEngine, run: RunCommand, lie: dict[str, object]
) -> None:
    liar.lie = {"ok": True, **lie}

    status, _, printed = run("purge", "--all", "--instance", "liar")

    assert status != 0
    assert "does not answer 'purge'" in " ".join(printed.split())
