"""What the store keeps, and foreign values, which are left alone. Damaged ones are in ``test_roles.py``."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.tiering.forged_blocks import with_codec
from tests.tiering.mooncake.conftest import StartTier, salted
from tests.tiering.mooncake.live import LiveStore, Vandal

from kvtier.namespace import Namespace, make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, content_of, key_of, make_config
from kvtier.tiering.kit.envelope import make_header

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


def assert_is_missed(driver: TierDriver, reason: str) -> None:
    """Load block 1 next to a good one; only that one comes."""
    assert driver.store([2]).success
    result = driver.load([1, 2])
    assert result.successful_keys == frozenset({key_of(2)})
    assert bytes(driver.rows[1]) == bytes(content_of(2))
    assert driver.tier.stats()[reason] == 1


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
