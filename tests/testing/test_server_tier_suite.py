"""The suite of tiers with a server passes one that is right, and each wrong one fails in the test that is for it."""

import pytest
from tests.testing import wrong_tiers

pytest_plugins = ["pytester"]

UNWANTED = ("cacheprovider", "faulthandler", "timeout", "cov", "hypothesispytest")
"""Plugins of the outer run that the inner one would disturb."""


AWAY = "costs_faults_that_are_said"
UNDER_WAY = "jobs_under_way_when"
SHUTDOWN = "open_at_a_shutdown"
LATE_WRITE = "writes_into_no_slot"
STEP = "keeps_nobody_waiting"
CHAOS = "random_outages"
FULL = "full_server"
NAMESPACE = "another_namespace_sees"
EPOCH = "an_epoch"
OLD_AFTER_RESET = "after_a_reset_nothing_old"
UNDER_WAY_AT_RESET = "under_way_at_a_reset"
DAMAGE = "a_damaged_value"
DAMAGED_BLOCK = "a_damaged_block"
FOREIGN = "a_value_of_another_namespace"
DEADLINE = "behind_a_manager"
ROUND_TRIP = "any_bytes"
WRITTEN_OVER = "written_over"

CAUGHT_BY = {
    "RepeatsFaults": [AWAY, UNDER_WAY, SHUTDOWN, CHAOS],
    "DropsFaults": [AWAY, UNDER_WAY, FULL],
    "DropsWhatIsOpen": [SHUTDOWN],
    "ClaimsSuccess": [AWAY, UNDER_WAY, LATE_WRITE, CHAOS],
    "HidesFaults": [AWAY],
    "StaysAway": [AWAY, UNDER_WAY],
    "WritesLate": [LATE_WRITE],
    "AsksInTheStep": [STEP, DEADLINE],
    "EndsWhenItLikes": [SHUTDOWN, DEADLINE],
    "LoadsWhatDoesNotFit": [FULL],
    "DropsWhatDoesNotFit": [FULL],
    "KnowsNoNamespace": [EPOCH],
    "SharesOneNamespace": [NAMESPACE],
    "BelievesAnything": [DAMAGE, DAMAGED_BLOCK, FOREIGN],
    "HasNoChecksum": [DAMAGE, DAMAGED_BLOCK],
    "StaysInItsEpoch": [EPOCH, OLD_AFTER_RESET, UNDER_WAY_AT_RESET],
    "CountsNothing": [DAMAGE, FOREIGN],
    "KeepsDamage": [DAMAGE, DAMAGED_BLOCK],
    "RemovesForeign": [FOREIGN],
    "StripsZeros": [ROUND_TRIP],
    "KeepsTheSlot": [WRITTEN_OVER],
    "NobodyIsKilled": [AWAY],
    "NobodyHangs": [AWAY, LATE_WRITE],
    "NothingIsFull": [FULL],
    "NobodyLooks": [DAMAGE, FOREIGN],
}
"""By what is wrong, words from the names of the tests that fail for it."""


def run(pytester: pytest.Pytester, name: str, *options: str) -> tuple[int, int, list[str]]:
    """Run the suite over one of the tiers; return how many tests passed, were skipped, and which failed."""
    pytester.makepyfile(f"from tests.testing.wrong_tiers import {name} as TestIt")
    without = [word for plugin in UNWANTED for word in ("-p", f"no:{plugin}")]
    outcomes = pytester.inline_run("-q", *without, *options).listoutcomes()
    return len(outcomes[0]), len(outcomes[1]), [report.nodeid for report in outcomes[2]]


@pytest.mark.slow
def test_a_right_tier_passes(pytester: pytest.Pytester) -> None:
    num_passed, num_skipped, failed = run(pytester, "RightSuite")
    assert num_passed > 0
    # Metric families are declared for kvtier's own tiers, and this tier knows no other namespaces: two tests.
    assert (num_skipped, failed) == (3, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name, tests in CAUGHT_BY.items() for words in tests]
)
def test_a_wrong_one_fails(pytester: pytest.Pytester, name: str, words: str) -> None:
    _, _, failed = run(pytester, name, "-k", words)
    assert failed


def test_every_wrong_one_is_tried() -> None:
    suites = {name for name, value in vars(wrong_tiers).items() if isinstance(value, type)}
    wrong = {name for name in suites if issubclass(getattr(wrong_tiers, name), wrong_tiers.WrongSuite)}
    assert wrong - {"WrongSuite"} == set(CAUGHT_BY)
