"""The slot table under random jobs: each slot is in one place, and none is written while its record names a block."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtier.cpu.policies import create_cache_policy
from kvtier.namespace import make_namespace
from kvtier.testing.tier_driver import key_of, make_config
from kvtier.tiering.fs.block_accounts import BlockAccounts
from kvtier.tiering.fs.neighbours import NO_CONTENTS, Neighbours, PackContents, PackNamespace, address_of
from kvtier.tiering.fs.own_blocks import SlotPin, SlotReservation
from kvtier.tiering.fs.slot_table import SlotTable

NUM_SLOTS = 3
NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True)


class SlotTableMachine(RuleBasedStateMachine):
    """A table of a few packs, and the journals that its callers keep."""

    stores = Bundle("stores")
    loads = Bundle("loads")
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.table = SlotTable(
            lambda: create_cache_policy(self.policy, 64), lambda: self.now_s, BlockAccounts()
        )
        self.namespace = PackNamespace(
            make_namespace(make_config(), 512), Neighbours(None, lambda: self.now_s)
        )
        self.table.open_namespace(self.namespace)
        self.recorded: dict[int, int] = {}  # address -> number of the block that its last record names
        self.packs: list[int] = []
        self.next_pack = 1
        self.read: Counter[int] = Counter()

    def make_pack(self, contents: PackContents = NO_CONTENTS) -> int:
        """Add a pack; return its number."""
        number, self.next_pack = self.next_pack, self.next_pack + 1
        assert self.table.add_pack(self.namespace, number, NUM_SLOTS, contents)
        self.packs.append(number)
        return number

    def drop(self, reservation: SlotReservation, failing: bool) -> list[int]:
        """Append the records of dropped slots, or fail to."""
        failed = list(reservation.drops) if failing else []
        for address in reservation.drops:
            if not failing:
                self.recorded.pop(address, None)
        self.table.complete_drops(reservation, failed)
        return failed

    @rule()
    def add_pack(self) -> None:
        """Make a pack."""
        if len(self.packs) < 2:
            self.make_pack()

    @rule(blocks=st.lists(st.integers(0, 11), max_size=NUM_SLOTS, unique=True))
    def adopt(self, blocks: list[int]) -> None:
        """Adopt a pack with blocks, some of which may be in other own slots."""
        if len(self.packs) >= 2:
            return
        slots, times = np.arange(len(blocks)), np.full(len(blocks), 50, np.uint32)
        number = self.make_pack(PackContents(slots, [key_of(block) for block in blocks], times, times))
        self.recorded |= {address_of(number, slot): block for slot, block in enumerate(blocks)}

    @rule(data=st.data())
    def remove_pack(self, data: st.DataObject) -> None:
        """Give a pack away, whatever its jobs do."""
        if not self.packs:
            return
        number = data.draw(st.sampled_from(self.packs))
        held = self.table.remove_pack(number)
        assert held is not None
        for block in held:
            assert key_of(self.recorded[address_of(number, block.slot)]) == block.key
        self.packs.remove(number)
        self.recorded = {
            address: block for address, block in self.recorded.items() if address >> 32 != number
        }

    @rule(target=stores, blocks=NUMBERS, failing=st.booleans())
    def begin_store(self, blocks: list[int], failing: bool) -> tuple[Sequence[SlotPin], list[int]]:
        """Take slots, and drop what leaves."""
        self.now_s += 1
        plan = self.table.prepare_store(self.namespace, [key_of(block) for block in blocks])
        undropped = self.drop(plan, failing)
        for pin in plan.pins:
            # INVARIANT: the last record of a slot that is written names no block.
            assert pin.address in undropped or pin.address not in self.recorded
            assert not self.read[pin.address], "a slot is written while it is read"
        return plan.pins, undropped

    @rule(store=consumes(stores), data=st.data())
    def end_store(self, store: tuple[Sequence[SlotPin], list[int]], data: st.DataObject) -> None:
        """Write and record some of the blocks."""
        pins, undropped = store
        writable = [pin for pin in pins if pin.address not in undropped]
        written = [pin for pin in writable if data.draw(st.booleans())]
        for pin in written:
            if pin.address >> 32 in self.packs:
                self.recorded[pin.address] = number_of(pin)
        held = self.table.complete_store(pins, {pin.key for pin in written}, undropped)
        for pin in written:
            assert (pin.key in held) == (pin.address >> 32 in self.packs)

    @rule(target=loads, blocks=NUMBERS)
    def begin_load(self, blocks: list[int]) -> list[SlotPin]:
        """Pin what is there."""
        found = self.table.prepare_load(self.namespace, [key_of(block) for block in blocks])
        pins = [pin for pin in found if pin is not None]
        for pin in pins:
            assert self.recorded[pin.address] == number_of(pin)
            self.read[pin.address] += 1
        return pins

    @rule(pins=consumes(loads), is_damaged=st.booleans(), failing=st.booleans())
    def end_load(self, pins: list[SlotPin], is_damaged: bool, failing: bool) -> None:
        """Unpin blocks, all of which may be damaged."""
        self.table.complete_load(pins, [pin.key for pin in pins] if is_damaged else ())
        self.read.subtract(pin.address for pin in pins)
        self.drop(self.table.take_undropped(), failing)

    @rule(num=st.integers(1, 3))
    def purge(self, num: int) -> None:
        """Remove blocks of the namespace."""
        self.table.take_blocks(self.namespace.name, num)

    @rule(num=st.integers(0, 2))
    def drop_ahead(self, num: int) -> None:
        """Let neighbours come or go."""
        self.table.set_ahead(num)

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        """Free, failed, held and written slots together are all there are."""
        stats = self.table.stats()
        num_gone = stats["free_slots"] + stats["failed_slots"]
        # Blocks that were removed while they are read keep their slots until then.
        assert num_gone + stats["own_blocks"] <= NUM_SLOTS * len(self.packs)

    @invariant()
    def what_is_held_is_recorded(self) -> None:
        """A block that is found is in a slot whose last record names it."""
        recorded = set(self.recorded.values())
        for block in range(12):
            if self.table.is_held(self.namespace, key_of(block)):
                assert block in recorded


def number_of(pin: SlotPin) -> int:
    """Return the number of a pin's block."""
    return int.from_bytes(pin.key[:32], "big")


class ArcMachine(SlotTableMachine):
    """The same with ARC."""

    policy = "arc"


TestLRU = SlotTableMachine.TestCase
TestLRU.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestARC = ArcMachine.TestCase
TestARC.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_slot_that_another_job_reads_is_not_written_although_its_block_is_damaged() -> None:
    machine = SlotTableMachine()
    table, namespace = machine.table, machine.namespace
    machine.make_pack()
    blocks = [key_of(number) for number in range(NUM_SLOTS)]
    pins = table.prepare_store(namespace, blocks).pins
    assert table.complete_store(pins, blocks) == blocks
    first, second = (table.prepare_load(namespace, blocks[:1])[0] for _ in range(2))
    assert first is not None
    assert second is not None
    table.complete_load([first], blocks[:1])
    others = table.prepare_store(namespace, [key_of(number) for number in range(10, 10 + NUM_SLOTS)]).pins
    assert len(others) == NUM_SLOTS - 1
    assert first.address not in {pin.address for pin in others}
    table.complete_load([second])
    assert [pin.address for pin in table.prepare_store(namespace, [key_of(20)]).pins] == [first.address]
