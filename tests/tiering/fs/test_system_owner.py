"""A process is told from a dead one, from one with its old id, and from one on another host."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.tiering.fs.system import FOREIGN_OWNER_TIMEOUT_S, Owner, current_owner, parse_owner


def test_a_name_is_parsed_back_also_with_something_behind_it() -> None:
    here = current_owner()
    assert parse_owner(str(here)) == here
    assert parse_owner(f"{here}-0123abcd") == here


@pytest.mark.parametrize("text", ["", "namespace.json-00", "00-1-2", "0123456789abcdeg-1-2"])
def test_other_names_have_no_owner(text: str) -> None:
    assert parse_owner(text) is None


def test_this_process_is_alive_however_long_it_was_idle() -> None:
    here = current_owner()
    assert not here.is_dead(here, silent_s=1e9)


def test_a_process_that_ended_is_dead_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        fields = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        here = current_owner()
        owner = Owner(here.host, child.pid, int(fields[19]))
        assert not owner.is_dead(here, silent_s=0.0)
        child.kill()
        # Until its parent has waited for it, a zombie is left of it: that is dead too.
        assert child.stdin is not None
        while not owner.is_dead(here, silent_s=0.0):
            child.poll()
        child.stdin.close()
    assert owner.is_dead(here, silent_s=0.0)


def test_another_process_with_the_same_id_is_not_the_owner() -> None:
    here = current_owner()
    assert Owner(here.host, here.pid, here.start_ticks - 1).is_dead(here, silent_s=0.0)


def test_a_process_of_another_host_is_presumed_dead_after_an_hour() -> None:
    here = current_owner()
    elsewhere = Owner("0" * 16, here.pid, here.start_ticks)
    assert not elsewhere.is_dead(here, FOREIGN_OWNER_TIMEOUT_S)
    assert elsewhere.is_dead(here, FOREIGN_OWNER_TIMEOUT_S + 1.0)


@pytest.mark.parametrize("silent_s", [-FOREIGN_OWNER_TIMEOUT_S - 1.0, math.nan, -math.inf])
def test_a_sign_of_life_from_the_future_makes_no_process_of_another_host_immortal(silent_s: float) -> None:
    here = current_owner()
    assert Owner("0" * 16, here.pid, here.start_ticks).is_dead(here, silent_s)
