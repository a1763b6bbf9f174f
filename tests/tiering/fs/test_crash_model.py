"""A tier against a plain dictionary under random operations, neighbours, restarts and crashes.

A crash is a copy of the directory, taken in the middle of a write: of a killed process the first pages of that write
are in it, after a loss of power any of them. Laws checked: what is loaded is what was stored under the key; after a
clean end everything held is found again; after a kill everything found is whole; no more slots are held than there are.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.tiering.fs.engine import HANG_GUARD_S, bytes_of_packs, start_driver

from kvtier.testing.examples import num_examples
from kvtier.testing.tier_driver import TierDriver, key_of, make_config
from kvtier.tiering.base import TierSettings
from kvtier.tiering.fs.system_calls import REAL_CALLS, Buffers, SystemCalls

NUM_PACKS, NUM_SLOTS = 3, 2
NUM_BLOCKS = 10
PAGE_BYTES = 4096
PAGES_PER_SLOT = 3

blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4, unique=True)
models = st.sampled_from(["model-a", "model-b"])


class CrashCopy:
    """Copies a directory as a crash within a write would leave it; the write itself then goes on.

    Args:
        root: the directory.
        copy: where the copy goes.
    """

    def __init__(self, root: Path, copy: Path) -> None:
        self._root = root
        self._copy = copy
        self._num_writes_to_go = -1
        self._survives: Callable[[int], bool] = bool
        self.calls: SystemCalls = replace(REAL_CALLS, pwritev=self._pwritev, write=self._write)

    def arm(self, num_writes_to_go: int, survives: Callable[[int], bool]) -> None:
        """Crash in one of the next writes.

        Args:
            num_writes_to_go: writes before that one.
            survives: whether a page of that write, counted from 0, reaches the disk.
        """
        self._num_writes_to_go = num_writes_to_go
        self._survives = survives

    def disarm(self) -> None:
        """Crash now if no write came."""
        if self._num_writes_to_go >= 0:
            self._take()
            self._num_writes_to_go = -1

    def _pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        if self._is_now():
            self._put(fd, b"".join(buffers), offset)
        return REAL_CALLS.pwritev(fd, buffers, offset)

    def _write(self, fd: int, data: bytes) -> int:
        if self._is_now():
            path = Path(f"/proc/self/fd/{fd}").readlink()
            self._put(fd, data, path.stat().st_size)
        return REAL_CALLS.write(fd, data)

    def _is_now(self) -> bool:
        is_now = self._num_writes_to_go == 0
        self._num_writes_to_go -= self._num_writes_to_go >= 0
        return is_now

    def _take(self) -> None:
        shutil.copytree(self._root, self._copy)

    def _put(self, fd: int, written: bytes, offset: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        self._take()
        with (self._copy / path.relative_to(self._root)).open("r+b") as file:
            for number, start in enumerate(range(0, len(written), PAGE_BYTES)):
                if self._survives(number):
                    file.seek(offset + start)
                    file.write(written[start : start + PAGE_BYTES])


class PackMachine(RuleBasedStateMachine):
    """Random calls on one tier and its successors in the same directory; subclasses choose the policy."""

    policy = "lru"

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvtier-packs-")
        self.root = Path(self.folder.name) / "fs"
        self.copy = Path(self.folder.name) / "copy"
        self.model = "model-a"
        self.num_resets = self.num_epochs = 0
        self.start()

    def start(self) -> None:
        self.disk = CrashCopy(self.root, self.copy)
        self.driver = self.open(self.model, self.disk.calls)

    def open(self, model: str, calls: SystemCalls = REAL_CALLS) -> TierDriver:
        return start_driver(
            make_config(model),
            settings=TierSettings(policy=self.policy),
            root_dir=self.root,
            capacity_bytes=bytes_of_packs(NUM_PACKS, NUM_SLOTS),
            pack_bytes=bytes_of_packs(1, NUM_SLOTS),
            direct_io=False,
            calls=calls,
        )

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
        held = set(self.held())
        assert self.driver.load_right(numbers) == set(numbers) & held
        assert set(self.held()) == held

    @rule(numbers=blocks)
    def touch(self, numbers: list[int]) -> None:
        self.driver.tier.touch([key_of(number) for number in numbers], self.driver.request)

    @rule(numbers=blocks, model=models)
    def let_another_read(self, numbers: list[int], model: str) -> None:
        """An engine that comes and goes takes nothing, and finds what is stored for its model."""
        held = set(self.held())
        other = self.open(model)
        found = other.load_right(numbers)
        assert other.tier.shutdown(HANG_GUARD_S)
        if model == self.model and self.num_resets == 0:
            assert found == set(numbers) & held
        assert set(self.held()) == held

    @rule()
    def reset(self) -> None:
        self.num_resets += 1
        self.num_epochs += 1  # each is another one, in every life
        self.driver.tier.reset(self.num_epochs.to_bytes(16, "big"))
        assert self.held() == []

    @rule(model=models)
    def restart(self, model: str) -> None:
        """The next one in the same namespace finds what was held."""
        held = self.held()
        is_same = model == self.model and self.num_resets == 0
        self.stop()
        self.model, self.num_resets = model, 0
        self.start()
        if is_same:
            assert held == self.held()

    @rule(numbers=blocks, num_pages=st.integers(0, 4 * PAGES_PER_SLOT), num_writes=st.integers(0, 4))
    def be_killed(self, numbers: list[int], num_pages: int, num_writes: int) -> None:
        before = self.held() if self.num_resets == 0 else []
        self.crash(numbers, num_writes, lambda page: page < num_pages)
        found = self.held()
        assert self.driver.load_right(found) == set(found), "a block was found and is not whole"
        assert len(set(before) - set(found)) <= len(numbers), "more is lost than had to leave"

    @rule(numbers=blocks, pages=st.integers(0, 2 ** (4 * PAGES_PER_SLOT) - 1), num_writes=st.integers(0, 4))
    def lose_power(self, numbers: list[int], pages: int, num_writes: int) -> None:
        self.crash(numbers, num_writes, lambda page: bool(pages >> page & 1))
        found = self.held()
        for number in found:
            self.driver.load_right([number])

    def crash(self, numbers: list[int], num_writes: int, survives: Callable[[int], bool]) -> None:
        self.disk.arm(num_writes, survives)
        self.driver.store(numbers)
        self.disk.disarm()
        self.stop()
        shutil.rmtree(self.root)
        self.copy.rename(self.root)
        self.num_resets = 0
        self.start()

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        stats = self.driver.tier.stats()
        num_slots = NUM_SLOTS * stats["own_packs"]
        assert stats["own_blocks"] + stats["free_slots"] + stats["failed_slots"] == num_slots
        assert num_slots <= NUM_PACKS * NUM_SLOTS

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            with self.folder:
                self.stop()


class ARCPackMachine(PackMachine):
    """The same under ARC."""

    policy = "arc"


class HazardPackMachine(PackMachine):
    """The same under a policy that learns."""

    policy = "hazard"


TestPacksUnderLRU = pytest.mark.slow(PackMachine.TestCase)
TestPacksUnderLRU.settings = settings(max_examples=num_examples(40), stateful_step_count=25, deadline=None)
TestPacksUnderARC = pytest.mark.slow(ARCPackMachine.TestCase)
TestPacksUnderARC.settings = settings(max_examples=num_examples(20), stateful_step_count=25, deadline=None)
TestPacksUnderHazard = pytest.mark.slow(HazardPackMachine.TestCase)
TestPacksUnderHazard.settings = settings(max_examples=num_examples(20), stateful_step_count=25, deadline=None)
