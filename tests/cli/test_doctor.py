"""Each check of the doctor tells working from broken, and the command's status says which it was."""

import fcntl
import os
from pathlib import Path

import pytest

import kvtier
from kvtier.cli import doctor, main
from kvtier.cli.output import Check, CheckResult
from kvtier.cpu.row_copy import COMPILED_CALLS
from kvtier.limits import AFFINITY, UsableCores
from kvtier.quantities import size_in_words


@pytest.mark.slow
def test_a_machine_that_runs_these_tests_is_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main.main(["doctor", "--dir", str(tmp_path)])

    shown = capsys.readouterr().out
    assert status == 0
    assert all(word in shown for word in ("Python", "cores", "numpy", "torch", "packs in", "O_DIRECT"))
    assert list(tmp_path.iterdir()) == []


def test_something_broken_ends_with_status_one(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Check("numpy", CheckResult.BROKEN, "gone"), Check("rich", CheckResult.GOOD, "1")]
    monkeypatch.setattr(doctor, "run_checks", lambda _: iter(broken))

    assert main.main(["doctor"]) == 1


def test_something_absent_but_optional_ends_with_status_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "run_checks", lambda _: iter([Check("matplotlib", CheckResult.NOTE, "absent")])
    )

    assert main.main(["doctor"]) == 0


def test_a_directory_that_does_not_exist_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["doctor", "--dir", str(tmp_path / "lost")]) == 2
    assert "must be an existing directory" in capsys.readouterr().err


def test_text_in_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_checks([Check("torch", CheckResult.NOTE, "pip install 'kvtier[torch]'")])

    assert "kvtier[torch]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "result"),
    [((3, 10, 9), CheckResult.BROKEN), ((3, 11, 0), CheckResult.GOOD), ((4, 0, 0), CheckResult.GOOD)],
)
def test_an_old_python_is_refused(version: tuple[int, int, int], result: CheckResult) -> None:
    assert doctor.check_python(version).result is result


def test_the_number_of_cores_comes_with_what_sets_it() -> None:
    assert "3, by affinity" in doctor.check_cores(UsableCores(3, AFFINITY)).found
    assert "1, by the CPU quota in /a/cpu.max" in doctor.check_cores(UsableCores(1, "/a/cpu.max")).found


@pytest.mark.parametrize(
    ("status", "output", "errors", "result", "found"),
    [
        (0, '["2.9.1", []]\n', "", CheckResult.GOOD, "no CUDA device"),
        (0, 'noise\n["2.9.1", ["H100"]]\n', "", CheckResult.GOOD, "CUDA: H100"),
        (1, "", "Traceback\nImportError: libcudart.so\n", CheckResult.BROKEN, "ImportError: libcudart.so"),
        (-11, "", "", CheckResult.BROKEN, "exit status -11"),
    ],
)
def test_the_report_on_torch_tells_a_broken_build(
    status: int, output: str, errors: str, result: CheckResult, found: str
) -> None:
    check = doctor.read_torch_report(status, output, errors)

    assert check.result is result
    assert found in check.found


def test_shared_memory_that_is_missing_is_broken(tmp_path: Path) -> None:
    assert doctor.check_shared_memory(tmp_path / "shm").result is CheckResult.BROKEN


def test_no_region_is_good(tmp_path: Path) -> None:
    assert doctor.check_leftovers(tmp_path, doctor.LOCK_TABLE).result is CheckResult.GOOD


def test_a_region_that_a_process_holds_is_no_leftover_and_one_that_nobody_holds_is(tmp_path: Path) -> None:
    region = tmp_path / "kvtier_0_engine"
    region.write_bytes(bytes(2048))
    with region.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        held = doctor.check_leftovers(tmp_path, doctor.LOCK_TABLE)

    left = doctor.check_leftovers(tmp_path, doctor.LOCK_TABLE)

    assert held.result is CheckResult.GOOD
    assert left.result is CheckResult.NOTE
    assert "2.0 KiB" in left.found


def test_without_the_kernel_s_table_no_region_is_called_dead(tmp_path: Path) -> None:
    (tmp_path / "kvtier_0_engine").touch()

    check = doctor.check_leftovers(tmp_path, tmp_path / "no-table")

    assert "their use is unknown" in check.found


def test_the_kernel_s_table_of_locks_is_read() -> None:
    table = "1: FLOCK  ADVISORY  READ 8365 00:1b:2 0 EOF\n2: -> POSIX  ADVISORY  WRITE 7 08:01:99 0 EOF\n\n"

    assert doctor.locked_inodes(table) == {(os.makedev(0, 0x1B), 2), (os.makedev(8, 1), 99)}


def test_a_file_system_without_direct_io_is_a_note_and_one_without_files_is_broken() -> None:
    kernel_s_own = Path("/proc/self")

    assert doctor.check_direct_io(kernel_s_own).result is CheckResult.NOTE
    assert doctor.check_packs(kernel_s_own).result is CheckResult.BROKEN


def test_packs_are_tried_and_nothing_is_left(tmp_path: Path) -> None:
    assert doctor.check_packs(tmp_path).result is CheckResult.GOOD
    assert list(tmp_path.iterdir()) == []


def test_an_extra_that_is_not_installed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "no_such_module", ("fs", "nothing"))

    check = doctor.check_extra("no_such_module")

    assert check.result is CheckResult.NOTE
    assert ".[fs]" in check.found


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")],
)
def test_sizes_are_in_binary_units(num_bytes: int, shown: str) -> None:
    assert size_in_words(num_bytes) == shown


def test_what_was_not_compiled_or_cannot_be_loaded_is_a_note_with_a_remedy(tmp_path: Path) -> None:
    missing = doctor.check_compiled("copies", tmp_path / "_module", "faster")
    (tmp_path / "_module.abi3.so").touch()
    empty = doctor.check_compiled("copies", tmp_path / "_module", "faster")

    for check, reason in ((missing, "not compiled"), (empty, "too short")):
        assert check.result is CheckResult.NOTE
        assert reason in check.found
        assert "C compiler" in check.found


def test_what_was_compiled_and_can_be_loaded_is_good() -> None:
    if COMPILED_CALLS is None:
        pytest.skip(
            "nothing was compiled when kvtier was installed: apt-get install gcc python3-dev, make clean venv"
        )
    module = Path(kvtier.__file__).parent / "cpu" / "_page_copy"

    assert doctor.check_compiled("copies", module, "faster") == Check("copies", CheckResult.GOOD, "faster")
