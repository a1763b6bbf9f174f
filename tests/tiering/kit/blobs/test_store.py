"""The block store over named bytes: what it makes of the outcomes of single names, on a backend of the test's own."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from tests.tiering.kit.blobs.shelf import NOW_S, Shelf, ShelfTier

from kvtier.base import OffloadKey, ReqContext
from kvtier.errors import ConfigError
from kvtier.misses import MissCause
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, key_of, make_config, make_rows
from kvtier.tiering.kit.blobs import (
    Blob,
    FolderNames,
    Got,
    GotKind,
    Lent,
    Put,
    PutKind,
    Size,
)
from kvtier.tiering.kit.blobs.recent import REMEMBERED_S
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.health import SAID_S
from kvtier.tiering.kit.place import BlockState

HANG_GUARD_S = 60.0
BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES
TTL_S = 1000.0


Start = Callable[..., TierDriver]


@pytest.fixture
def shelf() -> Shelf:
    ShelfTier.shelf = Shelf()
    return ShelfTier.shelf


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def start(shelf: Shelf, clock: ManualClock) -> Iterator[Start]:
    """Build tiers on the shelf."""
    drivers: list[TierDriver] = []

    def make(**own: object) -> TierDriver:
        rows = make_rows()
        tier = ShelfTier(
            make_config(),
            rows,
            clock=clock,
            wall_clock=lambda: shelf.now_s,
            **({"num_threads": 1} | own),  # type: ignore[arg-type]  # a test's own
        )
        drivers.append(TierDriver(tier, rows))
        return drivers[-1]

    yield make
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


def end_of(number: int) -> str:
    """Return how the name of a block ends."""
    return f"/{key_of(number).hex()}.kv"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("kind", "count", "is_fault"),
    [
        (PutKind.NO_ROOM, "declined", False),
        (PutKind.REFUSED, "store_errors", False),
        (PutKind.FAILED, "store_errors", True),
    ],
)
def test_a_block_that_is_not_written_is_counted_by_its_outcome_and_alone(
    start: Start, shelf: Shelf, kind: PutKind, count: str, *, is_fault: bool
) -> None:
    shelf.puts = {end_of(2): Put(kind, "no")}
    driver = start()
    result = driver.store([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert result.is_fault is is_fault
    stats = driver.tier.stats()
    assert (stats["stored_blocks"], stats[count]) == (2, 1)
    assert stats["stored_bytes"] == 2 * ROW_BYTES


@pytest.mark.parametrize(
    ("kind", "count", "is_fault"),
    [
        (GotKind.ABSENT, "absent", False),
        (GotKind.REFUSED, "foreign", False),
        (GotKind.FAILED, "io_error", True),
    ],
)
def test_a_block_that_is_not_read_is_counted_by_its_outcome_and_alone(
    start: Start, shelf: Shelf, kind: GotKind, count: str, *, is_fault: bool
) -> None:
    driver = start()
    assert driver.store([1, 2, 3]).success
    shelf.gots = {end_of(2): Got(kind)}
    result = driver.load([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert result.is_fault is is_fault
    assert driver.tier.stats()[count] == 1


def test_what_is_damaged_and_cannot_be_removed_hides_nothing_that_was_loaded(
    start: Start, shelf: Shelf
) -> None:
    driver = start()
    assert driver.store([1, 2, 3]).success
    value, written_s = shelf.values[shelf.name_of(2)]
    shelf.values[shelf.name_of(2)] = value[:-1] + bytes([value[-1] ^ 1]), written_s
    shelf.cannot_remove = True
    assert driver.load_right([1, 2, 3]) == {1, 3}
    assert driver.tier.stats()["damaged"] == 1


def test_a_reason_is_said_once_and_again_after_a_while(
    start: Start, shelf: Shelf, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.puts = {end_of(1): Put(PutKind.REFUSED, "too long"), end_of(2): Put(PutKind.REFUSED, "too long")}
    driver = start()
    for _ in range(3):
        driver.store([1, 2, 3])
    assert len(lines_of(caplog)) == 1
    assert f"of {BLOCK_BYTES} bytes was not stored: too long" in lines_of(caplog)[0]
    shelf.puts[end_of(2)] = Put(PutKind.FAILED, "too slow")
    driver.store([1, 2])
    assert len(lines_of(caplog)) == 2
    clock.advance(SAID_S)
    driver.store([1])
    assert len(lines_of(caplog)) == 3


def test_what_was_stored_is_sent_again_only_after_a_minute_or_when_it_is_gone(
    start: Start, shelf: Shelf, clock: ManualClock
) -> None:
    driver = start()
    assert driver.store([1, 2]).success
    num_sent = len(shelf.sent)
    assert driver.store([1, 2]).success
    assert len(shelf.sent) == num_sent
    clock.advance(REMEMBERED_S)
    assert driver.store([1]).success
    assert len(shelf.sent) == num_sent + 1
    assert driver.tier.stats()["existed"] == 3
    del shelf.values[shelf.name_of(1)]
    assert not driver.load([1]).success
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}


def test_a_purge_forgets_what_was_stored(start: Start, shelf: Shelf) -> None:
    driver = start()
    assert driver.store([1, 2]).success
    assert driver.tier.purge() is None
    driver.poll_until(lambda: not isinstance(driver.tier.poll_purge(), int))
    assert not [name for name in shelf.values if name.endswith(".kv")]
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}


def test_a_block_that_is_over_is_no_hit_and_is_written_anew(start: Start, shelf: Shelf) -> None:
    earlier = start(ttl_s=TTL_S)
    assert earlier.store([1, 2]).success
    assert earlier.tier.shutdown(HANG_GUARD_S)  # or its evictor may remove them before anybody asks
    shelf.now_s += 2 * TTL_S
    driver = start(ttl_s=TTL_S)
    assert not driver.load([1]).success
    miss = driver.tier.explain(key_of(1), ReqContext("r"))
    assert miss is not None
    assert miss.cause is MissCause.EXPIRED
    assert driver.store([1]).success
    assert shelf.values[shelf.name_of(1)][1] == shelf.now_s
    assert driver.load_right([1, 2]) == {1}


def test_a_backend_that_keeps_the_time_itself_has_the_last_word(start: Start, shelf: Shelf) -> None:
    shelf.expires_itself = True
    driver = start(ttl_s=TTL_S)
    assert driver.store([1]).success
    shelf.now_s += 2 * TTL_S
    assert driver.load_right([1]) == {1}


@pytest.mark.parametrize(("name", "value"), [("capacity_bytes", 2**30), ("ttl_s", 60)])
def test_where_nothing_can_be_listed_what_needs_it_is_refused(
    start: Start, shelf: Shelf, name: str, value: object
) -> None:
    shelf.can_list = False
    with pytest.raises(ConfigError, match=f"{name}.*where nothing can be listed"):
        start(**{name: value})
    with pytest.raises(ConfigError, match="cannot say what is in it"):
        ShelfTier.open_place({})


def test_a_backend_that_answers_for_none_fails_the_call(start: Start, shelf: Shelf) -> None:
    driver = start()
    shelf.is_away = True
    stored, loaded = driver.store([1]), driver.load([1])
    assert not stored.success
    assert stored.is_fault
    assert not loaded.success
    assert loaded.is_fault
    shelf.is_away = False
    assert driver.store([1]).success


def test_a_document_that_was_not_written_is_no_sign_of_lost_data(
    start: Start, shelf: Shelf, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.puts = {"namespace.json": Put(PutKind.REFUSED, "409")}
    driver = start()
    assert driver.store([1]).success
    shelf.puts = {}
    clock.advance(3600.0)
    assert not driver.load([2]).success
    assert not lines_of(caplog)
    assert driver.store([3]).success
    assert any(name.endswith("namespace.json") for name in shelf.values)


def test_a_document_that_is_locked_is_no_sign_of_lost_data(
    start: Start, shelf: Shelf, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start()
    assert driver.store([1]).success
    shelf.puts = {"namespace.json": Put(PutKind.REFUSED, "409")}
    clock.advance(3600.0)
    assert not driver.load([2]).success
    assert not lines_of(caplog)


class ForgetfulShelf(Shelf):
    """Tells no lengths in lookups and no times in listings."""

    has_times = False

    def sizes(self, names: Sequence[str], *, is_lookup: bool) -> dict[str, Size]:
        found = super().sizes(names, is_lookup=is_lookup)
        return dict.fromkeys(found, Size(None)) if is_lookup else found

    def stats(self) -> dict[str, float]:
        return {"values": len(self.values)}


def test_a_blob_without_a_length_is_held_until_it_is_read(start: Start) -> None:
    shelf = ShelfTier.shelf = ForgetfulShelf()
    driver = start()
    assert driver.store([1, 2]).success
    shelf.values[shelf.name_of(2)] = b"cut", NOW_S
    assert driver.lookup(2)
    assert driver.load_right([1, 2]) == {1}
    assert not driver.lookup(2)


def test_a_backend_has_counts_of_its_own(start: Start) -> None:
    ShelfTier.shelf = ForgetfulShelf()
    driver = start()
    assert driver.store([1]).success
    stats = driver.tier.stats()
    assert (stats["values"], stats["stored_blocks"]) == (2, 1)


def test_a_listing_without_times_serves_inspection_and_nothing_that_goes_by_age(start: Start) -> None:
    ShelfTier.shelf = ForgetfulShelf()
    driver = start()
    assert driver.store([1]).success
    place = ShelfTier.open_place({})
    assert not place.has_times
    assert [block.used_s for block in place.blocks()] == [None]
    with pytest.raises(ConfigError, match="capacity_bytes"):
        start(capacity_bytes=2**30)


def test_a_blob_that_has_a_length_and_cannot_be_read_is_unreadable_and_gone_when_it_is_gone(
    start: Start, shelf: Shelf
) -> None:
    assert start().store([1]).success
    place = ShelfTier.open_place({})
    (block,) = place.blocks()
    shelf.cannot_read = True
    assert place.check(block) is BlockState.UNREADABLE
    shelf.values.clear()
    assert place.check(block) is BlockState.GONE


def test_an_empty_namespace_beside_another_is_said_once(
    start: Start, shelf: Shelf, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = "f" * 32
    shelf.values[shelf.names.document(other)] = b'{"layout_version": 2}', NOW_S
    shelf.namespaces = [other]
    driver = start()
    for _ in range(3):
        assert not driver.load([1]).success
        assert not driver.lookup(2)
        clock.advance(120.0)
    said = [line for line in caplog.messages if "holds nothing here" in line]
    assert len(said) == 1
    assert "ffffffff has an unknown number of blocks" in said[0]


class LendingShelf(Shelf):
    """Sends headers from memory of its own alone."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memoryview(bytearray(64 * ENVELOPE_BYTES))
        self.lent: list[bool] = []

    @contextmanager
    def lend_headers(self, num_blocks: int, *, has_scratch: bool) -> Iterator[list[Lent]]:
        starts = range(0, num_blocks * ENVELOPE_BYTES, ENVELOPE_BYTES)
        yield [Lent(self.memory[begin : begin + ENVELOPE_BYTES], is_registered=True) for begin in starts]

    def _put(self, blob: Blob) -> Put:
        header, _ = blob.parts if blob.name.endswith(".kv") else (b"", b"")
        self.lent.append(isinstance(header, memoryview) and header.obj is self.memory.obj)
        return super()._put(blob)


def test_headers_stand_in_the_memory_that_the_backend_lends(start: Start) -> None:
    shelf = ShelfTier.shelf = LendingShelf()
    driver = start()
    assert driver.store([1, 2]).success
    assert shelf.lent == [False, True, True]  # the first is the document
    assert driver.load_right([1, 2]) == {1, 2}


def test_keys_of_a_block_and_its_name_belong_together() -> None:
    names = FolderNames("a/b")
    key = OffloadKey(b"\x00" * 36)
    parsed = names.parse(names.block("0" * 32, key))
    assert parsed is not None
    assert parsed.block == key
