"""Blocks for which host memory has no room are offered again while their request lives, then counted."""

from dataclasses import replace

from tests.connector.fakes import (
    FakeRequest,
    FakeSpec,
    keys_of,
    make_config,
    make_later_step,
    report_jobs,
)
from tests.tiering.drivers import ALWAYS, ROOMY, make_faulty_driver

from kvtier.base import ReqContext
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.step import NewRequest, StepOutput
from kvtier.misses import MissCause
from kvtier.testing.tiering_driver import ROW_BYTES
from kvtier.tiering.base import CascadeMode

MUST_WRITE = replace(ROOMY, cascade=CascadeMode.MUST_WRITE, max_in_flight_store_bytes=2 * ROW_BYTES)
NUM_SLOTS = 4
PROMPT = list(range(25))
NUM_BLOCKS = 6
TABLE = list(range(NUM_BLOCKS + 1))


class Bench:
    """A scheduler half over host memory with fewer slots than a prompt has blocks, and a tier that must get them."""

    def __init__(self) -> None:
        self.driver, self.tier = make_faulty_driver(NUM_SLOTS, MUST_WRITE)
        self.manager = self.driver.manager
        self.half = OffloadingConnectorScheduler(
            FakeSpec(make_config(), self.manager), clock=self.driver.clock
        )

    def begin(self, request: FakeRequest) -> None:
        """Compute the whole prompt and the first token of the answer in one step."""
        self.half.get_num_new_matched_tokens(request, 0)
        new = NewRequest(request.request_id, (TABLE,))
        self.step(StepOutput([new], num_scheduled_tokens={request.request_id: len(PROMPT)}))
        request.tokens.append(0)

    def decode(self, request: FakeRequest) -> None:
        """Compute one token more."""
        step = make_later_step(request.request_id, request.num_tokens - 1, 1)
        request.tokens.append(0)
        self.step(step)

    def step(self, step: StepOutput) -> None:
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(step)))
        self.manager.check()

    @property
    def num_in_tier(self) -> int:
        return len(self.tier.inner.blocks)  # type: ignore[attr-defined]  # an example


def test_blocks_without_room_are_offered_again_while_the_request_lives() -> None:
    bench = Bench()
    request = FakeRequest("a", list(PROMPT))
    bench.begin(request)
    assert bench.half.has_unstored("a")
    for _ in range(6):
        bench.decode(request)
    assert not bench.half.has_unstored("a")
    bench.half.request_finished(request)
    assert bench.manager.drain(10.0)
    assert bench.num_in_tier == NUM_BLOCKS + 1


def test_blocks_of_an_ended_request_are_not_offered_again_and_counted() -> None:
    bench = Bench()
    bench.tier.faults.delay_ratio = ALWAYS
    request = FakeRequest("a", list(PROMPT))
    bench.begin(request)
    bench.half.request_finished(request)
    bench.tier.faults.delay_ratio = 0.0
    for _ in range(4):
        bench.step(StepOutput())
    drained = bench.manager.drain(10.0)
    assert (bench.num_in_tier, drained.num_lost_blocks) == (NUM_SLOTS, NUM_BLOCKS - NUM_SLOTS)
    assert not bench.half.has_unstored("a")

    again = FakeRequest("b", list(PROMPT))
    while (found := bench.half.get_num_new_matched_tokens(again, 0)[0]) is None:
        bench.step(StepOutput())
    assert found == 4 * NUM_SLOTS
    bench.half.records.on_begun(bench.half._requests["b"], 0)
    (*_, first) = (
        run.miss for record in bench.half.records.latest for run in record.missed if run.first_token == 16
    )
    assert (first.cause, first.detail["reason"]) == (MissCause.NOT_STORED, "no_room")


def test_what_another_request_has_stored_is_not_lost() -> None:
    bench = Bench()
    bench.tier.faults.delay_ratio = ALWAYS
    first, second = FakeRequest("a", list(PROMPT)), FakeRequest("b", list(PROMPT))
    bench.begin(first)
    bench.begin(second)
    bench.half.request_finished(second)
    bench.tier.faults.delay_ratio = 0.0
    for _ in range(6):
        bench.decode(first)
    bench.half.request_finished(first)
    drained = bench.manager.drain(10.0)
    assert bench.num_in_tier == NUM_BLOCKS + 1
    assert drained.num_lost_blocks == 2, "when the second ended nothing had stored its last two blocks"


def test_a_reset_leaves_nothing_to_be_counted() -> None:
    bench = Bench()
    bench.tier.faults.delay_ratio = ALWAYS
    request = FakeRequest("a", list(PROMPT))
    bench.begin(request)
    bench.half.reset()
    bench.half.request_finished(request)
    bench.tier.faults.delay_ratio = 0.0
    for _ in range(3):
        bench.step(StepOutput())
    assert bench.manager.drain(10.0)
    assert all(bench.manager.lookup(key, ReqContext("b")) is False for key in keys_of(PROMPT))
