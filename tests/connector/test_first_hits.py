"""Of the first hits after a start one in sixteen is audited, whatever the ratio, unless that is 0."""

from collections.abc import Iterator

import pytest
from tests.connector.audited import AuditedEngine, make_prompts
from tests.connector.fakes import FakeRequest

from kvtier.connector.audit import FIRST_HITS_STRIDE, NUM_FIRST_HITS, FirstHits
from kvtier.connector.request_state import RequestState, make_request_state

PROMPTS = make_prompts(num_tokens=9)
RARE = 1e-9
"""A ratio with which no request of a test is drawn."""


def make_state() -> RequestState:
    return make_request_state(FakeRequest("a", PROMPTS[0]), 1)


@pytest.fixture
def engines() -> Iterator[list[AuditedEngine]]:
    """Engines that are closed when the test ends."""
    made: list[AuditedEngine] = []
    yield made
    for engine in made:
        engine.close()


def find_audited(engine: AuditedEngine, num_hits: int = NUM_FIRST_HITS) -> list[int]:
    """Serve a prompt that is held again and again; return which times it was computed instead of loaded."""
    engine.serve(PROMPTS[0])
    audited = [number for number in range(num_hits) if engine.serve(PROMPTS[0]) == 0]
    assert engine.stat("requests") == len(audited)
    return audited


def test_one_in_sixteen_of_the_first_hits_is_audited_and_none_after_them(
    engines: list[AuditedEngine],
) -> None:
    engines.append(engine := AuditedEngine(audits_first_hits=True, audit_ratio=RARE))

    audited = find_audited(engine, 2 * NUM_FIRST_HITS)

    assert [number // FIRST_HITS_STRIDE for number in audited] == [0, 1, 2, 3]
    assert engine.stat("close_blocks") == 2 * len(audited)


def test_the_seed_decides_which(engines: list[AuditedEngine]) -> None:
    engines += [
        AuditedEngine(audits_first_hits=True, audit_ratio=RARE, audit_seed=seed) for seed in (0, 0, 1)
    ]

    first, again, other = map(find_audited, engines)

    assert first == again
    assert first != other


def test_requests_of_which_nothing_is_held_use_no_draw_up(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audits_first_hits=True, audit_ratio=RARE))
    for prompt in make_prompts(num=20, num_tokens=9):
        engine.serve(prompt)

    assert len(find_audited(engine)) == NUM_FIRST_HITS // FIRST_HITS_STRIDE


def test_blocks_that_an_engine_finds_wrong_from_its_start_are_found_out(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audits_first_hits=True, audit_ratio=RARE))
    engine.serve(PROMPTS[0])
    for key in engine.held:
        row = engine.row_of(key)
        assert row is not None
        row[:] = 0

    for _ in range(FIRST_HITS_STRIDE):
        engine.serve(PROMPTS[0])

    assert engine.stat("wrong_blocks") == 2


@pytest.mark.parametrize("ratio", [0, 0.0])
def test_without_a_ratio_none_is_audited(engines: list[AuditedEngine], ratio: float) -> None:
    engines.append(engine := AuditedEngine(audits_first_hits=True, audit_ratio=ratio))
    engine.serve(PROMPTS[0])

    assert [engine.serve(PROMPTS[0]) for _ in range(NUM_FIRST_HITS)] == [8] * NUM_FIRST_HITS


def test_engines_that_do_not_ask_for_it_audit_by_the_ratio_alone(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=RARE))

    assert find_audited(engine) == []


def test_of_requests_that_arrive_together_one_is_drawn() -> None:
    first_hits, states = FirstHits(0, NUM_FIRST_HITS), [make_state() for _ in range(200)]
    loaded = make_state()
    drawn_at: list[int] = []
    for number in range(0, len(states), 10):  # ten at a time, all of them hits
        drawn = [state for state in states[number : number + 10] if first_hits.draws(state)]
        assert len(drawn) <= 1
        drawn_at += [number] * len(drawn)
        for state in states[number : number + 10]:
            first_hits.on_hit(state if state in drawn else loaded)

    assert len(drawn_at) == NUM_FIRST_HITS // FIRST_HITS_STRIDE


def test_requests_that_end_before_their_search_does_are_not_drawn_for_ever() -> None:
    first_hits = FirstHits(0, NUM_FIRST_HITS)

    drawn = 0
    for _ in range(1000):
        state = make_state()
        drawn += first_hits.draws(state)
        first_hits.on_hit(state)

    assert drawn == NUM_FIRST_HITS // FIRST_HITS_STRIDE
