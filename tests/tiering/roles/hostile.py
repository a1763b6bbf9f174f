"""What stands under our names and is no block of ours, and names that are not ours.

Bytes of another namespace under our names are in ``ServerTierSuite``; forged encrypted blocks in ``EncryptedSuite``.
"""

from collections.abc import Callable

import pytest
from tests.tiering.roles.bench import RoleSuite, needs, purge

from kvtier.base import OffloadKey
from kvtier.testing.tier_driver import ROW_BYTES, key_of
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.place import BlockState

BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES
FLIPPED = (0, 8, 30, 40, 82, 100, 127, ENVELOPE_BYTES, BLOCK_BYTES - 1)
CUT = (0, 1, 15, 127, 128, 129, 148, 5000, BLOCK_BYTES - 1)
VERSION_OFFSETS = (4, 5)
Damage = Callable[[bytes, bytes], bytes]


def flipped(value: bytes, offset: int) -> bytes:
    """Return ``value`` with one bit changed."""
    return value[:offset] + bytes([value[offset] ^ 1]) + value[offset + 1 :]


def of_another_version(value: bytes, offset: int) -> bytes:
    """Return ``value`` with another number of its version, which differs in the byte at ``offset``."""
    return value[:offset] + bytes([value[offset] + 1]) + value[offset + 1 :]


DAMAGES: dict[str, Damage] = {
    **{f"flipped at {offset}": lambda own, _, offset=offset: flipped(own, offset) for offset in FLIPPED},  # type: ignore[misc]  # a default
    "of another block": lambda _, other: other,
    "another block's row": lambda own, other: own[:ENVELOPE_BYTES] + other[ENVELOPE_BYTES:],
    "another block's header": lambda own, other: other[:ENVELOPE_BYTES] + own[ENVELOPE_BYTES:],
    "nothing but zeros": lambda own, _: bytes(len(own)),
}
"""What becomes of a block's value: own and another block's value in, what is then found out."""

OTHER_LENGTHS: dict[str, Damage] = {
    **{f"cut to {length}": lambda own, _, length=length: own[:length] for length in CUT},  # type: ignore[misc]  # a default
    "a byte too long": lambda own, _: own + b"x",
    "much too long": lambda own, _: own + own,
}
"""The same, where a value need not have the length of a block."""

SOME_LENGTHS = ["cut to 0", "cut to 15", "cut to 8319", "a byte too long"]


class Hostile(RoleSuite):
    """A backend that others write into."""

    def spoil(self, number: int, spoil: Damage, other: int = 1) -> bytes:
        """Change what the backend has of a block; return what it had."""
        backend = self.get_backend()
        own, others = backend.read(self.name_of(number)), backend.read(self.name_of(other))
        assert own is not None
        assert others is not None
        assert len(own) == len(others) == BLOCK_BYTES
        spoilt = spoil(own, others)
        if not spoilt and "empty values" in self.lacks:
            pytest.skip(self.lacks["empty values"])
        backend.write(self.name_of(number), spoilt)
        return own

    @needs("raw")
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_a_damaged_block_costs_itself_and_makes_way_for_the_right_one(self, damage: Damage) -> None:
        self.check_damage(damage)

    @needs("raw", "other lengths")
    @pytest.mark.parametrize("damage", OTHER_LENGTHS.values(), ids=OTHER_LENGTHS)
    def test_a_block_of_another_length_costs_itself_and_makes_way_for_the_right_one(
        self, damage: Damage
    ) -> None:
        self.check_damage(damage)

    def check_damage(self, damage: Damage) -> None:
        """Check what one damaged block of three costs."""
        driver = self.start()
        assert driver.store([1, 2, 3]).success
        right = self.spoil(2, damage)
        assert driver.load_right([1, 2, 3]) == {1, 3}
        if "untouched slots" not in self.lacks:
            assert not driver.rows[1].any(), "the slot has bytes of a block that was reported as a miss"
        assert driver.tier.stats()["damaged"] == 1
        if "removal at once" not in self.lacks:
            assert self.get_backend().read(self.name_of(2)) is None
        assert not driver.lookup(2)
        assert driver.load_right([2]) == set()
        driver.poll_until(lambda: driver.store([2]).success and driver.load_right([2]) == {2})
        assert self.get_backend().read(self.name_of(2)) == right

    @needs("raw")
    def test_a_place_tells_the_damaged_block_from_the_whole_ones(self) -> None:
        driver = self.start()
        assert driver.store([1, 2, 3]).success
        self.spoil(2, DAMAGES["another block's row"])
        place = self.tier_class.open_place(self.own_settings())
        try:
            states = {block.name: place.check(block) for block in place.blocks()}
        finally:
            place.close()
        whole = BlockState.WHOLE
        assert states == {key_of(1): whole, key_of(2): BlockState.DAMAGED, key_of(3): whole}

    @needs("raw", "foreign values")
    @pytest.mark.parametrize("offset", VERSION_OFFSETS)
    def test_a_block_of_another_version_is_a_miss_and_left_alone(self, offset: int) -> None:
        self.check_another_version(offset, b"")

    @needs("raw", "foreign values", "other lengths")
    def test_a_block_of_another_version_and_length_is_a_miss_and_left_alone(self) -> None:
        self.check_another_version(VERSION_OFFSETS[0], bytes(100))

    def check_another_version(self, offset: int, more: bytes) -> None:
        """Check that an engine after an upgrade, or before it, leaves what it cannot read to the other."""
        driver = self.start()
        assert driver.store([1, 2, 3]).success
        own = self.spoil(2, lambda own, _: of_another_version(own, offset) + more)
        theirs = of_another_version(own, offset) + more
        for _ in range(2):
            assert driver.load_right([1, 2, 3]) == {1, 3}
        stats = driver.tier.stats()
        assert (stats["foreign"], stats["damaged"]) == (2, 0)
        assert self.get_backend().read(self.name_of(2)) == theirs

    @needs("raw", "other lengths", "lengths")
    @pytest.mark.parametrize("damage", SOME_LENGTHS)
    def test_what_has_another_length_is_not_found(self, damage: str) -> None:
        assert self.start().store([1, 2]).success
        self.spoil(1, OTHER_LENGTHS[damage], other=2)
        driver = self.start()
        assert not driver.lookup(1)
        assert driver.lookup(2)

    @needs("raw", "other lengths")
    @pytest.mark.parametrize("damage", SOME_LENGTHS)
    def test_what_has_another_length_is_not_taken_for_the_block_by_a_store(self, damage: str) -> None:
        assert self.start().store([1, 2]).success
        right = self.spoil(1, OTHER_LENGTHS[damage], other=2)
        driver = self.start()
        is_seen = "lengths" not in self.lacks  # else the block has to be loaded
        driver.poll_until(lambda: driver.store([1]).success and (is_seen or driver.load_right([1]) == {1}))
        assert driver.load_right([1]) == {1}
        assert self.get_backend().read(self.name_of(1)) == right

    @needs("raw", "removals")
    def test_a_block_that_is_gone_is_absent_and_no_fault(self) -> None:
        driver = self.start()
        assert driver.store([1, 2]).success
        self.remove_blocks(1)
        result = driver.load([1, 2])
        assert (result.success, result.is_fault) == (False, False)
        assert result.successful_keys == frozenset({key_of(2)})
        assert driver.tier.stats()["absent"] == 1
        assert not driver.lookup(1)
        assert driver.store([1]).success
        assert driver.load_right([1]) == {1}

    @needs("raw")
    def test_names_that_are_not_ours_are_no_blocks_and_survive_a_purge(self) -> None:
        backend = self.get_backend()
        strange = backend.strange_names(self.namespace_of())
        driver = self.start()
        assert driver.store([1]).success
        block = backend.read(self.name_of(1))
        assert block is not None
        for name in strange:
            backend.write(name, block)
        assert driver.store([2, 3]).success
        assert sorted(self.held_keys()) == [key_of(1), key_of(2), key_of(3)]
        assert len(self.list_blocks()) == 3, "a name that is not ours is taken for something of ours"
        assert purge(driver).num_blocks == 3
        assert self.list_blocks() == []
        assert driver.store([1]).success
        assert self.remove_namespace(self.namespace_of()) == 1
        assert {name: backend.read(name) for name in strange} == dict.fromkeys(strange, block)

    def test_a_key_too_long_for_an_envelope_is_not_held(self) -> None:
        driver = self.start()
        assert driver.tier.lookup(OffloadKey(bytes(41)), driver.request) is False
