"""However tiers reserve, write and lose their record, the count is never too small once all have written to it."""

import tempfile
from pathlib import Path
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtier.testing.clock import ManualClock
from kvtier.tiering.fs.shared_usage import SharedUsage, UsageRecord, unpack_record
from kvtier.tiering.fs.system import current_owner

BLOCK_BYTES = 10
CAPACITY_BLOCKS = 60
NUM_TIERS = 3

TIERS = st.integers(0, NUM_TIERS - 1)


class SharedUsageMachine(RuleBasedStateMachine):
    """Some tiers of a directory whose files are a number."""

    @initialize()
    def start(self) -> None:
        """Count an empty directory."""
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / ".usage"
        self._usages = [
            SharedUsage(self._path, current_owner(), CAPACITY_BLOCKS * BLOCK_BYTES, 0o600, ManualClock(0.0))
            for _ in range(NUM_TIERS)
        ]
        self._open: list[tuple[SharedUsage, int]] = []
        self._num_on_disk = 0
        self._has_lost_record = self._has_recounted = False
        self._begun: tuple[SharedUsage, UsageRecord, int] | None = None
        self._recount(self._usages[0])

    @rule(tier=TIERS, num_blocks=st.integers(1, 8))
    def reserve(self, tier: int, num_blocks: int) -> None:
        """Take room for blocks."""
        usage = self._usages[tier]
        granted = usage.reserve(num_blocks, BLOCK_BYTES).num_blocks
        assert granted <= num_blocks
        if granted:
            self._open.append((usage, granted))
        if not self._has_lost_record:
            assert self._num_on_disk + sum(num for _, num in self._open) <= CAPACITY_BLOCKS

    @precondition(lambda self: self._open)
    @rule(data=st.data())
    def end_reservation(self, data: st.DataObject) -> None:
        """Write some of the blocks for which there is room, and give back the rest."""
        # Hypothesis may end an example at a draw: drawn before anything changes, no half of an operation is left.
        number = data.draw(st.integers(0, len(self._open) - 1))
        num_written = data.draw(st.integers(0, self._open[number][1]))
        usage, granted = self._open.pop(number)
        self._num_on_disk += num_written
        usage.end_reservation(granted * BLOCK_BYTES, num_written * BLOCK_BYTES)

    @precondition(lambda self: self._num_on_disk)
    @rule(tier=TIERS, data=st.data())
    def remove(self, tier: int, data: st.DataObject) -> None:
        """Remove blocks that are on the disk."""
        num_removed = data.draw(st.integers(1, self._num_on_disk))
        self._num_on_disk -= num_removed
        self._usages[tier].remove(num_removed * BLOCK_BYTES)

    @precondition(lambda self: self._begun is None)
    @rule(tier=TIERS)
    def begin_recount(self, tier: int) -> None:
        """Begin a walk that sees what is on the disk now."""
        usage = self._usages[tier]
        record = usage.begin_recount()
        assert record is not None
        self._begun = (usage, record, self._num_on_disk)
        self._has_recounted = True

    @precondition(lambda self: self._begun is not None)
    @rule()
    def end_recount(self) -> None:
        """End the walk with what it saw."""
        assert self._begun is not None
        usage, record, num_found = self._begun
        self._begun = None
        if usage.end_recount(num_found * BLOCK_BYTES, record) is None:
            assert self._has_lost_record
            self._recount(usage)

    @rule(tier=TIERS)
    def lose_record(self, tier: int) -> None:
        """Remove the count, and have a tier count anew unless one is counting."""
        self._path.unlink(missing_ok=True)
        self._has_lost_record = self._has_recounted = True
        if self._begun is None:
            self._recount(self._usages[tier])

    @rule()
    def refresh_all(self) -> None:
        """Let every tier write its changes, and look at the count."""
        for usage in self._usages:
            usage.refresh()
        if self._begun is None:
            num_reserved = sum(num for _, num in self._open)
            assert self._used_blocks() >= self._num_on_disk + num_reserved

    def teardown(self) -> None:
        """End all that is open: then the count is exact."""
        if not hasattr(self, "_folder"):
            return
        with self._folder:
            self._end_all()

    def _end_all(self) -> None:
        for usage, granted in self._open:
            usage.end_reservation(granted * BLOCK_BYTES, 0)
        for usage in self._usages:
            usage.refresh()
        if not self._has_recounted:
            assert self._used_blocks() == self._num_on_disk
        self._recount(self._usages[0])
        assert self._used_blocks() == self._num_on_disk
        assert unpack_record(self._path.read_bytes()).in_flight_bytes == 0

    def _recount(self, usage: SharedUsage) -> None:
        begun = usage.begin_recount()
        assert begun is not None
        usage.end_recount(self._num_on_disk * BLOCK_BYTES, begun)

    def _used_blocks(self) -> int:
        used_bytes = unpack_record(self._path.read_bytes()).used_bytes
        assert used_bytes % BLOCK_BYTES == 0
        return used_bytes // BLOCK_BYTES


TestSharedUsageMachine = SharedUsageMachine.TestCase
TestSharedUsageMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class OverrunError(Exception):
    """What Hypothesis raises when an example may draw no more."""


class LastDraw:
    """Data of an example that ends at its second draw."""

    def __init__(self) -> None:
        self._num_draws = 0

    def draw(self, strategy: st.SearchStrategy[int]) -> int:
        """Return 0 once."""
        del strategy
        self._num_draws += 1
        if self._num_draws > 1:
            raise OverrunError
        return 0


def test_an_example_that_ends_at_a_draw_is_half_of_no_operation_and_leaves_no_folder() -> None:
    machine = SharedUsageMachine()
    machine.start()
    machine.reserve(0, 3)
    with pytest.raises(OverrunError):
        machine.end_reservation(cast("st.DataObject", LastDraw()))
    machine.teardown()
    assert not machine._path.parent.exists()
