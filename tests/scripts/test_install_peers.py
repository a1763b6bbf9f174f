"""LMCache is installed beside vLLM without touching what is there, and one that cannot be imported is noticed."""

import sys
from collections.abc import Sequence

import pytest

from scripts import install_peers


def test_only_the_release_and_two_small_packages_are_named_and_none_of_their_requirements() -> None:
    install, _ = install_peers.plan_commands("0.5.6", "python")

    named = install[install.index("install") + 1 :]
    assert sorted(named) == ["--no-deps", "aiofile", "caio", "lmcache==0.5.6"]


def test_the_import_comes_after_the_installation_and_by_the_same_interpreter() -> None:
    install, check = install_peers.plan_commands("0.5.6", "/environment/bin/python")

    assert install[0] == check[0] == "/environment/bin/python"
    assert check[1:] == ["-c", "import lmcache.v1.storage_backend.local_disk_backend"]


@pytest.mark.parametrize(("statuses", "expected"), [([3, 0], 3), ([0, 4], 4)])
def test_a_command_that_fails_ends_the_program_with_its_status(statuses: list[int], expected: int) -> None:
    left = iter(statuses)

    with pytest.raises(SystemExit) as ended:
        install_peers.main(["0.5.6"], lambda command: next(left))

    assert ended.value.code == expected


def test_nothing_is_imported_after_an_installation_that_failed() -> None:
    ran: list[Sequence[str]] = []

    def fail(command: Sequence[str]) -> int:
        ran.append(command)
        return 1

    with pytest.raises(SystemExit):
        install_peers.main(["0.5.6"], fail)

    assert len(ran) == 1


def test_a_command_runs_with_lmcache_kept_quiet_and_its_status_is_told() -> None:
    program = "import os, sys; sys.exit(7 if os.environ['LMCACHE_LOG_LEVEL'] == 'ERROR' else 8)"

    assert install_peers.run_command([sys.executable, "-c", program]) == 7
