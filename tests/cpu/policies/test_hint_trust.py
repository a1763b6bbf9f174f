"""Sources of hints are judged by what their sessions then do, each by itself, in bounded memory."""

import pytest

from kvtier.cpu.policies.hint_trust import (
    JUDGED_AFTER_S,
    MAX_CLAIMS,
    MAX_SOURCES,
    TIME_FACTOR,
    HintTrust,
)
from kvtier.hints.values import NO_HINTS, RequestHints


def hear_sessions(
    trust: HintTrust, tenant: str, num: int, *, begin_s: float, returns: bool, **said: object
) -> float:
    """Let sessions say something and come back a minute later, or not; return the time after them."""
    for number in range(num):
        at_s = begin_s + 100.0 * number
        session = f"{tenant}-{begin_s}-{number}"
        trust.hear(RequestHints(session=session, tenant=tenant, **said), at_s)  # type: ignore[arg-type]
        if returns:
            trust.hear(RequestHints(session=session, tenant=tenant), at_s + 60.0)
    end_s = begin_s + 100.0 * num + 2 * JUDGED_AFTER_S
    trust.hear(RequestHints(tenant="clock"), end_s)
    return end_s


def is_believed(trust: HintTrust, tenant: str, at_s: float) -> bool:
    hints = RequestHints(session="asks", tenant=tenant, continues=True)
    return trust.hear(hints, at_s) is hints


@pytest.mark.parametrize(
    ("said", "returns", "is_right"),
    [
        ({"continues": True}, True, True),
        ({"continues": True}, False, False),
        ({"continues": False}, True, False),
        ({"continues": False}, False, True),
        ({"returns_in_s": 60.0}, True, True),
        ({"returns_in_s": 0.9 * 60.0 * TIME_FACTOR}, True, True),
        ({"returns_in_s": 1.1 * 60.0 * TIME_FACTOR}, True, False),
        ({"returns_in_s": 1.1 * 60.0 / TIME_FACTOR}, True, True),
        ({"returns_in_s": 0.9 * 60.0 / TIME_FACTOR}, True, False),
        ({"returns_in_s": 60.0}, False, False),
    ],
)
def test_who_is_right_is_believed_and_who_is_wrong_is_not(
    said: dict[str, object], returns: bool, is_right: bool
) -> None:
    trust = HintTrust()
    end_s = hear_sessions(trust, "a", 20, begin_s=0.0, returns=returns, **said)
    assert is_believed(trust, "a", end_s) is is_right
    assert (trust.right_ratio("ta") > 0.8) is is_right


def test_an_unknown_source_is_believed_at_first_and_then_as_all_are() -> None:
    trust = HintTrust()
    assert is_believed(trust, "new", 0.0)
    end_s = hear_sessions(trust, "liar", 60, begin_s=1.0, returns=True, continues=False)
    assert not is_believed(trust, "newer", end_s)


def test_an_honest_tenant_among_liars_is_believed() -> None:
    trust = HintTrust()
    end_s = hear_sessions(trust, "honest", 30, begin_s=0.0, returns=True, continues=True)
    end_s = hear_sessions(trust, "liar", 60, begin_s=end_s, returns=True, continues=False)
    assert is_believed(trust, "honest", end_s)
    assert not is_believed(trust, "liar", end_s)


def test_a_liar_who_changes_is_believed_again() -> None:
    trust = HintTrust()
    end_s = hear_sessions(trust, "a", 100, begin_s=0.0, returns=True, continues=False)
    assert not is_believed(trust, "a", end_s)
    end_s = hear_sessions(trust, "a", 150, begin_s=end_s, returns=True, continues=True)
    assert is_believed(trust, "a", end_s)


def test_a_session_without_a_tenant_is_a_source_of_its_own() -> None:
    trust = HintTrust()
    for turn in range(20):
        trust.hear(RequestHints(session="x", continues=False), 10.0 * turn)
    said = RequestHints(session="x", continues=False)
    assert trust.hear(said, 300.0) is NO_HINTS


def test_sessions_of_two_tenants_with_one_name_are_two() -> None:
    trust = HintTrust()
    for turn in range(20):
        trust.hear(RequestHints(session="1", tenant=f"t{turn % 2}", continues=turn > 17), 10.0 * turn)
    assert trust.right_ratio("tt0") < 0.5
    assert trust.hear(RequestHints(session="1", tenant="t3", continues=False), 200.0) is NO_HINTS


def test_hints_of_a_client_without_a_name_are_passed_on() -> None:
    trust = HintTrust()
    hear_sessions(trust, "liar", 60, begin_s=1.0, returns=True, continues=False)
    said = RequestHints(continues=False)
    assert trust.hear(said, 10_000.0) is said


@pytest.mark.slow
def test_memory_is_bounded_however_many_names_a_client_makes_up() -> None:
    trust = HintTrust()
    for number in range(3 * MAX_CLAIMS):
        trust.hear(RequestHints(session=f"s{number}", returns_in_s=1e6), 0.001 * number)
    for number in range(2 * MAX_SOURCES):
        for _ in range(2):
            trust.hear(RequestHints(session=f"u{number}", continues=True), 100.0 + 0.001 * number)
    assert len(trust) <= MAX_CLAIMS + 2 * MAX_CLAIMS + MAX_SOURCES + 1
