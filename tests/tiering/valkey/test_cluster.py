"""A cluster: blocks spread over nodes, follow their slot when it moves, and a node that is away costs its own only."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from tests.ports import free_port
from tests.tiering.valkey.conftest import StartServer, StartTier
from tests.tiering.valkey.live import HANG_GUARD_S, LiveServer
from tests.tiering.valkey.live_cluster import LiveCluster, name_of

from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, TierDriver, content_of, key_of
from kvtier.tiering.kit.blobs import BlobKind
from kvtier.tiering.kit.blobs.recent import REMEMBERED_S
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.blobs import ValkeyNames
from kvtier.tiering.valkey.cluster import REFRESH_S, Destination, redirection, slot_of
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.resp import Reply

NUMBERS = list(range(NUM_ROWS))
SHORT_TIMEOUT_S = 2.0
"""Of tiers some of whose nodes hang: the test waits for it, and no other node may be slower on a busy machine."""

NUM_TRIES = 50
"""Jobs after which a tier must have found out where everything is; each may be a time-out on a busy machine."""
ASKED = Address("here", 1)


@pytest.fixture
def healthy(cluster: LiveCluster) -> Iterator[LiveCluster]:
    """The cluster, empty, and whole again after the test."""
    yield cluster
    cluster.heal()


@pytest.fixture
def driver(healthy: LiveCluster, start_tier: StartTier, clock: ManualClock) -> TierDriver:
    """A tier on the cluster that holds sixteen blocks."""
    driver = start_tier(healthy.url, cluster=True, timeout_s=HANG_GUARD_S, clock=clock)
    assert driver.store(NUMBERS).success
    return driver


@pytest.fixture
def hasty(driver: TierDriver, healthy: LiveCluster, start_tier: StartTier, clock: ManualClock) -> TierDriver:
    """Another tier on the same blocks, which does not wait long for a node that hangs."""
    return start_tier(healthy.url, cluster=True, timeout_s=SHORT_TIMEOUT_S, clock=clock)


def store_when_found(driver: TierDriver, clock: ManualClock) -> None:
    """Store the sixteen blocks, once the tier has read a map of the cluster as it is now."""
    for _ in range(NUM_TRIES):
        clock.advance(REMEMBERED_S)  # longer than the tier takes for sure what it has stored
        if driver.store(NUMBERS).success:
            return
    raise AssertionError("the tier does not find what the cluster's nodes agree on")


def owned_by(cluster: LiveCluster, node: LiveServer) -> frozenset[int]:
    """Return which of the sixteen blocks a node has."""
    return frozenset(number for number in NUMBERS if cluster.owner_of(number) is node)


def keys_of(numbers: frozenset[int]) -> frozenset[bytes]:
    """Return the keys of blocks."""
    return frozenset(key_of(number) for number in numbers)


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("MOVED 5 there:7", Destination(Address("there", 7))),
        ("MOVED 5 :7", Destination(Address("here", 7))),
        ("MOVED 5 ::1:7", Destination(Address("::1", 7))),
        ("ASK 5 there:7", Destination(Address("there", 7), is_asking=True)),
        ("MOVED 5 there", None),
        ("MOVED 5 there:70000", None),
        ("MOVED", None),
        ("ERR MOVED 5 there:7", None),
    ],
)
def test_a_redirection_is_read(text: str, destination: Destination | None) -> None:
    assert redirection(Reply("-", text=text), ASKED) == destination


def test_a_reply_that_is_no_error_redirects_nobody() -> None:
    assert redirection(Reply("+", text="MOVED 5 there:7"), ASKED) is None
    assert redirection(TierError("valkey", "away"), ASKED) is None


def test_blocks_spread_over_the_nodes(driver: TierDriver, healthy: LiveCluster) -> None:
    shares = [owned_by(healthy, node) for node in healthy.nodes[:3]]
    assert all(shares)
    for node, share in zip(healthy.nodes[:3], shares, strict=True):
        with node.client() as client:
            parsed = [ValkeyNames().parse(name.decode()) for name in client.scan_iter()]
        blocks = [one for one in parsed if one is not None and one.kind is BlobKind.BLOCK]
        assert len(blocks) == len(share)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_node_that_is_away_costs_its_own_blocks_only(
    hasty: TierDriver, healthy: LiveCluster, clock: ManualClock, is_killed: bool
) -> None:
    node = healthy.nodes[2]
    lost = owned_by(healthy, node)
    others = frozenset(NUMBERS) - lost
    assert lost
    assert others
    node.kill() if is_killed else node.pause()
    try:
        result = hasty.load(NUMBERS)
        assert result.successful_keys == keys_of(others)
        assert not result.is_fault
        for number in others:
            assert np.array_equal(hasty.rows[number], content_of(number))
        clock.advance(60.0)
        assert [hasty.lookup(number) for number in NUMBERS] == [number in others for number in NUMBERS]
        hasty.tier.check_reachable()
    finally:
        node.start() if is_killed else node.resume()
    healthy.heal()
    store_when_found(hasty, clock)
    assert hasty.load(NUMBERS).success


def test_a_slot_that_has_moved_is_followed(driver: TierDriver, healthy: LiveCluster) -> None:
    number = 100
    source = healthy.owner_of(number)
    target = next(node for node in healthy.nodes[:3] if node is not source)
    healthy.move_slot(slot_of(name_of(number)), source, target)
    assert driver.store([number]).success
    with target.client() as client:
        assert client.exists(name_of(number))
    assert driver.lookup(number)
    assert driver.load([number]).success
    healthy.flush()
    healthy.move_slot(slot_of(name_of(number)), target, source)


def test_a_slot_that_is_just_moving_is_asked_for_at_both_ends(
    driver: TierDriver, healthy: LiveCluster
) -> None:
    number = 100
    source = healthy.owner_of(number)
    target = next(node for node in healthy.nodes[:3] if node is not source)
    slot = slot_of(name_of(number))
    with source.client() as old, target.client() as new:
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", healthy.id_of(source))
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", healthy.id_of(target))
        # The source has no such name any more, so each command is sent on.
        assert driver.store([number]).success
        assert driver.load([number]).success
        assert driver.tier.stats()["hits"] == 1
        for client in (old, new):
            client.execute_command("CLUSTER SETSLOT", slot, "STABLE")
    assert not driver.load([number]).success


def test_a_purge_takes_names_of_a_slot_that_is_just_moving(driver: TierDriver, healthy: LiveCluster) -> None:
    number = 100
    source = healthy.owner_of(number)
    target = next(node for node in healthy.nodes[:3] if node is not source)
    slot = slot_of(name_of(number))
    with source.client() as old, target.client() as new:
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", healthy.id_of(source))
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", healthy.id_of(target))
        assert driver.store([number]).success  # at the new node, where only ASKING is answered
        with closing(ValkeyTier.open_place({"url": healthy.url, "cluster": True})) as place:
            blocks = list(place.blocks())
            assert key_of(number) in [block.key for block in blocks]
            assert place.remove(blocks, unless_changed=False).num == len(blocks) == NUM_ROWS + 1
        assert not new.execute_command("CLUSTER COUNTKEYSINSLOT", slot)
        for client in (old, new):
            client.execute_command("CLUSTER SETSLOT", slot, "STABLE")


def test_a_failover_during_jobs_costs_at_most_misses(
    driver: TierDriver, healthy: LiveCluster, clock: ManualClock
) -> None:
    old = healthy.nodes[0] if healthy.owner_of_first() is healthy.nodes[0] else healthy.replica
    new = healthy.replica if old is healthy.nodes[0] else healthy.nodes[0]
    jobs = [driver.submit(NUMBERS, NUMBERS, is_promotion=True) for _ in range(20)]
    healthy.begin_failover(new)
    jobs += [driver.submit(NUMBERS, NUMBERS, is_promotion=True) for _ in range(20)]
    healthy.end_failover(new)
    driver.poll_until(lambda: set(jobs) <= set(driver.results))
    healthy.heal()
    store_when_found(driver, clock)
    assert driver.load(NUMBERS).success
    for number in NUMBERS:
        assert np.array_equal(driver.rows[number], content_of(number))


def test_a_primary_that_dies_is_followed_by_its_replica(
    driver: TierDriver, healthy: LiveCluster, clock: ManualClock
) -> None:
    old = healthy.owner_of_first()
    new = healthy.replica if old is healthy.nodes[0] else healthy.nodes[0]
    old.kill()
    try:
        healthy.take_over(new)
        store_when_found(driver, clock)
        assert driver.load(NUMBERS).success
    finally:
        old.start()


def test_a_cluster_that_is_reached_as_a_single_server_is_said(
    healthy: LiveCluster, start_tier: StartTier
) -> None:
    messages = set()
    for node in healthy.nodes[:3]:
        other = start_tier(node.url)
        try:
            other.tier.check_reachable()
        except TierError as error:
            messages.add(str(error).partition(" refuses ")[2])
    assert messages == {"(MOVED): it is one of a cluster: set cluster to true"}


def test_a_single_server_that_is_reached_as_a_cluster_is_said(
    server: LiveServer, start_tier: StartTier
) -> None:
    driver = start_tier(server.url, cluster=True)
    with pytest.raises(TierError, match="not one of a cluster"):
        driver.tier.check_reachable()
    stored = driver.store([1])
    assert (stored.success, stored.is_fault) == (False, True)


def test_a_cluster_without_slots_is_said(start_server: StartServer, start_tier: StartTier) -> None:
    server = start_server("redis", "--cluster-enabled", "yes")
    with pytest.raises(TierError, match="CLUSTERDOWN"):
        start_tier(server.url, cluster=True).tier.check_reachable()


def test_a_cluster_that_is_away_is_said_and_costs_misses(start_tier: StartTier) -> None:
    driver = start_tier(f"redis://eve:sesame@127.0.0.1:{free_port()}", cluster=True)
    with pytest.raises(TierError, match="cannot be reached: Connection refused") as raised:
        driver.tier.check_reachable()
    assert "sesame" not in str(raised.value)
    loaded = driver.load([1])
    assert (loaded.success, loaded.is_fault) == (False, True)
    assert not driver.lookup(1)


def test_a_cluster_that_hangs_as_a_whole_is_a_fault(
    hasty: TierDriver, healthy: LiveCluster, clock: ManualClock
) -> None:
    for node in healthy.nodes:
        node.pause()
    try:
        hasty.load(NUMBERS)
        clock.advance(REFRESH_S)
        loaded = hasty.load(NUMBERS)
        assert (loaded.success, loaded.is_fault) == (False, True)
    finally:
        for node in healthy.nodes:
            node.resume()
    healthy.heal()
    store_when_found(hasty, clock)
    assert hasty.load(NUMBERS).success
