"""Whatever stands under our key: right bytes or a miss, damaged values are replaced, foreign ones left alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.tiering.forged_blocks import with_codec
from tests.tiering.mooncake.conftest import StartTier, salted
from tests.tiering.mooncake.live import LiveStore, Vandal

from kvtier.namespace import Namespace, make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, content_of, key_of, make_config
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, make_header

pytestmark = pytest.mark.servers

NameOf = Callable[[int], str]


@pytest.fixture
def namespace(salt: str) -> Namespace:
    """The namespace of the test's tiers."""
    return make_namespace(salted(make_config("model-a"), salt), ROW_BYTES)


def value_of(namespace: Namespace, number: int) -> bytes:
    """Return what the store should keep of a block."""
    payload = content_of(number).tobytes()
    return make_header(key_of(number), namespace.digest, payload) + payload


def flipped(value: bytes, position: int) -> bytes:
    """Return ``value`` with one bit changed."""
    return value[:position] + bytes([value[position] ^ 1]) + value[position + 1 :]


def assert_is_missed(driver: TierDriver, reason: str) -> None:
    """Load block 1 next to a good one; only that one comes."""
    assert driver.store([2]).success
    result = driver.load([1, 2])
    assert result.successful_keys == frozenset({key_of(2)})
    assert bytes(driver.rows[1]) == bytes(content_of(2))
    assert driver.tier.stats()[reason] == 1


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no envelope": lambda value: bytes(len(value)),
    "a flipped bit in the row": lambda value: flipped(value, ENVELOPE_BYTES + 5000),
    "a flipped bit in the envelope": lambda value: flipped(value, 20),
    "one byte less": lambda value: value[:-1],
    "one byte more": lambda value: value + b"\0",
    "envelope alone": lambda value: value[:ENVELOPE_BYTES],
    "a single byte": lambda value: b"x",
    "twice as long": lambda value: value + value,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_value_is_a_miss_and_can_be_stored_anew(
    shared_store: LiveStore,
    start_tier: StartTier,
    vandal: Vandal,
    name_of: NameOf,
    namespace: Namespace,
    damage: Callable[[bytes], bytes],
) -> None:
    driver = start_tier(shared_store)
    vandal.put(name_of(1), damage(value_of(namespace, 1)))
    assert_is_missed(driver, "damaged")
    driver.poll_until(lambda: driver.store([1]).success)
    assert driver.load([1]).success
    assert bytes(driver.rows[0]) == bytes(content_of(1))


def test_a_block_under_another_name_is_damaged(
    shared_store: LiveStore, start_tier: StartTier, vandal: Vandal, name_of: NameOf, namespace: Namespace
) -> None:
    driver = start_tier(shared_store)
    vandal.put(name_of(1), value_of(namespace, 7))
    assert_is_missed(driver, "damaged")


@pytest.mark.parametrize(("digest", "codec"), [(bytes(32), 0), (None, 9)], ids=["namespace", "codec"])
def test_a_foreign_value_is_a_miss_and_left_alone(
    shared_store: LiveStore,
    start_tier: StartTier,
    vandal: Vandal,
    name_of: NameOf,
    namespace: Namespace,
    digest: bytes | None,
    codec: int,
) -> None:
    driver = start_tier(shared_store)
    owner = namespace if digest is None else replace(namespace, digest=digest)
    value = with_codec(value_of(owner, 1), codec)
    vandal.put(name_of(1), value)
    assert_is_missed(driver, "foreign")
    assert driver.tier.stats()["deferred_deletes"] == 0
    assert vandal.get(name_of(1)) == value


def test_a_value_whose_lease_ends_while_it_is_read_is_judged_by_its_envelope(start_tier: StartTier) -> None:
    store = LiveStore(lease_ms=0)
    try:
        driver = start_tier(store)
        assert driver.store([1, 2]).success
        assert driver.load([1, 2]).success
        assert bytes(driver.rows[1]) == bytes(content_of(2))
    finally:
        store.close()


def test_what_the_store_keeps_is_an_envelope_and_the_row(
    shared_store: LiveStore, start_tier: StartTier, vandal: Vandal, name_of: NameOf, namespace: Namespace
) -> None:
    start_tier(shared_store).store([1])
    assert vandal.get(name_of(1)) == value_of(namespace, 1)
    assert name_of(1).startswith(namespace.name)
