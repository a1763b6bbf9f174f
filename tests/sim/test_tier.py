"""A simulated tier keeps the contract of a tier, and its directory is ordered as a real one's."""

from collections.abc import Sequence

import numpy as np

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.sim.link import LinkSpeed
from kvtier.sim.tier import SimulatedTier, TierModel, make_tier
from kvtier.sim.timeline import Timeline
from kvtier.sim.trace import BlockKeys
from kvtier.tiering.base import JobMetadata, JobResult, TierSettings

CONFIG = OffloadingConfig("e", ModelIdentity("m"), (KVGroup(16, ("all",), 100),), hash_block_size=16)
CONTEXT = ReqContext("r")
KEYS = BlockKeys()


class Driven:
    """A tier of 100 bytes a second with blocks of 100 bytes, and the jobs it was given."""

    def __init__(self, num_blocks: int, job_timeout_s: float = 30.0) -> None:
        self.timeline = Timeline()
        self.num_wakes = 0
        model = TierModel(
            "disk", num_blocks, LinkSpeed(100, 100), settings=TierSettings(job_timeout_s=job_timeout_s)
        )
        view = memoryview(bytearray(8)).cast("b", (8, 1))
        self.tier: SimulatedTier = make_tier(CONFIG, view, model, self.timeline, 100, self.wake)
        self._num_jobs = 0

    def wake(self) -> None:
        self.num_wakes += 1

    def submit(self, *ids: int, is_load: bool = False) -> JobId:
        job = JobMetadata(JobId(self._num_jobs), tuple(KEYS.of(ids)), np.arange(len(ids)), is_load, CONTEXT)
        self._num_jobs += 1
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return job.job_id

    def after(self, seconds: float) -> Sequence[JobResult]:
        """Return what has ended when so much time has passed."""
        self.timeline.advance_to(self.timeline() + seconds)
        return self.tier.get_finished()

    def held(self, *ids: int) -> list[int]:
        return [one for one in ids if self.tier.lookup(KEYS.of([one])[0], CONTEXT)]


def keys(*ids: int) -> frozenset[OffloadKey]:
    return frozenset(KEYS.of(ids))


def test_it_has_the_name_of_its_model() -> None:
    assert Driven(4).tier.get_tier_type() == "disk"


def test_a_block_is_held_when_its_store_has_ended() -> None:
    driven = Driven(4)
    job_id = driven.submit(1, 2)

    assert driven.after(1.5) == []
    assert driven.held(1, 2) == []
    assert driven.after(0.5) == [JobResult(job_id, success=True)]
    assert driven.held(1, 2) == [1, 2]
    assert driven.num_wakes == 1
    assert driven.after(9) == []


def test_what_is_held_is_not_written_again() -> None:
    driven = Driven(4)
    driven.submit(1)
    driven.after(1)

    job_id = driven.submit(1)

    assert driven.after(0) == [JobResult(job_id, success=True)]
    assert driven.tier.num_written_blocks == 1


def test_a_touch_keeps_a_block_from_leaving_next() -> None:
    driven = Driven(2)
    driven.submit(1, 2)
    driven.after(2)
    driven.tier.touch(KEYS.of([1]), CONTEXT)

    driven.submit(3)

    assert driven.held(1, 2) == [1]


def test_a_block_that_is_stored_again_does_not_leave_next() -> None:
    driven = Driven(2)
    driven.submit(1)
    driven.submit(2)
    driven.after(2)

    driven.submit(1)
    driven.submit(3)
    driven.after(2)

    assert driven.held(1, 2, 3) == [1, 3]


def test_what_is_being_read_does_not_leave_and_may_when_it_has_been_read() -> None:
    driven = Driven(1)
    driven.submit(1)
    driven.after(1)
    load = driven.submit(1, is_load=True)

    refused = driven.submit(2)

    assert driven.after(0) == [JobResult(refused, success=False, successful_keys=frozenset(), is_fault=False)]
    assert driven.after(1) == [JobResult(load, success=True)]
    stored = driven.submit(2)
    assert driven.after(1) == [JobResult(stored, success=True)]
    assert driven.held(1, 2) == [2]


def test_a_store_without_room_for_all_keeps_what_fits() -> None:
    driven = Driven(2)
    job_id = driven.submit(1, 2, 3)

    assert driven.after(2) == [JobResult(job_id, success=False, successful_keys=keys(1, 2), is_fault=False)]


def test_a_load_brings_what_is_still_held_and_that_is_no_fault() -> None:
    driven = Driven(4)
    driven.submit(1)
    driven.after(1)

    job_id = driven.submit(1, 2, is_load=True)

    assert driven.after(1) == [JobResult(job_id, success=False, successful_keys=keys(1), is_fault=False)]


def test_what_nobody_has_begun_is_given_up_at_the_time_out_and_that_is_a_fault() -> None:
    driven = Driven(8, job_timeout_s=1.5)
    job_id = driven.submit(1, 2, 3, 4)

    assert driven.after(1.75) == []
    assert driven.after(0.25) == [JobResult(job_id, success=False, successful_keys=keys(1, 2), is_fault=True)]
    assert driven.held(1, 2, 3, 4) == [1, 2]


def test_what_was_given_up_was_not_written() -> None:
    driven = Driven(8, job_timeout_s=1.5)
    driven.submit(1, 2, 3, 4)
    driven.after(9)

    assert driven.tier.num_written_blocks == 2
    assert driven.tier.link.traffic.written_bytes == 200


def test_the_time_out_wakes_the_engine_without_being_asked() -> None:
    driven = Driven(8, job_timeout_s=1.5)
    driven.submit(1, 2, 3)
    driven.submit(4)

    driven.timeline.advance_to(1.5)

    assert driven.num_wakes == 1
    assert driven.timeline.next_s == 2.0


def test_a_job_that_ends_in_time_leaves_no_time_out_behind() -> None:
    driven = Driven(8)
    driven.submit(1)

    driven.timeline.advance_to(1.0)

    assert driven.timeline.next_s is None


def test_the_oldest_wait_is_told() -> None:
    driven = Driven(8)
    driven.submit(1, 2, 3)
    driven.submit(4)
    driven.after(0.5)

    assert driven.tier.waiting_s() == 0.5
