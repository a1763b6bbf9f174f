"""Drives a TieringOffloadingManager as an engine would, with real bytes and an oracle that knows them.

It is no engine: a block's bytes follow from its key, the test writes them where a device store would and
compares them where a device load would. Every call is followed by the manager's own check of its laws.
"""

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from kvtier.locations import LocatedRun
from kvtier.tenants import Tenants
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import FIRST_STATE
from kvtier.testing.tier_suite import content_of, key_of, make_rows
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.manager import (
    DEFAULT_SHUTDOWN_S,
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

TierMaker = Callable[[memoryview], list[SecondaryTierManager]]
"""Builds the tiers over the primary's rows."""

ROW_BYTES = 4096


class ArrayRegion:
    """Rows in ordinary memory, in place of a shared region.

    Args:
        num_blocks: rows.
    """

    def __init__(self, num_blocks: int) -> None:
        self.rows = make_rows(num_blocks, ROW_BYTES)
        self.is_cleaned = False

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows."""
        return memoryview(self.rows)

    def cleanup(self) -> None:
        """Note that the memory was given back."""
        self.is_cleaned = True


class DeviceStore:
    """A store that has been prepared and not yet completed.

    Attributes:
        numbers: the blocks that got a slot.
        slots: their slots.
        req_context: the request.
    """

    def __init__(self, numbers: list[int], slots: list[int], req_context: ReqContext) -> None:
        self.numbers = numbers
        self.slots = slots
        self.req_context = req_context


class TieringDriver:
    """A manager, its primary and its tiers, with a clock that the test moves.

    Args:
        num_blocks: slots of the primary.
        make_tiers: builds the tiers over the primary's rows.
        cache_policy: name of the primary's policy.
        lookup_deadline_s: seconds a request may wait.
        store_threshold: of the primary's reuse filter.
        shutdown_timeout_s: seconds that a shutdown gives the tiers.
        ttl_s: seconds that a block of the primary lives; None: for ever.
        tenants: the tenants of requests; None: there are none.
    """

    def __init__(
        self,
        num_blocks: int,
        make_tiers: TierMaker,
        *,
        cache_policy: str = "lru",
        lookup_deadline_s: float = 5.0,
        store_threshold: int = 0,
        shutdown_timeout_s: float = DEFAULT_SHUTDOWN_S,
        ttl_s: float | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.region = ArrayRegion(num_blocks)
        self.primary = CPUPrimaryTierOffloadingManager(
            num_blocks,
            self.region,
            cache_policy,
            enable_events=True,
            store_threshold=store_threshold,
            clock=self.clock,
            ttl_s=ttl_s,
            tenants=tenants,
        )
        self.tiers = make_tiers(self.primary.get_kv_memoryview())
        epochs = count()
        self.manager = TieringOffloadingManager(
            self.primary,
            self.tiers,
            enable_events=True,
            lookup_deadline_s=lookup_deadline_s,
            shutdown_timeout_s=shutdown_timeout_s,
            measures_loads=True,
            clock=self.clock,
            make_epoch=lambda: next(epochs).to_bytes(16, "big"),  # none comes twice
        )
        self.rows: npt.NDArray[np.int8] = np.asarray(self.region.rows)
        self.generation = 0

    def begin_store(self, numbers: Sequence[int], req_context: ReqContext) -> DeviceStore | None:
        """Prepare a store and write the blocks' bytes into their slots; None when there is no room."""
        output = self.manager.prepare_store([key_of(number) for number in numbers], req_context)
        self.manager.check()
        if output is None:
            return None
        stored = [number_of(key) for key in output.keys_to_store]
        assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
        slots = [int(slot) for slot in output.store_spec.block_ids]
        for number, slot in zip(stored, slots, strict=True):
            self.rows[slot] = self.content(number)
        return DeviceStore(stored, slots, req_context)

    def end_store(self, store: DeviceStore, *, success: bool = True) -> None:
        """Complete a store; one that failed leaves rubbish in its slots."""
        if not success:
            self.rows[store.slots] = -1
        self.manager.complete_store([key_of(n) for n in store.numbers], store.req_context, success)
        self.manager.check()

    def store(self, numbers: Sequence[int], req_context: ReqContext | None = None) -> None:
        """Store blocks from the device, from beginning to end."""
        store = self.begin_store(numbers, req_context or ReqContext("store"))
        assert store is not None, f"the primary has no room for {numbers}"
        self.end_store(store)

    def search(self, numbers: Sequence[int], req_context: ReqContext) -> int | None:
        """Look a prefix up as a connector does: leading hits, None while any of them is in flight.

        What the search has found it still finds when it ends: no reservation of its own may evict it.
        """
        num_hits = 0
        is_pending = False
        found: list[OffloadKey] = []
        for number in numbers:
            answer = self.manager.lookup(key_of(number), req_context)
            self.manager.check()
            if answer is False:
                break
            if answer:
                found.append(key_of(number))
            is_pending |= answer is None
            num_hits += 1
        lost = [number_of(key) for key in found if not self.primary.is_ready(key)]
        assert not lost, f"the search for {numbers} has evicted {lost}, which it had found"
        return None if is_pending else num_hits

    def locate(self, numbers: Sequence[int], req_context: ReqContext) -> LocatedRun | None:
        """Ask where the leading blocks of a prefix are; no slot is taken for that."""
        num_free = self.primary.table.slots.num_free
        run = self.manager.locator.locate([key_of(number) for number in numbers], req_context)
        self.manager.check()
        # It polls the tiers, and a load that failed gives its slot back.
        assert self.primary.table.slots.num_free >= num_free, "a question has taken a slot"
        return run

    def probe(self, tier: int, numbers: Sequence[int]) -> None:
        """Let a tier that was not wanted be measured."""
        self.manager.locator.probe(tier, [key_of(number) for number in numbers])
        self.manager.check()

    def step(self) -> None:
        """End the step."""
        self.manager.end_step()
        self.manager.check()

    def search_until_known(self, numbers: Sequence[int], req_context: ReqContext, max_steps: int = 50) -> int:
        """Search once a step until the answer is known; more than ``max_steps`` steps fail the test."""
        for _ in range(max_steps):
            num_hits = self.search(numbers, req_context)
            if num_hits is not None:
                return num_hits
            self.step()
        raise AssertionError(f"the search for {numbers} was not answered in {max_steps} steps")

    def load(self, numbers: Sequence[int], req_context: ReqContext) -> None:
        """Load ready blocks to the device, from beginning to end."""
        self.begin_load(numbers, req_context)
        self.end_load(numbers, req_context)

    def begin_load(self, numbers: Sequence[int], req_context: ReqContext) -> list[int]:
        """Prepare a load and compare its bytes with what was stored under the keys; return the slots."""
        keys = [key_of(number) for number in numbers]
        spec = self.manager.prepare_load(keys, req_context)
        self.manager.check()
        assert isinstance(spec, BlockIDsLoadStoreSpec)
        for number, slot in zip(numbers, spec.block_ids.tolist(), strict=True):
            assert np.array_equal(self.rows[slot], self.content(number)), f"wrong bytes under {number}"
        return [int(slot) for slot in spec.block_ids]

    def end_load(self, numbers: Sequence[int], req_context: ReqContext) -> None:
        """Unpin what a load has read."""
        self.manager.complete_load([key_of(number) for number in numbers], req_context)
        self.manager.check()

    def reset(self) -> None:
        """Forget every block; from now on the same keys stand for other bytes."""
        self.manager.reset()
        self.manager.check()
        self.generation += 1

    def content(self, number: int) -> npt.NDArray[np.int8]:
        """Return the bytes that belong under block ``number`` since the last reset."""
        return content_of(number + self.generation * 2**32, ROW_BYTES)

    def settle(self, timeout_s: float) -> None:
        """Let the tiers' jobs end, and the manager hear of it; more than ``timeout_s`` for a tier fails the test."""
        for tier in self.tiers:
            assert tier.drain(timeout_s), f"the jobs of tier {tier.get_tier_type()} have not ended"
        for _ in range(2):  # the poll of this step may have been before
            self.step()

    def evict_everything(self) -> None:
        """Fill the primary with blocks that no request asks for, so that what the test stored is only below."""
        for _ in range(2):  # cascades of the last store are reported and unpin their blocks
            self.step()
        filler = range(10**6, 10**6 + len(self.rows))
        store = self.begin_store(filler, ReqContext("filler"))
        assert store is not None, "something is pinned: the primary could not be emptied"
        self.end_store(store, success=False)
        self.step()


def number_of(key: OffloadKey) -> int:
    """Return the number that ``key_of`` made ``key`` from. Pure."""
    return get_offload_group_idx(key) * FIRST_STATE + int.from_bytes(get_offload_block_hash(key), "big")
