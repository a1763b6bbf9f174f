"""What an audit's numbers say to people."""

from math import inf
from typing import Any

import pytest

from kvtier.connector.control_arm import SavedInterval
from kvtier.errors import ControlError
from kvtier.observe.audit import describe_saved, explain_audit, read_saved
from kvtier.observe.control_commands import make_command

NUMBERS = {
    "audit.requests": 40.0,
    "audit.wrong_blocks": 0.0,
    "audit.loads_stopped": 0.0,
    "audit.loaded_requests.1024.fs": 900.0,
    "audit.computed_requests.1024.fs": 40.0,
    "audit.switched_off.1024.fs": 1.0,
    "audit.saved_s.mean.1024.fs": -2e-4,
    "audit.saved_s.low.1024.fs": -3e-4,
    "audit.saved_s.high.1024.fs": -1e-4,
    "audit.loaded_requests.0.host": 5.0,
    "audit.computed_requests.0.host": 1.0,
    "audit.switched_off.0.host": 0.0,
}


def test_the_intervals_are_read_by_tier_and_length() -> None:
    fs, host = read_saved(NUMBERS)

    assert fs == SavedInterval("fs", 1024, -2e-4, -3e-4, -1e-4, 900, 40, is_off=True)
    assert (host.low_s, host.high_s) == (-inf, inf)


def test_seconds_a_token_are_told_as_milliseconds_a_thousand() -> None:
    fs, host = read_saved(NUMBERS)

    assert describe_saved(fs) == "-200 ms (-300 to -100)"
    assert describe_saved(host) == "not known yet"


def test_a_tier_that_costs_time_is_a_finding_and_others_are_none() -> None:
    assert [found.name for found in explain_audit(NUMBERS)] == ["fs_slower_than_computing"]


def test_wrong_blocks_and_stopped_loads_are_findings() -> None:
    wrong = {"audit.wrong_blocks": 2.0}

    assert [found.name for found in explain_audit(wrong)] == ["wrong_blocks"]
    assert [found.name for found in explain_audit({**wrong, "audit.loads_stopped": 1.0})] == ["loads_stopped"]
    assert explain_audit({}) == []


class Stopped:
    """A scheduler half whose audit has stopped loading, or that has none."""

    def __init__(self, *, has_audit: bool) -> None:
        self.audit = self if has_audit else None
        self.num_resumed = 0

    def resume(self) -> bool:
        self.num_resumed += 1
        return self.num_resumed == 1


def test_an_operator_resumes_stopped_loads() -> None:
    half: Any = Stopped(has_audit=True)  # Any: what the command reads of a half
    command = make_command("resume", {}, None)

    assert command.advance(half, 0.0) == {"ok": True, "was_stopped": True}
    assert command.advance(half, 0.0) == {"ok": True, "was_stopped": False}


def test_an_engine_without_an_audit_says_so() -> None:
    half: Any = Stopped(has_audit=False)  # Any: as above

    with pytest.raises(ControlError, match="audits no request"):
        make_command("resume", {}, None).advance(half, 0.0)
