"""What a manager and a tier with ``lookup`` alone say of a run of keys, against every outcome of what is pending."""

import itertools
from collections.abc import Collection, Iterator, Sequence

import pytest

from kvtier.base import LoadStoreSpec, OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext, Run
from kvtier.testing.tier_suite import key_of, make_config, make_rows
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager

REQUEST = ReqContext("r")
NUM_BLOCKS = 5

Answers = Sequence[bool | None]


class ScriptedManager(OffloadingManager):
    """Answers a lookup of key n with the n-th answer, and notes which were looked up."""

    def __init__(self, answers: Answers) -> None:
        self.answers = {key_of(number): answer for number, answer in enumerate(answers)}
        self.looked_up: list[OffloadKey] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.looked_up.append(key)
        return self.answers[key]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        raise NotImplementedError

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        raise NotImplementedError


class ScriptedTier(SecondaryTierManager):
    """The same as a tier."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(make_config(), make_rows())
        self.manager = ScriptedManager(answers)

    @staticmethod
    def get_tier_type() -> str:
        return "scripted"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.manager.lookup(key, req_context)

    def submit_store(self, job: JobMetadata) -> None:
        raise NotImplementedError

    def submit_load(self, job: JobMetadata) -> None:
        raise NotImplementedError

    def get_finished(self) -> list[JobResult]:
        return []


def keys_of(answers: Sequence[object]) -> list[OffloadKey]:
    return [key_of(number) for number in range(len(answers))]


def run_of(answers: Answers) -> Run:
    return ScriptedManager(answers).find_run(keys_of(answers), REQUEST)


def window_of(answers: Answers, num_blocks: int) -> Run:
    return ScriptedManager(answers).find_window(keys_of(answers), num_blocks, REQUEST)


def outcomes(answers: Answers) -> Iterator[list[bool | None]]:
    """Yield every way in which the blocks in flight can end."""
    pending = [number for number, answer in enumerate(answers) if answer is None]
    for ended in itertools.product((True, False), repeat=len(pending)):
        final = list(answers)
        for number, answer in zip(pending, ended, strict=True):
            final[number] = answer
        yield final


PATTERNS = list(itertools.product((True, False, None), repeat=NUM_BLOCKS))


def test_a_run_is_what_is_held_when_all_that_is_pending_arrives_and_what_is_ready_now() -> None:
    for answers in PATTERNS:
        ends = {run_of(final).num_held for final in outcomes(answers)}
        assert run_of(answers) == (max(ends), min(ends)), answers


def test_a_run_that_is_final_is_that_of_the_leading_true_answers() -> None:
    assert run_of([True, True, False, True]) == (2, 2)
    assert run_of([False, None]) == (0, 0)
    assert run_of([]) == (0, 0)


def test_the_keys_behind_one_in_flight_are_looked_up_and_those_behind_an_absent_one_are_not() -> None:
    manager = ScriptedManager([None, True, False, True])
    manager.find_run(keys_of(range(4)), REQUEST)
    assert manager.looked_up == [key_of(0), key_of(1), key_of(2)]


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_window_that_is_final_is_the_same_however_what_is_pending_ends(num_blocks: int) -> None:
    for answers in PATTERNS:
        held, ready = window_of(answers, num_blocks)
        ends = {window_of(final, num_blocks).num_held for final in outcomes(answers)}
        assert held == max(ends), answers
        assert ready in {0, held}
        if ready == held:
            assert all(answers[max(0, held - num_blocks) : held])


def test_a_gap_drops_what_is_in_flight_to_its_right() -> None:
    assert window_of([True, True, False, None], 2) == (2, 2)
    assert window_of([True, True, None, True], 2) == (4, 0)
    assert window_of([True, None], 3) == (2, 0)
    assert window_of([], 2) == (0, 0)


def test_nothing_left_of_a_window_is_looked_up() -> None:
    manager = ScriptedManager([True, True, True, None, True])
    assert manager.find_window(keys_of(range(5)), 2, REQUEST) == (5, 0)
    assert manager.looked_up == [key_of(4), key_of(3)]


def test_a_tier_answers_a_run_up_to_the_first_that_it_does_not_hold() -> None:
    tier = ScriptedTier([True, None, False, True])
    assert tier.lookup_run(keys_of(range(4)), REQUEST) == [True, None, False]
    assert ScriptedTier([True, None]).lookup_run(keys_of([True, None]), REQUEST) == [True, None]


def test_abilities_that_a_manager_does_not_have_are_said_by_value() -> None:
    manager = ScriptedManager([])
    assert manager.locator is None
    assert manager.explain(key_of(1), REQUEST) is None
    assert manager.pin([key_of(1)], 1.0) is None
    assert manager.unpin(None) is None
    assert manager.purge(None) is None
    assert manager.drop([key_of(1)]) is None
    assert manager.drain(1.0)
    assert not manager.promoted_for(REQUEST)
    assert not manager.will_have_room()


def test_a_tier_that_cannot_purge_says_so_by_value() -> None:
    tier = ScriptedTier([])
    for tenant, blocks in ((None, "cannot purge while"), (7, "cannot purge one tenant's blocks while")):
        outcome = tier.purge(tenant)
        assert outcome is not None
        assert blocks in outcome.error
    assert tier.probe({}) is None
