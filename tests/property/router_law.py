"""The law of events: what a router believes of an engine can be loaded from it.

A loss is known once the tier has told it: by an eviction, a lookup that finds nothing, or a load that does not bring
the block. A wipe by another program is not known until then. The router reads the events at the end of each step.
"""

import random
from collections.abc import Iterable, Sequence

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.indexer import BlockIndexer
from kvtier.testing.tier_driver import FIRST_STATE
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import DeviceStore, TieringDriver, TierMaker
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.example import ExampleSecondaryTier

NUMBERS_IN_USE = [*range(8), *range(FIRST_STATE, FIRST_STATE + 8)]
"""Blocks, and the states after them."""


class WatchedTier(FaultyTier):
    """A faulty tier that remembers which losses it has told.

    Attributes:
        inner: what really keeps the blocks.
        wiped: blocks that another program has deleted and that the tier has not told yet.
        stored: blocks that it was ever given to store.
        loaded: blocks that it was ever asked to load.
    """

    inner: ExampleSecondaryTier

    def __init__(self, inner: ExampleSecondaryTier, faults: Faults, rng: random.Random) -> None:
        super().__init__(inner, faults, rng)
        self.wiped: set[OffloadKey] = set()
        self.stored: set[OffloadKey] = set()
        self.loaded: set[OffloadKey] = set()
        self._loads: dict[JobId, JobMetadata] = {}

    def wipe(self) -> None:
        """Another program deletes everything."""
        self.wiped.update(self.inner.blocks)
        self.inner.clear()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = super().lookup(key, req_context)
        if answer is False:
            self.wiped.discard(key)
        return answer

    def submit_store(self, job: JobMetadata) -> None:
        self.stored.update(job.keys)
        super().submit_store(job)

    def submit_load(self, job: JobMetadata) -> None:
        self.loaded.update(job.keys)
        super().submit_load(job)
        self._loads[job.job_id] = job

    def get_finished(self) -> Iterable[JobResult]:
        results = list(super().get_finished())
        for result in results:
            job = self._loads.pop(result.job_id, None)
            if job is not None and not result.success:
                self.wiped.difference_update(set(job.keys) - (result.successful_keys or frozenset()))
        return results


class WatchedDriver(TieringDriver):
    """A driver whose events a router reads after each step.

    Args:
        num_blocks: slots of the primary.
        make_tiers: builds the tiers, each a WatchedTier.
        router: reads the events.
        cache_policy: name of the primary's policy.
        lookup_deadline_s: seconds a request may wait.

    Attributes:
        num_steps: steps after which the law was checked.
        offered: blocks that the engine ever wanted to store.
        reserved: those that ever got a slot for it.
        num_failed_stores: stores of the device that failed.
    """

    def __init__(
        self,
        num_blocks: int,
        make_tiers: TierMaker,
        router: BlockIndexer,
        cache_policy: str = "lru",
        lookup_deadline_s: float = 5.0,
    ) -> None:
        super().__init__(
            num_blocks, make_tiers, cache_policy=cache_policy, lookup_deadline_s=lookup_deadline_s
        )
        self.router = router
        self.num_steps = 0
        self.offered: set[OffloadKey] = set()
        self.reserved: set[OffloadKey] = set()
        self.num_failed_stores = 0

    def begin_store(self, numbers: Sequence[int], req_context: ReqContext) -> DeviceStore | None:
        self.offered.update(map(key_of, numbers))
        store = super().begin_store(numbers, req_context)
        self.reserved.update(map(key_of, store.numbers if store is not None else ()))
        return store

    def end_store(self, store: DeviceStore, *, success: bool = True) -> None:
        self.num_failed_stores += not success
        super().end_store(store, success=success)

    def step(self) -> None:
        super().step()
        self.router.apply(self.manager.take_events())
        self.check_router()
        self.num_steps += 1

    def check_router(self) -> None:
        """Fail when the router believes of a block that it can be loaded, and it is known that it cannot."""
        ready = {key_of(number) for number in NUMBERS_IN_USE if self.primary.is_ready(key_of(number))}
        told = {key for key in self.router.held_in("CPU") if key in map(key_of, NUMBERS_IN_USE)}
        assert told == ready, "the router has a wrong view of host memory"
        guards = self.manager._tiers  # whether a tier may be used is known to its guard alone
        for guard, name in zip(guards, ("faulty", "faulty.1"), strict=False):
            tier = guard.tier
            assert isinstance(tier, WatchedTier)
            tier.wiped.difference_update(tier.inner.blocks)
            believed = self.router.held_in("faulty", name)
            if guard.is_out_of_service or not guard.breaker.is_closed:
                assert not believed, f"{name} cannot be used, and the router does not know"
            lies = believed - set(tier.inner.blocks) - tier.wiped
            assert not lies, f"{name} is believed to hold {sorted(key.hex() for key in lies)}"
            paused = {key for key in believed if guard.backoff.is_paused(key)}
            assert not paused, f"{name} leaves alone {sorted(key.hex() for key in paused)}"

    def stop(self) -> None:
        """End the manager as an engine does; the router then expects nothing of it."""
        self.manager.shutdown()
        self.router.apply(self.manager.take_events())
        assert len(self.router) == 0, "the engine has ended, and the router still counts on it"
