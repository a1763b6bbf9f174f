"""The program finds its commands, imports only the one it runs, and turns errors into a status and a line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtier
from kvtier.cli import main as program
from kvtier.errors import BlockNotReadyError, ConfigError, KVTierError

BLOCK_IMPORTS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from kvtier.cli.main import main
sys.exit(main({arguments!r}))
"""


def run_without(blocked: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a fresh interpreter in which some libraries cannot be imported."""
    code = BLOCK_IMPORTS.format(blocked=blocked, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def command_that_raises(error: BaseException) -> Callable[[], None]:
    """Return a command that fails in one way."""

    def doctor() -> None:
        raise error

    return doctor


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Return a function that runs a command failing with the given error and returns the exit status."""

    def run(error: BaseException) -> int:
        monkeypatch.setattr(program.Command, "load", lambda _: command_that_raises(error))
        return program.main(["doctor"])

    return run


def test_every_command_of_the_table_can_be_loaded() -> None:
    assert all(callable(command.load()) for command in program.COMMANDS)


@pytest.mark.parametrize("command", program.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_json(command: program.Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([command.name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("command", program.COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(command: program.Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([command.name, "--help"]) == 0
    assert command.name in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status = program.main(["--help"])

    shown = capsys.readouterr().out
    assert status == 0
    assert all(command.name in shown for command in program.COMMANDS)


def test_help_imports_no_command() -> None:
    code = "import sys; from kvtier.cli.main import main; main(['--help']); print(*sys.modules, sep='\\n')"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    loaded = set(done.stdout.split("\n"))
    assert loaded.isdisjoint({command.module for command in program.COMMANDS} | {"torch"})


def test_a_checkout_that_is_not_installed_knows_its_version_and_simulates(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    code = (
        "import importlib.metadata as metadata, runpy, sys\n"
        "known = metadata.Distribution.from_name\n"
        "def from_name(name):\n"
        "    if name == 'kvtier': raise metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "metadata.Distribution.from_name = from_name\n"
        f"sys.argv = ['kvtier', 'simulate', '--example', 'chat', '--requests', '5', '--json', {str(out)!r}]\n"
        "runpy.run_module('kvtier', run_name='__main__')\n"
    )

    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )

    assert ran.returncode == 0, ran.stderr
    assert json.loads(out.read_text())["kvtier"] == kvtier.__version__


def test_no_command_asks_the_installation_for_the_version() -> None:
    sources = Path(kvtier.__file__).parent.rglob("*.py")

    assert not [path for path in sources if 'version("kvtier")' in path.read_text()]


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    import kvtier

    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == kvtier.__version__


@pytest.mark.parametrize("arguments", [["no-such-command"], ["doctor", "--no-such-option"], ["--nope"]])
def test_wrong_arguments_end_with_status_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "instead"), [("plan", "kvtier size"), ("models", "page of results")])
def test_a_removed_command_says_what_to_use_instead(
    name: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([name, "--json"]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvtier: COMMAND='{name}': was removed: ")
    assert instead in line


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("cpu_bytes_to_use", None, "is required"),
        BlockNotReadyError(b"\x01", "absent"),
        KVTierError("two\nlines"),
    ],
)
def test_an_error_of_kvtier_is_one_line_and_status_two(
    failing: Callable[[BaseException], int], error: KVTierError, capsys: pytest.CaptureFixture[str]
) -> None:
    status = failing(error)

    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    assert shown.err == f"kvtier: {str(error).replace(chr(10), ' ')}\n"


def test_an_interrupted_command_ends_with_status_130(failing: Callable[[BaseException], int]) -> None:
    assert failing(KeyboardInterrupt()) == 130


def test_a_bug_is_not_disguised_as_wrong_input(failing: Callable[[BaseException], int]) -> None:
    with pytest.raises(ZeroDivisionError):
        failing(ZeroDivisionError())
    with pytest.raises(ModuleNotFoundError):
        failing(ModuleNotFoundError("no module", name="kvtier.nowhere"))


@pytest.mark.parametrize(("blocked", "extra"), [({"typer"}, "cli"), ({"rich"}, "cli")])
def test_a_missing_library_of_the_command_line_names_the_extra(blocked: set[str], extra: str) -> None:
    done = run_without(blocked, "doctor")

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert (
        line == f"kvtier: module {min(blocked)!r} is missing: pip install '.[{extra}]' in kvtier's checkout"
    )


def test_a_command_s_own_missing_library_names_its_extra(
    failing: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(ModuleNotFoundError("no module", name="torch.nn")) == 2
    assert ".[transformers]" in capsys.readouterr().err
