"""Whatever becomes of blocks, the shared count knows afterwards what is on the disk."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.clock import ManualClock
from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.book import unpack_book
from kvtier.tiering.fs.direct_io import FileSupport
from kvtier.tiering.fs.ledger import Ledger
from kvtier.tiering.fs.owner import current_owner
from kvtier.tiering.fs.room import Room, StoreOutcome
from kvtier.tiering.fs.spares import Spares
from kvtier.tiering.fs.system import SystemCalls

BLOCK_BYTES = 5
CAPACITY_BLOCKS = 100


class World:
    """A directory with a count in which nothing but spare files is."""

    def __init__(self, root: Path, num_spares: int) -> None:
        self._usage = root / ".usage"
        self._usage.unlink(missing_ok=True)
        self.ledger = Ledger(
            self._usage, current_owner(), CAPACITY_BLOCKS * BLOCK_BYTES, 0o600, ManualClock(0.0)
        )
        begun = self.ledger.begin_recount()
        assert begun is not None
        self.ledger.end_recount(num_spares * BLOCK_BYTES, begun)
        support = FileSupport(has_direct_io=False, has_unnamed_files=True)
        files = BlockFiles(support, root, current_owner(), 0o600, SystemCalls(), ManualClock(0.0))
        self.spares = Spares(files, 0o600, BLOCK_BYTES)
        self.spares.give_back([f"{root}/spare{number}" for number in range(num_spares)])

    def used_blocks(self) -> int:
        """Return what the count says."""
        used_bytes = unpack_book(self._usage.read_bytes()).used_bytes
        assert used_bytes % BLOCK_BYTES == 0
        return used_bytes // BLOCK_BYTES

    def in_flight_bytes(self) -> int:
        """Return what the count says of bytes that are reserved."""
        return unpack_book(self._usage.read_bytes()).in_flight_bytes


@given(
    num_spares=st.integers(0, 4),
    num_reserved=st.integers(0, 4),
    outcomes=st.lists(st.sampled_from(StoreOutcome), max_size=12),
)
def test_the_count_is_right_afterwards(
    tmp_path_factory: pytest.TempPathFactory, num_spares: int, num_reserved: int, outcomes: list[StoreOutcome]
) -> None:
    world = World(tmp_path_factory.getbasetemp(), num_spares)
    room = Room(BLOCK_BYTES)
    grant = world.ledger.reserve(num_reserved, BLOCK_BYTES)
    room.add(world.spares.take(num_spares), grant.num_blocks)
    given_spares = []
    num_on_disk = num_spares

    def write(outcome: StoreOutcome, spare: str | None) -> StoreOutcome:
        nonlocal num_on_disk
        is_written = outcome is StoreOutcome.WRITTEN
        # A spare file is gone whatever comes of it: it is the block now, or nothing. Others count what they remove.
        is_ours = outcome is not StoreOutcome.NO_SPARE
        num_on_disk += is_written if spare is None else is_written - is_ours
        if spare is not None:
            given_spares.append(spare)
        return outcome

    for outcome in outcomes:
        num_left = room.num_blocks
        found = room.use(lambda spare, outcome=outcome: write(outcome, spare))  # type: ignore[misc]  # its default
        assert found is (outcome if num_left else StoreOutcome.NO_ROOM)
    room.settle(world.ledger, world.spares)

    assert len(set(given_spares)) == len(given_spares)
    assert len(world.spares) == num_spares - len(given_spares)
    assert world.used_blocks() == num_on_disk
    assert world.in_flight_bytes() == 0


def test_spare_files_are_used_before_what_is_reserved(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    room = Room(BLOCK_BYTES)
    room.add(world.spares.take(2), world.ledger.reserve(1, BLOCK_BYTES).num_blocks)
    used: list[bool] = []

    def write(spare: str | None) -> StoreOutcome:
        used.append(spare is not None)
        return StoreOutcome.WRITTEN

    assert room.num_blocks == 3
    assert [room.use(write) for _ in range(4)] == [StoreOutcome.WRITTEN] * 3 + [StoreOutcome.NO_ROOM]
    assert used == [True, True, False]
    assert room.num_blocks == 0


def test_what_failed_leaves_the_reserved_room_for_another_try(tmp_path: Path) -> None:
    world = World(tmp_path, 0)
    room = Room(BLOCK_BYTES)
    room.add((), world.ledger.reserve(1, BLOCK_BYTES).num_blocks)
    assert room.use(lambda _: StoreOutcome.NO_ROOM) is StoreOutcome.NO_ROOM
    assert room.use(lambda _: StoreOutcome.WRITTEN) is StoreOutcome.WRITTEN
    room.settle(world.ledger, world.spares)
    assert world.used_blocks() == 1
