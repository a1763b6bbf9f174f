"""What the storm watches with: each watch sees what it must, forged blocks look right, secrets come again."""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from tests.checked_engine.memory import PAGE_BYTES
from tests.storm import Episode, SimThreads, Weather, run_episode
from tests.storm.cluster import NUM_RANGES, RANGE_SLOTS, ClusterPlace
from tests.storm.laws import BrokenLawError
from tests.storm.secrecy import PlainBytes, StormRing, forge
from tests.storm.tenancy import UNLIMITED, HostWatch, Tenancy

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.departed import HostDeparture
from kvtier.tenants import parse_tenants, tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.testing.manager_suite import REQUEST
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    EncryptedFields,
    Envelope,
    HeaderCheck,
    join_encrypted_header,
    make_header,
    unpack,
)
from kvtier.tiering.valkey.cluster import slot_of

PAGE = bytes(range(PAGE_BYTES))
TENANTS = parse_tenants({"alice": {"quota_bytes": {"host": "2B"}}, "bob": {}}, "", {"host"})


def seal(name: bytes, payload: bytes, tag: bytes = b"t" * 16, counter: int = 0) -> bytes:
    """Return what looks like an encrypted block."""
    fields = EncryptedFields(b"n" * 16, name, len(payload), len(payload), 1, b"s" * 16, counter, 0)
    before, behind = fields.pack()
    return join_encrypted_header(before, tag, behind) + payload


def test_a_plain_page_and_a_plain_header_are_seen() -> None:
    plain = PlainBytes()
    plain.pages.add(PAGE)
    plain.watch(seal(b"a" * 40, bytes(PAGE_BYTES)))
    assert not plain.broken_laws
    plain.watch(seal(b"a" * 40, PAGE, counter=1))
    assert "plain page" in plain.broken_laws[0]
    key = make_offload_key(b"h" * 16, 0)
    plain.watch(make_header(key, b"d" * 32, bytes(PAGE_BYTES)) + bytes(PAGE_BYTES))
    assert "header of a plain block" in plain.broken_laws[1]


def test_a_nonce_that_comes_twice_is_seen_unless_it_is_the_same_block_again() -> None:
    plain = PlainBytes()
    block = seal(b"a" * 40, bytes(PAGE_BYTES))
    plain.watch(block)
    plain.watch(block)
    assert not plain.broken_laws
    plain.watch(seal(b"b" * 40, bytes(PAGE_BYTES)))
    assert plain.broken_laws == ["a nonce has come twice under one key"]


def test_a_forged_block_has_another_name_and_a_right_checksum() -> None:
    target, source = seal(b"a" * 40, b"x" * 64, b"1" * 16), seal(b"b" * 40, b"y" * 64, b"2" * 16, counter=7)
    forged = forge(target, source)
    found = unpack(forged[:ENVELOPE_BYTES])
    assert isinstance(found, Envelope)
    assert (found.key, found.checksum) == (b"a" * 40, b"2" * 16)
    assert forged[ENVELOPE_BYTES:] == b"y" * 64
    assert forge(b"too short", source) == source
    assert isinstance(unpack(forged[: ENVELOPE_BYTES - 1] + b"?"), HeaderCheck)


class _UnfairManager(CPUOffloadingManager):
    """Evicts what was stored first, whosever it is."""

    def evict(
        self,
        num: int,
        named: Collection[OffloadKey],
        protected: Collection[OffloadKey],
        why: HostDeparture = HostDeparture.EVICTED,
        new: Sequence[OffloadKey] = (),
    ) -> list[OffloadKey] | None:
        return super().evict(num, named, protected, why)


def keys_for(name: str, *numbers: int) -> list[OffloadKey]:
    """Return keys of a tenant's blocks."""
    return [make_offload_key(b"%16d" % number, 0, tenant_number(name)) for number in numbers]


@pytest.mark.parametrize("manager_class", [CPUOffloadingManager, _UnfairManager])
def test_a_tenant_that_pays_for_one_beyond_its_quota_is_seen(
    manager_class: type[CPUOffloadingManager],
) -> None:
    manager = manager_class(4, tenants=TENANTS, block_bytes=1)
    HostWatch(manager, TENANTS, 1, None, ManualClock())
    for keys in (keys_for("bob", 1, 2), keys_for("alice", 3, 4)):
        assert manager.prepare_store(keys, REQUEST) is not None
        manager.complete_store(keys, REQUEST)
    if manager_class is _UnfairManager:
        with pytest.raises(BrokenLawError, match="paid for one beyond it"):
            manager.prepare_store(keys_for("alice", 5), REQUEST)
    else:
        output = manager.prepare_store(keys_for("alice", 5), REQUEST)
        assert output is not None
        assert output.evicted_keys == keys_for("alice", 3)


class _AgelessManager(CPUOffloadingManager):
    """Finds what is over."""

    def find(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.table.is_ready(key)


def test_a_block_that_is_found_beyond_its_time_is_seen() -> None:
    clock = ManualClock()
    manager = _AgelessManager(4, ttl_s=10.0, clock=clock)
    watch = HostWatch(manager, None, 1, 10.0, clock)
    keys = keys_for("bob", 1)
    manager.prepare_store(keys, REQUEST)
    manager.complete_store(keys, REQUEST)
    clock.advance(9.0)
    assert manager.lookup(keys[0], REQUEST)
    assert not watch.list_over()
    clock.advance(1.0)
    with pytest.raises(BrokenLawError, match="beyond its time"):
        manager.lookup(keys[0], REQUEST)
    assert watch.list_over() == set(keys)


@pytest.mark.parametrize(
    ("setting", "name", "is_served"),
    [
        (None, "eve", True),
        (None, 7, True),
        ({"alice": {}}, "alice", True),
        ({"alice": {}}, "eve", False),
        ({"alice": {}}, None, False),
        ({"alice": {}, "*": {}}, "eve", True),
        ({"alice": {}, "*": {}}, None, True),
        ({"alice": {}, "*": {}}, "*", False),
        ({"alice": {}, "*": {}}, "", False),
        ({"alice": {}, "*": {}}, 7, False),
    ],
)
def test_who_is_served_is_told_from_the_settings_alone(
    setting: dict[str, object] | None, name: object, *, is_served: bool
) -> None:
    assert Tenancy(setting).is_served(name) is is_served
    assert Tenancy(setting).find(UNLIMITED).number == 0


def make_cluster() -> ClusterPlace:
    """Return a cluster."""
    rng, clock = random.Random(1), ManualClock()
    return ClusterPlace(Weather(rng, clock, clock, SimThreads(rng, clock)))


def test_a_slot_on_its_way_is_served_at_both_ends_and_by_asking_alone() -> None:
    cluster = make_cluster()
    names = [b"name %d" % number for number in range(40)]
    owners = {
        name: next(node for node in cluster.nodes if cluster.redirect(node, name, is_asking=False) is None)
        for name in names
    }
    for name in names:
        assert owners[name].answer([b"SET", name, b"value"]) == b"+OK\r\n"
    while not cluster.happened["ask"]:
        cluster.move_on()
        for name in names:
            replies = [node.answer([b"GET", name]) for node in cluster.nodes]
            served = [reply for reply in replies if reply.startswith(b"$")]
            asked = [node.answer([b"GET", name], is_asking=True) for node in cluster.nodes]
            assert sum(reply.startswith(b"$5") for reply in asked) == 1
            assert len(served) == (not any(reply.startswith(b"-ASK") for reply in replies))
    assert slot_of(names[0]) // RANGE_SLOTS < NUM_RANGES


def test_a_dead_node_is_replaced_at_another_address() -> None:
    cluster = make_cluster()
    before = {node.port for node in cluster.nodes}
    cluster.fail_over(cluster.nodes[0])
    after = {node.port for node in cluster.nodes}
    assert len(before - after) == 1
    assert not cluster.is_honest
    with pytest.raises(ConnectionRefusedError):
        cluster.nodes[0].require_alive()
    assert b":%d" % cluster.nodes[0].port in cluster.describe_slots()


def test_a_ring_rotates_and_drops() -> None:
    ring = StormRing(lambda: 1.0)
    rng = random.Random(3)
    seen = {ring.change(rng) for _ in range(40)}
    assert seen == {"key dropped", "key rotated"}
    assert Path(ring.path).exists()
    ring.close()
    assert not Path(ring.path).exists()


EVENTS = frozenset(
    {
        "aborted while loading",
        "aborted with a step under way",
        "device hit",
        "draft accepted",
        "draft rejected with the next step planned",
        "key rotated",
        "load beyond a device hit",
        "load failed on one worker",
        "load from a tier",
        "load good",
        "load to resume",
        "output after a pre-emption",
        "pre-empted for blocks",
        "reset",
        "resumed with output",
        "tenant purged",
        "tenant purged in a tier",
        "told to wait while its prefix is loaded",
        "two steps under way",
    }
)


@pytest.mark.slow
def test_a_few_storms_reach_what_makes_an_engine_hard_to_serve() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        seen += run_episode(Episode(seed, num_operations=150)).seen
    assert not EVENTS - seen.keys()
