"""Every command refuses what it cannot use in one line: no traceback, no value of many characters, no secret."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from tests.cli.hostile import FILES, MARK, WORDS

from kvtier.cli.main import main

pytestmark = pytest.mark.slow

HANG_GUARD_S = 60
MAX_LINE_CHARS = 1000

TRACE = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'

BASES: dict[str, list[str]] = {
    "simulate": ["simulate", "--example", "chat", "--requests", "2"],
    "demo": ["demo", "--tier", "no-such-tier"],
    "purge": ["purge", "{place}", "--dry-run"],
    "inspect": ["inspect"],
    "verify": ["verify", "{place}"],
    "record": ["record", "{out}"],
    "pin": ["pin", "nobody"],
    "prefetch": ["prefetch", "nobody"],
    "unpin": ["unpin", "nobody"],
    "top": ["top", "nobody", "--once"],
}
"""How a command is begun, before what is tried on it; demo ends before it loads a model."""

WORDS_OF = [
    *(("simulate", option) for option in (
        "--format", "--seed", "--device", "--host", "--tier", "--tier-setting", "--policy", "--store-threshold",
        "--load-if", "--hints", "--hint-noise", "--sweep", "--kv-bytes-per-token", "--prefill", "--decode",
        "--max-running", "--requests", "--jobs", "--html",
    )),
    *(("demo", option) for option in (
        "--conversations", "--turns", "--document-tokens", "--model", "--cpu-bytes", "--tier-setting", "--dir",
    )),
    *(("size", option) for option in ("", "--dtype", "--tp", "--host")),
    *(("doctor", option) for option in ("--dir", "--config")),
    *(("inspect", option) for option in ("",)),
    *(("purge", option) for option in ("--namespace", "--tenant", "--older-than", "--instance", "--tier", "--timeout")),
    *(("verify", option) for option in ("--max-duration", "--sample", "--max-bytes-per-s")),
    *(("record", option) for option in ("--kv-events", "--seconds", "--batches", "--max-size", "--salt-file")),
    *((one, option) for one in ("pin", "prefetch", "unpin") for option in ("--tokens", "--tokenizer", "--timeout")),
    ("pin", "--lease"),
    ("top", "--interval"),
    *((command, "") for command in ("drain", "stats", "recent", "why", "bench")),
    ("drain", "--timeout"),
    ("recent", "-n"),
]  # fmt: skip
"""Commands and those of their options and arguments ("") that take a name or a number."""

FILES_OF = [
    ("size", ""),
    ("simulate", ""),
    ("demo", "--model"),
    ("demo", "--dir"),
    ("doctor", "--config"),
    ("doctor", "--dir"),
    ("inspect", ""),
    ("verify", ""),
    ("purge", ""),
    ("why", ""),
    ("record", "--salt-file"),
    ("simulate", "--html"),
]
"""The same for files and directories."""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no command see engines of this machine, and end one that hangs."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HANG_GUARD_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def command_line(command: str, option: str, value: str, directory: Path) -> list[str]:
    """Return the words of a command with one value in them."""
    base = BASES.get(command, [command])
    if not option and command in {"simulate", "verify", "purge"}:
        base = [command]
    (directory / "place").mkdir(exist_ok=True)
    places = {"{place}": str(directory / "place"), "{out}": str(directory / "out")}
    words = [places.get(word, word) for word in base]
    return [
        *words,
        *([f"{option}={value}"] if option.startswith("--") else [option, value] if option else ["--", value]),
    ]


def check_output(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Check what a command that was given nonsense has printed."""
    found = capsys.readouterr()
    assert status in {0, 1, 2}
    for text in (found.out, found.err):
        assert "Traceback" not in text
        assert MARK * 30 not in text
        assert "9" * 200 not in text
        assert "[" * 200 not in text
        assert "sesame" not in text
    if status == 2:
        assert found.err
        assert all(len(line) <= MAX_LINE_CHARS for line in found.err.splitlines())


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize(("command", "option"), WORDS_OF)
def test_a_word_that_cannot_be_is_refused_in_a_line(
    command: str, option: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "--sweep" and "secret" in kind:
        pytest.skip("its parts are taken apart and named one by one")
    check_output(main(command_line(command, option, WORDS[kind], tmp_path)), capsys)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(("command", "option"), FILES_OF)
def test_a_file_that_cannot_be_is_refused_in_a_line(
    command: str, option: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "input"
    FILES[kind](path)
    check_output(main(command_line(command, option, str(path), tmp_path)), capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--config", "{pipe}"],
        ["simulate", "{pipe}"],
        ["size", "{pipe}"],
        ["size", "{deep}"],
        ["simulate", "--example", "chat", "--requests", "9" * 5000],
        ["inspect", "{"],
        ["why", "x" * 100_000],
    ],
)
def test_a_process_ends_with_one_line_too(words: list[str], tmp_path: Path) -> None:
    FILES["a pipe"](tmp_path / "pipe")
    FILES["deep tables"](tmp_path / "deep")
    places = {"{pipe}": str(tmp_path / "pipe"), "{deep}": str(tmp_path / "deep")}
    command = [sys.executable, "-m", "kvtier", *(places.get(word, word) for word in words)]
    ended = subprocess.run(command, capture_output=True, timeout=HANG_GUARD_S, check=False)
    assert ended.returncode == (1 if words[0] == "why" else 2)  # the words may be an engine's that has ended
    assert b"Traceback" not in ended.stderr
    assert len(ended.stderr) < 2 * MAX_LINE_CHARS
