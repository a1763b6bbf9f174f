"""Names of blocks: apart for each namespace, spread over the nodes of a cluster."""

from collections import Counter

from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, key_of, make_config
from kvtier.tiering.valkey.blobs import ValkeyNames
from kvtier.tiering.valkey.cluster import slot_of


def test_a_name_has_namespace_and_key_in_its_hash_tag() -> None:
    namespace = make_namespace(make_config(), ROW_BYTES)
    name = ValkeyNames().block(namespace.name, key_of(5))
    assert name == f"kvtier:{{{namespace.name}:{key_of(5).hex()}}}"


def test_blocks_spread_over_the_slots() -> None:
    namespace = make_namespace(make_config(), ROW_BYTES).name
    thirds = Counter(
        slot_of(ValkeyNames().block(namespace, key_of(number)).encode()) * 3 // 16_384
        for number in range(3000)
    )
    assert min(thirds.values()) > 800


def test_a_reset_gives_every_block_another_name() -> None:
    names = {
        ValkeyNames().block(make_namespace(make_config(), ROW_BYTES, epoch).name, key_of(1))
        for epoch in (b"", bytes(16), bytes(range(16)))
    }
    assert len(names) == 3
