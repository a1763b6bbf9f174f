"""``kvtier record`` runs a command as if it were not there, records every engine in it, and says what it has."""

import json
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.sim.formats.registry import read_trace

ENGINE = """
import sys
from tests.connector.fakes import FakeRequest, FakeSpec, make_config
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.recording.recorder import open_recorder
settings = dict(part.split("=", 1) for part in sys.argv[2:])
for engine in range(int(sys.argv[1])):
    config = make_config(**settings)
    half = OffloadingConnectorScheduler(FakeSpec(config), open_recorder(config))
    for number in range(5 + engine):
        request = FakeRequest(str(number), [7] * (4 * number + 5))
        half.get_num_new_matched_tokens(request, 0)
        half.request_finished(request)
    half.shutdown()
print("the engine's own output")
"""
"""Engines that answer five requests and more, one after another, with settings from the command line."""

PYTHON = (sys.executable, "-c")


def run(*arguments: str) -> int:
    return main(["record", *arguments])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_an_engine_that_knows_nothing_of_it_is_recorded(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(out), "--", *PYTHON, ENGINE, "1") == 0

    printed = capfd.readouterr()
    trace = read_trace(out)
    assert [one.num_prompt_tokens for one in trace.requests] == [5, 9, 13, 17, 21]
    assert printed.out == "the engine's own output\n"
    assert f"kvtier: 5 requests are in {out}, blocks of 4 tokens\n" in printed.err
    assert f"kvtier: kvtier simulate {out}\n" in printed.err
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_with_json_stdout_has_the_files_alone(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended = f"{ENGINE}\nsys.exit(3)"

    assert run(str(out), "--json", "--", *PYTHON, ended, "2") == 3

    printed = capfd.readouterr()
    common = {"block_tokens": 4, "has_end": True, "is_full": False, "dropped": 0}
    second = out.with_suffix(".2.jsonl")
    assert json.loads(printed.out) == {
        "status": 3,
        "files": [
            {"path": str(out), "requests": 5, **common},
            {"path": str(second), "requests": 6, **common},
        ],
    }
    assert "the engine's own output" in printed.err
    assert f"kvtier: 5 requests are in {out}" in printed.err


def test_with_json_nothing_recorded_and_a_damaged_file_are_told(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(str(out), "--json", "--", "true") == 1
    assert json.loads(capfd.readouterr().out) == {"status": 1, "files": []}

    assert run(str(out), "--json", "--", *PYTHON, BROKEN.format("{}\n")) == 1
    (file,) = json.loads(capfd.readouterr().out)["files"]
    assert file["path"] == str(out)
    assert str(out) in file["error"]


def test_what_was_recorded_can_be_simulated(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(out), "--", *PYTHON, ENGINE, "1") == 0

    assert (
        main(["simulate", str(out), "--device", "1MiB", "--host", "1MiB", "--kv-bytes-per-token", "1KiB"])
        == 0
    )
    assert "5 requests in" in capfd.readouterr().out


def test_each_engine_of_a_command_gets_a_file_of_its_own(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(str(out.with_suffix(".jsonl.gz")), "--", *PYTHON, ENGINE, "2") == 0

    assert sorted(path.name for path in out.parent.iterdir()) == ["trace.2.jsonl.gz", "trace.jsonl.gz"]
    assert len(read_trace(out.parent / "trace.2.jsonl.gz").requests) == 6
    assert "6 requests are in" in capfd.readouterr().err


def test_a_setting_has_precedence_and_the_user_is_told(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = out.with_name("other")

    assert run(str(out), "--", *PYTHON, ENGINE, "1", f"record_trace={other}") == 1

    assert len(read_trace(other).requests) == 5
    assert "nothing is recorded: no engine with a kvtier connector was started" in capfd.readouterr().err


def test_recordings_under_one_salt_file_name_blocks_alike(out: Path) -> None:
    salt = out.with_name("salt")
    salt.write_bytes(bytes(32))
    salt.chmod(0o600)
    for name in ("one", "other"):
        assert run(str(out.with_name(name)), "--salt-file", str(salt), "--", *PYTHON, ENGINE, "1") == 0

    first, second = (read_trace(out.with_name(name)).requests for name in ("one", "other"))
    assert [one.hash_ids for one in first] == [one.hash_ids for one in second]


def test_a_limit_reaches_the_engine(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    many = ENGINE.replace("range(5 + engine)", "range(200)")

    assert run(str(out), "--max-size", "6kB", "--", *PYTHON, many, "1") == 0

    assert out.stat().st_size <= 6000
    assert "the file has reached its limit: later requests are not in it" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_command_s_exit_status_is_returned(out: Path, code: int) -> None:
    ended = f"{ENGINE}\nsys.exit({code})"

    assert run(str(out), "--", *PYTHON, ended, "1") == code


def test_a_command_that_a_signal_has_ended_has_a_shell_s_status(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = ENGINE.replace("    half.shutdown()", "    import time") + (
        "\nimport os, signal, time\n"
        "while half.recorder.stats()['recorder.requests'] < 5: time.sleep(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    assert run(str(out), "--", *PYTHON, killed, "1") == 128 + 9
    assert len(read_trace(out).requests) == 5
    assert "did not end in order" in capfd.readouterr().err


WAITING = """
import signal, sys
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready", flush=True)
print("got", signal.sigwait(numbers).value, flush=True)
sys.exit(40)
"""
"""Waits for a signal. One that comes before it waits stays pending: none is lost, and no handler prints in a print."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(out: Path, number: signal.Signals, request: pytest.FixtureRequest) -> None:
    # Tests that nohup has started ignore SIGHUP, and so would the processes that they start.
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    command = [sys.executable, "-m", "kvtier.cli.main", "record", str(out), "--", *PYTHON, WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as recording:
        assert recording.stdout is not None
        assert recording.stdout.readline() == "ready\n"
        recording.send_signal(number)
        said, _ = recording.communicate(timeout=60)

    assert said == f"got {number.value}\n"
    assert recording.returncode == 40


def test_a_file_that_exists_is_refused_before_anything_starts(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out.write_text("precious")

    assert run(str(out), "--", *PYTHON, "print('started')") == 2

    printed = capfd.readouterr()
    assert out.read_text() == "precious"
    assert printed.out == ""
    assert "exists: name a new file" in printed.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give either -- COMMAND ... or --kv-events ENDPOINT"),
        (("--kv-events", "tcp://127.0.0.1:5557", "--", "true"), "give either"),
        (("--bind", "--", "true"), "go with --kv-events"),
        (("--max-size", "1kB", "--", "true"), "must be at least 4096"),
        (("--", "/no/such/program"), "cannot be started: No such file"),
        (("--salt-file", "/no/such/salt", "--", "true"), "cannot be read"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    out: Path, arguments: tuple[str, ...], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(str(out), *arguments) == 2

    assert complaint in capfd.readouterr().err
    assert not out.exists()


def test_a_file_that_cannot_be_made_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path / "missing" / "trace.jsonl"), "--", *PYTHON, "print('started')") == 2

    printed = capfd.readouterr()
    assert "cannot be created: name a file in an existing folder" in printed.err
    assert printed.out == ""


def test_nothing_of_a_recording_is_left_in_the_environment_of_later_commands(out: Path) -> None:
    assert run(str(out), "--", *PYTHON, ENGINE, "1") == 0
    script = "import json, os; print(json.dumps(sorted(os.environ)))"

    found = subprocess.run([*PYTHON, script], capture_output=True, text=True, check=True)

    assert not [name for name in json.loads(found.stdout) if name.startswith("KVTIER_RECORD")]


BROKEN = "open(__import__('os').environ['KVTIER_RECORD_TRACE'], 'w').write({!r})\n"


@pytest.mark.parametrize("content", ["", "{}\n", '{"kvtier_tr'])
def test_a_recording_that_cannot_be_read_hides_neither_the_status_nor_the_others(
    out: Path, content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = BROKEN.format(content) + ENGINE + "\nsys.exit(7)"

    assert run(str(out), "--", *PYTHON, command, "1") == 7

    printed = capfd.readouterr().err
    assert f"kvtier: {out}" in printed
    assert f"5 requests are in {out.with_suffix('.2.jsonl')}" in printed


def test_a_recording_that_has_not_begun_is_nothing_recorded(out: Path) -> None:
    assert run(str(out), "--", *PYTHON, BROKEN.format("")) == 1


def test_an_engine_that_was_asked_nothing_leaves_no_file(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    idle = ENGINE.replace("range(5 + engine)", "range(5 * engine)")

    assert run(str(out), "--", *PYTHON, idle, "1") == 1
    assert "nothing is recorded: an engine started and ended without a request" in capfd.readouterr().err
    assert not out.exists()
    assert run(str(out), "--", *PYTHON, idle, "2") == 0
    assert [path.name for path in out.parent.iterdir()] == ["trace.2.jsonl"]


def test_a_recording_without_a_request_and_an_end_is_kept(out: Path) -> None:
    """Its engine may still run: it would write into a file without a name."""
    begun = ENGINE.replace("range(5 + engine)", "range(0)").replace("    half.shutdown()", "    os._exit(3)")

    assert run(str(out), "--", *PYTHON, f"import os\n{begun}", "1") == 3
    assert out.exists()


def test_a_command_ends_when_its_recorder_is_killed(out: Path) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "record", str(out), "--", *PYTHON, WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as recording:
        assert recording.stdout is not None
        assert recording.stdout.readline() == "ready\n"
        recording.kill()
        said, _ = recording.communicate(timeout=60)  # the command holds stdout until it has ended

    assert said == f"got {signal.SIGTERM.value}\n"
    assert recording.returncode == -signal.SIGKILL


def test_a_folder_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path / "missing" / "trace"), "--", *PYTHON, "print('started')") == 2

    printed = capfd.readouterr()
    assert printed.out == ""
    assert "cannot be created: name a file in an existing folder" in printed.err
