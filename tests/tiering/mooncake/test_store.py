"""Each answer of the store is handled by its name."""

import pytest
from tests.tiering.mooncake.fakes import ScriptedStore, open_store

from kvtier.errors import TierError
from kvtier.namespace import make_namespace
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, key_of, make_config
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.mooncake.blobs import LEASE_S
from kvtier.tiering.mooncake.errors import MASTER_AWAY, Code, name_of

UNKNOWN = -4711
VALUE_BYTES = ENVELOPE_BYTES + ROW_BYTES
NO_ROOM = ["NO_AVAILABLE_HANDLE", "KEYS_EXCEED_BUCKET_LIMIT", "KEYS_ULTRA_LIMIT"]
NO_ROOM += ["DFS_QUOTA_EXCEEDED", "TENANT_QUOTA_EXCEEDED"]
ABSENT = ["OBJECT_NOT_FOUND", "REPLICA_IS_NOT_READY", "REPLICA_NOT_FOUND", "REPLICA_IS_GONE"]
HELD = ["OK", "OBJECT_ALREADY_EXISTS"]
OTHERS = [code for code in Code if code not in MASTER_AWAY]


class Rig:
    """A block store over a scripted one."""

    def __init__(self) -> None:
        self.native = ScriptedStore()
        self.clock = ManualClock()
        self.store = open_store(self.native, self.clock)
        # That of a reset, which is not described.
        identity = make_namespace(make_config(), ROW_BYTES, epoch=bytes(15) + b"1")
        self.namespace = self.store.open_namespace(identity, is_new=True)
        self.keys = [key_of(1), key_of(2)]

    def count(self, name: str) -> float:
        """Return one of the store's counts."""
        return self.store.stats()[name]


@pytest.fixture
def rig() -> Rig:
    """A block store over a scripted one."""
    return Rig()


@pytest.mark.parametrize("code", OTHERS, ids=lambda code: code.name)
def test_what_a_put_answers_decides_what_became_of_a_block(rig: Rig, code: Code) -> None:
    rig.native.answer, rig.native.there = code, 1
    moved = rig.store.store(rig.namespace, rig.keys, [0, 1])
    assert list(moved.succeeded) == (rig.keys if code.name in HELD else [])
    assert moved.is_fault == (code.name not in HELD + NO_ROOM)
    assert rig.count("stored_blocks") == 2 * (code is Code.OK)
    assert rig.count("existed") == 2 * (code is Code.OBJECT_ALREADY_EXISTS)
    assert rig.count("declined") == 2 * (code.name in NO_ROOM)
    assert rig.count("store_errors") == 2 * (code.name not in HELD + NO_ROOM)


@pytest.mark.parametrize("code", OTHERS, ids=lambda code: code.name)
def test_what_a_get_answers_decides_why_a_block_did_not_come(rig: Rig, code: Code) -> None:
    rig.native.answer = code
    moved = rig.store.load(rig.namespace, rig.keys, [0, 1])
    assert not moved.succeeded
    assert moved.is_fault == (code.name not in ABSENT)
    assert rig.count("absent") == 2 * (code.name in ABSENT)
    assert rig.count("io_error") == 2 * (code.name not in ABSENT)


@pytest.mark.parametrize("code", sorted(MASTER_AWAY), ids=lambda code: code.name)
def test_a_master_that_is_away_fails_the_whole_call(rig: Rig, code: Code) -> None:
    rig.native.answer = code
    with pytest.raises(TierError, match=code.name):
        rig.store.load(rig.namespace, rig.keys, [0, 1])


def test_an_answer_without_a_name_is_a_fault(rig: Rig) -> None:
    rig.native.answer = UNKNOWN
    assert rig.store.store(rig.namespace, rig.keys, [0, 1]).is_fault
    assert rig.store.load(rig.namespace, rig.keys, [0, 1]).is_fault
    assert rig.store.contains_batch(rig.namespace, rig.keys) == []
    assert (rig.count("store_errors"), rig.count("io_error"), rig.count("lookup_errors")) == (2, 2, 2)
    assert name_of(UNKNOWN) == "error -4711"


def test_a_length_of_another_value_is_no_success(rig: Rig) -> None:
    rig.native.answer = VALUE_BYTES - 1
    assert not rig.store.load(rig.namespace, rig.keys, [0, 1]).succeeded


def test_the_right_length_alone_is_no_success(rig: Rig) -> None:
    rig.native.answer = VALUE_BYTES
    moved = rig.store.load(rig.namespace, rig.keys, [0, 1])
    assert not moved.succeeded
    assert rig.count("damaged") == 2


def test_a_damaged_block_that_is_leased_is_not_held_and_removed_later(rig: Rig) -> None:
    rig.native.answer = VALUE_BYTES
    rig.store.load(rig.namespace, rig.keys, [0, 1])
    rig.native.answer = Code.OBJECT_HAS_LEASE
    assert not rig.store.store(rig.namespace, rig.keys, [0, 1]).succeeded
    rig.native.answer = 1
    assert rig.store.contains_batch(rig.namespace, rig.keys) == []
    rig.native.answer = Code.OK
    rig.clock.advance(LEASE_S)
    rig.store.contains_batch(rig.namespace, [key_of(3)])
    assert rig.count("deferred_deletes") == 0
    assert rig.count("removed_damaged") == 2
    assert list(rig.store.store(rig.namespace, rig.keys, [0, 1]).succeeded) == rig.keys


def test_deferred_deletes_are_not_looked_up_so_that_their_lease_ends(rig: Rig) -> None:
    rig.native.answer = VALUE_BYTES
    rig.store.load(rig.namespace, rig.keys, [0, 1])
    rig.native.asked.clear()
    assert rig.store.contains_batch(rig.namespace, rig.keys) == []
    assert not [name for name in rig.native.asked if name.startswith(rig.namespace.name)]
