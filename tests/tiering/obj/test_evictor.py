"""The capacity is kept by deleting our own oldest objects, and nothing that is not ours."""

from collections.abc import Iterator
from threading import Semaphore

import pytest
from tests.tiering.obj.conftest import HANG_GUARD_S, Bucket, StartTier

from kvtier.settings import parse_settings
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver
from kvtier.tiering.kit.backend import Counters
from kvtier.tiering.kit.blobs import BlobKind, FolderNames, Listed
from kvtier.tiering.kit.blobs.evictor import Evictor, OwnListing, plan_victims
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.obj.blobs import EARLIER_NAMES, ObjBlobs
from kvtier.tiering.obj.settings import ObjSettings

BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES
CAPACITY_BYTES = 64 * BLOCK_BYTES
BEGINNING_S = 1_767_225_600.0


def listed(age_s: int, name: str = "x", num_bytes: int = 10) -> Listed:
    """Return an object written that many seconds after the beginning."""
    return Listed(BEGINNING_S + age_s, name, num_bytes)


def fill(driver: TierDriver, first: int, count: int) -> None:
    """Store blocks, each until it is taken: what is declined finds room after a pass."""
    for number in range(first, first + count):
        driver.poll_until(lambda number=number: driver.store([number]).success)  # type: ignore[misc]  # a default


@pytest.mark.parametrize(("excess_bytes", "count"), [(-5, 0), (0, 0), (1, 1), (10, 1), (11, 2), (99, 3)])
def test_no_more_is_deleted_than_must_be(excess_bytes: int, count: int) -> None:
    oldest = [listed(age) for age in range(3)]
    assert plan_victims(oldest, excess_bytes) == oldest[:count]


def test_age_orders_and_then_the_name() -> None:
    assert sorted([listed(2, "a"), listed(1, "c"), listed(1, "b")]) == [
        listed(1, "b"),
        listed(1, "c"),
        listed(2, "a"),
    ]


NAMESPACE = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        (f"root/{NAMESPACE}/ab/abcdef.kv", True),
        (f"root/{NAMESPACE}/groups/{NAMESPACE}.kvg", True),
        (f"root/{NAMESPACE}/namespace.json", False),
        (f"root/{NAMESPACE}/ab/cdef.kv", False),
        (f"root/{NAMESPACE}/ab/abcdef.kv.bak", False),
        (f"root/{NAMESPACE}/ab/ABCDEF.kv", False),
        (f"root/{NAMESPACE}/groups/x.kvg", False),
        (f"root/other/{NAMESPACE}/ab/abcdef.kv", False),
        (f"other/{NAMESPACE}/ab/abcdef.kv", False),
        (f"{NAMESPACE}/ab/abcdef.kv", False),
        ("root/notes.txt", False),
    ],
)
def test_only_names_that_we_give_are_ours(name: str, is_ours: bool) -> None:
    parsed = FolderNames("root", EARLIER_NAMES).parse(name)
    assert (parsed is not None and parsed.kind in (BlobKind.BLOCK, BlobKind.EARLIER)) is is_ours


def test_the_names_that_we_give_are_ours_whatever_the_root() -> None:
    for root in ("", "a/b"):
        names, block = FolderNames(root), b"\xab\xcd\x00\x00\x00\x00"
        assert names.parse(names.block(NAMESPACE, block)) == (BlobKind.BLOCK, NAMESPACE, block)
        assert names.parse(names.document(NAMESPACE)) == (BlobKind.DOCUMENT, NAMESPACE, b"")
        assert names.parse(names.page(NAMESPACE)) == (BlobKind.PAGE, NAMESPACE, b"")


def test_a_listing_counts_and_passes_on_what_is_ours() -> None:
    ours = f"{NAMESPACE}/ab/abcdef.kv"
    listing = OwnListing([listed(1, ours, 7), listed(2, "notes.txt", 100)], FolderNames())
    assert list(listing) == [listed(1, ours, 7)]
    assert listing.total_bytes == 7


def test_the_oldest_go_and_the_youngest_stay(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier(capacity_bytes=CAPACITY_BYTES)
    fill(driver, 0, 200)
    assert driver.tier.shutdown(HANG_GUARD_S)
    assert bucket.num_bytes(".kv") <= CAPACITY_BYTES
    assert len(bucket.names(".kv")) >= 48
    reader = start_tier()
    assert reader.load(list(range(200 - NUM_ROWS, 200))).success
    assert not reader.load([0]).success
    assert driver.tier.stats()["evicted"] >= 136


def test_what_is_not_ours_survives_in_our_namespace_and_in_others(
    start_tier: StartTier, bucket: Bucket, prefix: str
) -> None:
    driver = start_tier(capacity_bytes=CAPACITY_BYTES)
    driver.store([0])
    inside = bucket.name_of(0).rpartition("/")[0]
    foreign = [
        f"{prefix}/notes.txt",
        f"{prefix}/{NAMESPACE}/ab/notes.kv",
        f"{inside}/readme",
        f"{prefix}x/a.kv",
    ]
    for name in foreign:
        bucket.write(name, bytes(BLOCK_BYTES))
    fill(driver, 1, 150)
    assert driver.tier.shutdown(HANG_GUARD_S)
    assert driver.tier.stats()["evicted"] > 0
    assert all(len(bucket.read(name)) == BLOCK_BYTES for name in foreign)
    assert len(bucket.names("namespace.json")) == 1


def test_two_engines_keep_one_capacity_over_their_namespaces(start_tier: StartTier, bucket: Bucket) -> None:
    first = start_tier("model-a", capacity_bytes=CAPACITY_BYTES)
    second = start_tier("model-b", capacity_bytes=CAPACITY_BYTES)
    for begin in range(0, 100, 10):
        fill(first, begin, 10)
        fill(second, begin, 10)
    assert first.tier.shutdown(HANG_GUARD_S)
    assert second.tier.shutdown(HANG_GUARD_S)
    assert bucket.num_bytes(".kv") <= CAPACITY_BYTES * 9 // 8
    assert bucket.num_bytes(".kv") >= CAPACITY_BYTES // 2


def test_while_nothing_can_be_listed_stores_are_declined_at_an_eighth() -> None:
    settings = parse_settings(
        ObjSettings,
        {
            "url": "s3://bucket",
            "prefix": "",
            "capacity_bytes": 8000 * 1000,
            "timeout_s": 0.2,
            "num_threads": 1,
            "endpoint": "http://127.0.0.1:9",
            "region": "us-east-1",
            "allow_http": True,
        },
    )
    evictor = Evictor("obj", ObjBlobs(settings), 8000, Counters())
    assert [evictor.admit(400) for _ in range(4)] == [True, True, False, False]
    evictor.end_write(400, has_written=False)
    assert evictor.admit(400)
    evictor.close()


class SlowListing(ObjBlobs):
    """An empty store whose listings begin when the test lets them."""

    def __init__(self) -> None:
        self.names = FolderNames()
        self.begun = Semaphore(0)
        self.let_go = Semaphore(0)

    def list_all(self, namespace: str | None = None) -> Iterator[Listed]:
        del namespace
        self.begun.release()
        assert self.let_go.acquire(timeout=HANG_GUARD_S)
        return iter(())


def test_what_was_being_written_when_a_pass_began_counts_until_the_next() -> None:
    store = SlowListing()
    evictor = Evictor("obj", store, 8000, Counters())  # an eighth is 1000
    assert evictor.admit(600)
    assert store.begun.acquire(timeout=HANG_GUARD_S)
    store.let_go.release()

    # The second pass begins when the first has ended; neither has listed what is under way.
    assert not evictor.admit(500)
    assert store.begun.acquire(timeout=HANG_GUARD_S)
    assert not evictor.admit(500)
    evictor.end_write(600, has_written=True)
    store.let_go.release()

    # The third begins after the end of the write, and the fourth when the third has ended.
    assert not evictor.admit(500)
    assert store.begun.acquire(timeout=HANG_GUARD_S)
    assert not evictor.admit(500)
    store.let_go.release()
    assert store.begun.acquire(timeout=HANG_GUARD_S)
    assert evictor.admit(500)
    store.let_go.release()
    evictor.close()
