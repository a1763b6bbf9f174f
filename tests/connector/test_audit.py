"""The audit: which requests it computes, what it compares, and what it does about blocks that are wrong."""

import logging
from collections.abc import Iterator

import pytest
from tests.connector.audited import AuditedEngine, make_prompts
from tests.connector.fakes import (
    FakeBlocks,
    FakeRequest,
    FakeSpec,
    make_config,
    make_first_step,
    make_later_step,
)

from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.step import StepOutput
from kvtier.misses import MissCause

EXAMPLE = {"type": "example", "max_in_flight_store_bytes": "1MiB"}
SLOWER = {**EXAMPLE, "simulate_async": True}
PROMPTS = make_prompts()
NUM_BLOCKS = 8
"""Full blocks of a prompt."""


@pytest.fixture
def engines() -> Iterator[list[AuditedEngine]]:
    """Engines that are closed when the test ends."""
    made: list[AuditedEngine] = []
    yield made
    for engine in made:
        engine.close()


def spoil(engine: AuditedEngine, num_blocks: int = NUM_BLOCKS) -> None:
    """Make the first held blocks wrong."""
    for key in list(engine.held)[:num_blocks]:
        row = engine.row_of(key)
        if row is not None:
            row[:] = 0


def test_an_audited_hit_is_computed_and_compared(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0))
    engine.serve(PROMPTS[0])

    assert engine.serve(PROMPTS[0]) == 0
    assert engine.stat("requests") == 1
    assert engine.stat("close_blocks") == NUM_BLOCKS
    engine.half.manager.check()  # type: ignore[attr-defined]  # every manager of these specs has it


def test_the_cause_of_an_audited_requests_tokens_is_the_audit(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0))
    engine.serve(PROMPTS[0])
    engine.serve(PROMPTS[0])

    missed = [(run.num_tokens, run.miss.cause) for run in engine.half.records.latest[-1].missed]

    assert missed == [(32, MissCause.AUDITED), (1, MissCause.PARTIAL_BLOCK)]


def test_the_share_of_audited_hits_is_the_ratio_and_repeats_with_the_seed(
    engines: list[AuditedEngine],
) -> None:
    loads = []
    for _ in range(2):
        engines.append(engine := AuditedEngine(audit_ratio=0.25, audit_seed=9))
        engine.serve(PROMPTS[0])
        loads.append([engine.serve(PROMPTS[0]) for _ in range(80)])

    assert loads[0] == loads[1]
    assert 10 <= loads[0].count(0) <= 30


@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_audits_other_hits(engines: list[AuditedEngine], seed: int) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=0.25, audit_seed=seed))
    engines.append(other := AuditedEngine(audit_ratio=0.25, audit_seed=seed + 10))
    for one in (engine, other):
        one.serve(PROMPTS[0])

    assert [engine.serve(PROMPTS[0]) for _ in range(40)] != [other.serve(PROMPTS[0]) for _ in range(40)]


def test_without_a_ratio_there_is_no_audit(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=0))
    engine.serve(PROMPTS[0])

    assert engine.half.audit is None
    assert engine.serve(PROMPTS[0]) == 32
    assert not [name for name in engine.half.stats() if name.startswith("audit.")]


def test_a_spec_that_cannot_compare_is_not_audited() -> None:
    half = OffloadingConnectorScheduler(FakeSpec(make_config(audit_ratio=1.0)))

    assert half.audit is None


def test_a_wrong_block_is_named_dropped_and_stored_anew(
    engines: list[AuditedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0))
    engine.serve(PROMPTS[0])
    spoil(engine, num_blocks=1)
    wrong = next(iter(engine.held))

    with caplog.at_level(logging.ERROR):
        engine.serve(PROMPTS[0])

    assert engine.stat("wrong_blocks") == 1
    assert engine.row_of(wrong) is None
    assert f"block {wrong.hex()}" in caplog.text
    assert str(engine.spec.audited_namespace()) in caplog.text
    engine.serve(PROMPTS[0])
    engine.serve(PROMPTS[0])
    assert engine.stat("wrong_blocks") == 1
    assert engine.row_of(wrong) is not None
    assert engine.stat("loads_stopped") == 0


def test_more_wrong_blocks_than_the_limit_stop_every_load_until_an_operator_resumes(
    engines: list[AuditedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=0.5, audit_limit=3))
    for prompt in PROMPTS:
        engine.serve(prompt)
    spoil(engine)
    with caplog.at_level(logging.ERROR):
        while not engine.stat("wrong_blocks"):
            engine.serve(PROMPTS[0])
    assert engine.stat("loads_stopped") == 1
    assert "kvtier audit --resume" in caplog.text

    assert [engine.serve(PROMPTS[1]) for _ in range(20)] == [0] * 20
    assert engine.half.records.latest[-1].missed[0].miss.detail == {"reason": "loads stopped"}

    assert engine.half.audit is not None
    assert engine.half.audit.resume()
    assert 32 in [engine.serve(PROMPTS[1]) for _ in range(20)]


def test_as_many_wrong_blocks_as_the_limit_stop_nothing(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0, audit_limit=3))
    engine.serve(PROMPTS[0])
    spoil(engine, num_blocks=3)
    engine.serve(PROMPTS[0])

    assert engine.stat("wrong_blocks") == 3
    assert engine.stat("loads_stopped") == 0


def test_blocks_of_a_tier_are_brought_up_while_the_request_computes(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(num_slots=10, audit_ratio=1.0, secondary_tiers=[EXAMPLE]))
    engine.serve(PROMPTS[0])
    engine.serve(PROMPTS[1])  # host memory has room for one prompt
    engine.settle()  # the tier has written it, so it may leave

    engine.serve(PROMPTS[0], num_new_tokens=4)

    assert engine.stat("close_blocks") == NUM_BLOCKS
    assert engine.half.stats()["audit.computed_requests.0.example"] == 1
    engine.half.manager.check()  # type: ignore[attr-defined]  # as above


def test_blocks_that_a_drawn_request_has_stored_itself_are_no_hit(
    engines: list[AuditedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tier answers only when half of the prompt is computed and stored."""
    engines.append(engine := AuditedEngine(audit_ratio=1.0, secondary_tiers=[EXAMPLE]))
    tier = engine.half.manager._tiers[0].tier  # type: ignore[attr-defined]  # whose answer is late
    request, table = FakeRequest("cold", list(PROMPTS[0])), list(range(9))
    with monkeypatch.context() as late:
        late.setattr(tier, "lookup", lambda *_: None)
        late.setattr(tier, "drain_answered", lambda: None)
        engine.half.get_num_new_matched_tokens(request, 0)
        engine.half.update_state_after_alloc(request, FakeBlocks((table,)), 0)
        step = make_first_step("cold", (table,), 18)
        engine._step(step)
        engine.settle()
    step = make_later_step("cold", 18, 15)
    engine._step(step)
    request.tokens.append(7)
    engine._step(StepOutput(num_scheduled_tokens={"cold": 1}))
    engine.half.request_finished(request)
    engine.settle()

    assert engine.stat("requests") == engine.stat("lost_blocks") == 0
    assert not [name for name in engine.half.stats() if name.startswith("audit.computed_requests")]
    engine.half.manager.check()  # type: ignore[attr-defined]  # as above


def test_the_record_of_an_audited_request_waits_for_its_search(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(num_slots=10, audit_ratio=1.0, secondary_tiers=[SLOWER]))
    engine.serve(PROMPTS[0])
    engine.serve(PROMPTS[1])
    num_before = engine.half.records.num_requests
    request = FakeRequest("half held", [*PROMPTS[0][:16], *range(17)])
    engine.half.get_num_new_matched_tokens(request, 0)
    engine.half.update_state_after_alloc(request, FakeBlocks((list(range(9)),)), 0)
    assert engine.half.records.num_requests == num_before

    while engine.half.records.num_requests == num_before:
        engine._step(StepOutput())
        engine.clock.advance(1.0)
    engine.half.request_finished(request)

    missed = [(run.num_tokens, run.miss.cause) for run in engine.half.records.latest[-1].missed]
    assert missed == [(16, MissCause.AUDITED), (16, MissCause.NEVER_SEEN), (1, MissCause.PARTIAL_BLOCK)]


def test_what_an_audited_request_computes_is_not_counted_as_faster_computed(
    engines: list[AuditedEngine],
) -> None:
    for audit_ratio, is_counted in ((1.0, False), (1e-9, True)):
        engine = AuditedEngine(
            num_slots=10, audit_ratio=audit_ratio, load_if="faster", secondary_tiers=[SLOWER]
        )
        engines.append(engine)
        for prompt in PROMPTS * 2:
            engine.serve(prompt)
        assert engine.half.load_or_compute is not None
        for _ in range(3):
            engine.half.load_or_compute.report_prefill(100, 1e-6)  # nothing is worth a load
        for prompt in PROMPTS:
            engine.serve(prompt)

        counted = [name for name in engine.half.stats() if "not_loaded" in name]
        assert bool(counted) is is_counted, counted


def test_a_wrong_block_leaves_the_tiers_too(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0, secondary_tiers=[EXAMPLE]))
    engine.serve(PROMPTS[0])
    spoil(engine, num_blocks=1)
    tier = engine.half.manager._tiers[0].tier  # type: ignore[attr-defined]  # what the tier has is the point
    wrong = next(iter(engine.held))
    assert wrong in tier.blocks

    engine.serve(PROMPTS[0])

    assert wrong not in tier.blocks


def test_a_request_that_ends_before_its_tier_delivers_leaves_nothing_behind(
    engines: list[AuditedEngine],
) -> None:
    engines.append(engine := AuditedEngine(num_slots=10, audit_ratio=1.0, secondary_tiers=[SLOWER]))
    engine.serve(PROMPTS[0])
    engine.serve(PROMPTS[1])
    request = FakeRequest("short", list(PROMPTS[0]))
    engine.half.get_num_new_matched_tokens(request, 0)
    engine.half.update_state_after_alloc(request, FakeBlocks((list(range(9)),)), 0)
    engine.half.request_finished(request)
    for _ in range(5):
        engine.settle()

    engine.half.manager.check()  # type: ignore[attr-defined]  # as above
    record = engine.half.records.latest[-1]
    assert record.missed[0].miss.cause is MissCause.AUDITED
    assert sum(run.num_tokens for run in record.missed) == record.num_prompt_tokens


def test_an_aborted_request_unpins_what_was_not_compared(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0))
    engine.serve(PROMPTS[0])
    request = FakeRequest("aborted", list(PROMPTS[0]))
    engine.half.get_num_new_matched_tokens(request, 0)
    assert engine.half.stats()["primary.evictable_blocks"] == 0

    engine.half.request_finished(request)

    assert engine.half.stats()["primary.evictable_blocks"] == NUM_BLOCKS
    assert engine.stat("lost_blocks") == NUM_BLOCKS


def test_a_reset_during_an_audit_frees_every_slot(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0))
    engine.serve(PROMPTS[0])
    request = FakeRequest("r", list(PROMPTS[0]))
    engine.half.get_num_new_matched_tokens(request, 0)
    table = list(range(9))
    engine.half.update_state_after_alloc(request, FakeBlocks((table,)), 0)
    step = make_first_step("r", (table,), 16)  # half of its blocks are being compared, half are pinned

    engine._step(step)
    engine.half.reset()
    engine.settle()
    engine.half.request_finished(request)
    engine.settle()

    engine.half.manager.check()  # type: ignore[attr-defined]  # as above
    assert engine.half.stats()["primary.free_blocks"] == 64


def test_a_prompt_computed_in_parts_is_compared_in_parts(engines: list[AuditedEngine]) -> None:
    engines.append(engine := AuditedEngine(audit_ratio=1.0))
    engine.serve(PROMPTS[0])
    request = FakeRequest("r", list(PROMPTS[0]))
    engine.half.get_num_new_matched_tokens(request, 0)
    table = list(range(9))
    engine.half.update_state_after_alloc(request, FakeBlocks((table,)), 0)
    engine._compute(PROMPTS[0], 0)
    step = make_first_step("r", (table,), 18)
    engine._step(step)
    engine.settle()
    assert engine.stat("close_blocks") == 4
    step = make_later_step("r", 18, 15)
    engine._step(step)
    engine.settle()

    assert engine.stat("close_blocks") == NUM_BLOCKS


class Disk:
    """An engine whose hits come from a tier that takes its time, and whose estimates say that loading pays."""

    def __init__(self, seed: int = 1) -> None:
        self.engine = AuditedEngine(
            num_slots=10,
            audit_ratio=1 / 50,
            audit_seed=seed,
            load_if="faster",
            secondary_tiers=[SLOWER],
            lookup_deadline_s=1000.0,
        )
        self.engine.compute_s = lambda num_tokens: 0.001 * num_tokens
        chooser = self.engine.half.load_or_compute
        assert chooser is not None
        for _ in range(20):
            chooser.report_prefill(100, 1000.0)  # computing is taken to be far slower than it is
        for prompt in PROMPTS:
            self.engine.serve(prompt)
        self.num_requests = 0

    def serve(self, wait_s: float) -> bool:
        """Serve the next prompt, whose blocks have left host memory; return whether it was loaded."""
        self.engine.wait_s = wait_s
        self.num_requests += 1
        return self.engine.serve(PROMPTS[self.num_requests % len(PROMPTS)]) > 0

    def is_off(self) -> bool:
        """Return whether loading is switched off."""
        return self.engine.half.stats().get("audit.switched_off.0.example") == 1.0


FAST_S, SLOW_S = 1e-4, 0.05
"""Between two steps while a block is on its way: at the second a prompt of 8 KiB comes at less than 5 MB/s."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_loading_from_a_slowed_disk_is_switched_off_and_on_again_when_it_recovers(
    engines: list[AuditedEngine], seed: int
) -> None:
    disk = Disk(seed)
    engines.append(disk.engine)
    for _ in range(400):
        disk.serve(FAST_S)
    assert not disk.is_off()

    num_slow = 0
    while not disk.is_off():
        num_slow += 1
        disk.serve(SLOW_S)
    assert num_slow <= 200
    loads = [disk.serve(SLOW_S) for _ in range(200)]
    assert 0 < sum(loads) < 40  # the treatment arm goes on

    num_fast = 0
    while disk.is_off():
        num_fast += 1
        disk.serve(FAST_S)
    assert num_fast <= 400
    assert sum(disk.serve(FAST_S) for _ in range(100)) > 80
