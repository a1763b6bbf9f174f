"""The slab against a plain dictionary under random operations, restarts and crashes within a write.

A crash is a copy of the file, taken in the middle of a write: of a killed process the first pages of that write are
in it, after a loss of power any of them. Laws checked: what is loaded is what was stored under the key; each slot is in
one place; after a clean end everything held is found again; after a kill everything found is whole.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.tiering.slab.conftest import HANG_GUARD_S, capacity_of
from tests.tiering.slab.disk import CrashCopy

from kvtier.testing.examples import num_examples
from kvtier.testing.tier_suite import TierDriver, content_of, key_of, make_config, make_rows
from kvtier.tiering.base import TierSettings
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.slab_file import SystemCalls

NUM_SLOTS = 6
NUM_BLOCKS = 10
PAGES_PER_SLOT = 3

blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4, unique=True)
models = st.sampled_from(["model-a", "model-b"])


class SlabMachine(RuleBasedStateMachine):
    """Random calls on one tier and its successors on the same file; subclasses choose the policy."""

    policy = "lru"

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvtier-slab-")
        self.path = Path(self.folder.name) / "slab"
        self.copy_path = Path(self.folder.name) / "copy"
        self.model = "model-a"
        self.num_resets = 0
        self.may_be_torn = False
        self.start()

    def start(self) -> None:
        self.disk = CrashCopy(self.path, self.copy_path)
        rows = make_rows()
        tier = SlabTier(
            make_config(self.model),
            rows,
            TierSettings(policy=self.policy),
            path=self.path,
            capacity_bytes=capacity_of(NUM_SLOTS),
            direct_io=False,
            num_threads=1,
            calls=SystemCalls(pwritev=self.disk.pwritev),
        )
        assert tier.wait_indexed(HANG_GUARD_S)
        self.driver = TierDriver(tier, rows)

    def stop(self) -> None:
        assert self.driver.tier.shutdown(HANG_GUARD_S)

    def held(self) -> list[int]:
        return [number for number in range(NUM_BLOCKS) if self.driver.lookup(number)]

    @rule(numbers=blocks)
    def store(self, numbers: list[int]) -> None:
        """A store of a few blocks always finds room here: nothing is pinned."""
        assert self.driver.store(numbers).success
        assert set(numbers) <= set(self.held())

    @rule(numbers=blocks)
    def load(self, numbers: list[int]) -> None:
        held = self.held()
        result = self.driver.load(numbers)
        succeeded = (
            set(numbers)
            if result.success
            else {number for number in numbers if key_of(number) in (result.successful_keys or ())}
        )
        assert succeeded <= set(held)
        if not self.may_be_torn:
            assert succeeded == set(numbers) & set(held)
        for slot, number in enumerate(numbers):
            if number in succeeded:
                assert bytes(self.driver.rows[slot]) == bytes(content_of(number))
        assert self.held() == sorted(set(held) - (set(numbers) - succeeded))

    @rule(numbers=blocks)
    def touch(self, numbers: list[int]) -> None:
        self.driver.tier.touch([key_of(number) for number in numbers], self.driver.request)

    @rule()
    def reset(self) -> None:
        self.num_resets += 1
        self.driver.tier.reset(self.num_resets.to_bytes(16, "big"))
        assert self.held() == []

    @rule(model=models)
    def restart(self, model: str) -> None:
        """Whoever comes next in the same namespace finds what was held."""
        held = self.held()
        is_same = model == self.model and self.num_resets == 0
        self.stop()
        self.model, self.num_resets = model, 0
        self.start()
        if is_same and not self.may_be_torn:
            # What was evicted, and not overwritten since, is found again.
            assert set(held) <= set(self.held())

    @rule(numbers=blocks, num_pages=st.integers(0, 4 * PAGES_PER_SLOT), num_writes=st.integers(0, 1))
    def be_killed(self, numbers: list[int], num_pages: int, num_writes: int) -> None:
        self.crash(numbers, num_writes, lambda page: page < num_pages)
        for number in self.held():
            if not self.may_be_torn:
                assert self.driver.load([number]).success, f"block {number} was found and is not whole"

    @rule(numbers=blocks, pages=st.integers(0, 2 ** (4 * PAGES_PER_SLOT) - 1), num_writes=st.integers(0, 1))
    def lose_power(self, numbers: list[int], pages: int, num_writes: int) -> None:
        self.may_be_torn = True
        self.crash(numbers, num_writes, lambda page: bool(pages >> page & 1))

    def crash(self, numbers: list[int], num_writes: int, survives: Callable[[int], bool]) -> None:
        self.disk.arm(num_writes, survives)
        self.driver.store(numbers)
        self.disk.disarm()
        self.stop()
        self.copy_path.replace(self.path)
        self.num_resets = 0
        self.start()

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        stats = self.driver.tier.stats()
        assert stats["indexed_blocks"] + stats["free_slots"] + stats["foreign_slots"] == NUM_SLOTS

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            with self.folder:
                self.stop()


class ARCSlabMachine(SlabMachine):
    """The same under ARC."""

    policy = "arc"


TestSlabUnderLRU = pytest.mark.slow(SlabMachine.TestCase)
TestSlabUnderLRU.settings = settings(max_examples=num_examples(40), stateful_step_count=25, deadline=None)
TestSlabUnderARC = pytest.mark.slow(ARCSlabMachine.TestCase)
TestSlabUnderARC.settings = settings(max_examples=num_examples(20), stateful_step_count=25, deadline=None)
