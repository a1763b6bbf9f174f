"""Whatever becomes of blocks, the shared count knows afterwards what is on the disk."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.clock import ManualClock
from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.file_support import FileSupport
from kvtier.tiering.fs.recycled_files import (
    RecycledFile,
    RecycledFiles,
    Reservation,
    StoreOutcome,
    Target,
)
from kvtier.tiering.fs.shared_usage import SharedUsage, unpack_record
from kvtier.tiering.fs.system import SystemCalls, current_owner

BLOCK_BYTES = 5
CAPACITY_BLOCKS = 100
NAMESPACE = "namespace"


class World:
    """A directory with a count in which nothing but recycled files is."""

    def __init__(self, root: Path, num_recycled: int) -> None:
        self._usage = root / ".usage"
        self._usage.unlink(missing_ok=True)
        self.usage = SharedUsage(
            self._usage, current_owner(), CAPACITY_BLOCKS * BLOCK_BYTES, 0o600, ManualClock(0.0)
        )
        begun = self.usage.begin_recount()
        assert begun is not None
        self.usage.end_recount(num_recycled * BLOCK_BYTES, begun)
        support = FileSupport(has_direct_io=False, has_unnamed_files=True)
        files = BlockFiles(support, root, current_owner(), 0o600, SystemCalls(), ManualClock(0.0))
        self.recycled = RecycledFiles(files, 0o600, BLOCK_BYTES)
        for number in range(num_recycled):
            path = root / f"recycled{number}"
            path.write_bytes(bytes(BLOCK_BYTES))
            self.recycled.give_back([RecycledFile(str(path), NAMESPACE)])

    def used_blocks(self) -> int:
        """Return what the count says."""
        used_bytes = unpack_record(self._usage.read_bytes()).used_bytes
        assert used_bytes % BLOCK_BYTES == 0
        return used_bytes // BLOCK_BYTES

    def in_flight_bytes(self) -> int:
        """Return what the count says of bytes that are reserved."""
        return unpack_record(self._usage.read_bytes()).in_flight_bytes


@given(
    num_recycled=st.integers(0, 4),
    num_reserved=st.integers(0, 4),
    batches=st.lists(st.lists(st.sampled_from(StoreOutcome), max_size=4), max_size=6),
)
def test_the_count_is_never_too_small_afterwards(
    tmp_path_factory: pytest.TempPathFactory,
    num_recycled: int,
    num_reserved: int,
    batches: list[list[StoreOutcome]],
) -> None:
    root = tmp_path_factory.mktemp("room")
    world = World(root, num_recycled)
    reservation = Reservation(world.recycled, BLOCK_BYTES)
    grant = world.usage.reserve(num_reserved, BLOCK_BYTES)
    reservation.add(world.recycled.take(num_recycled, NAMESPACE), grant.num_blocks)
    num_lost = 0

    def write(target: Target, outcome: StoreOutcome) -> None:
        nonlocal num_lost
        if outcome is StoreOutcome.WRITTEN:
            block = root / f"block{len(list(root.glob('block*')))}"
            if target is None:
                block.write_bytes(bytes(BLOCK_BYTES))
            else:
                Path(target.path).rename(block)
        elif target is not None:
            num_lost += outcome is not StoreOutcome.EXISTED
            if outcome is StoreOutcome.NO_RECYCLED:
                Path(target.path).unlink()

    for batch in batches:
        num_left = len(reservation.targets)
        targets = reservation.take(len(batch))
        assert len(targets) == min(len(batch), num_left)
        for target, outcome in zip(targets, batch, strict=False):
            write(target, outcome)
            reservation.complete(target, outcome)
    reservation.end(world.usage)

    on_disk = [path for path in root.iterdir() if path.name.startswith(("block", "recycled"))]
    recycled_paths = {recycled_file.path for recycled_file in world.recycled.take(99, NAMESPACE)}
    assert recycled_paths == {str(path) for path in on_disk if path.name.startswith("recycled")}
    assert world.used_blocks() == len(on_disk) + num_lost
    assert world.in_flight_bytes() == 0


def test_recycled_files_are_used_before_what_is_reserved(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    reservation = Reservation(world.recycled, BLOCK_BYTES)
    reservation.add(world.recycled.take(2, NAMESPACE), world.usage.reserve(1, BLOCK_BYTES).num_blocks)
    assert len(reservation.targets) == 3
    assert [target is None for target in reservation.take(4)] == [False, False, True]
    assert len(reservation.targets) == 0


def test_what_failed_leaves_the_reserved_room_for_another_try(tmp_path: Path) -> None:
    world = World(tmp_path, 0)
    reservation = Reservation(world.recycled, BLOCK_BYTES)
    reservation.add((), world.usage.reserve(1, BLOCK_BYTES).num_blocks)
    for outcome in (StoreOutcome.NO_ROOM, StoreOutcome.WRITTEN):
        (target,) = reservation.take(1)
        reservation.complete(target, outcome)
    reservation.end(world.usage)
    assert world.used_blocks() == 1


def test_a_bug_of_the_writer_leaves_no_file_that_nobody_knows_or_counts(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    reservation = Reservation(world.recycled, BLOCK_BYTES)
    reservation.add(world.recycled.take(1, NAMESPACE), world.usage.reserve(1, BLOCK_BYTES).num_blocks)
    assert len(reservation.take(2)) == 2
    (tmp_path / "block").write_bytes(bytes(BLOCK_BYTES))
    reservation.end(world.usage)
    assert not list(tmp_path.glob("recycled*"))
    assert world.used_blocks() == 2, "the recycled file counts until the next recount"
    assert world.in_flight_bytes() == 0
