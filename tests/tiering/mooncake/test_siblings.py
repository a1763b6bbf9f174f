"""What a store says of other namespaces, over one that is a dictionary; ``test_roles.py`` has a real one."""

import ctypes
import dataclasses
import json
import logging
from contextlib import suppress

import pytest
from tests.tiering.mooncake.fakes import ScriptedStore, open_store

from kvtier.errors import TierError
from kvtier.namespace import Namespace, make_namespace
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, key_of, make_config
from kvtier.tiering.mooncake.descriptions import DESCRIBE_S, DESCRIPTION_BYTES, DESCRIPTION_NAMES
from kvtier.tiering.mooncake.errors import Code
from kvtier.tiering.mooncake.native import ReplicaOptions


class DictStore(ScriptedStore):
    """A store of values in a dictionary; ``leased`` ones are not removed."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.leased: set[str] = set()

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: object, lengths: object, config: ReplicaOptions, /
    ) -> list[int]:
        """Write values; one that is there stays."""
        assert isinstance(addresses, list)
        assert isinstance(lengths, list)
        answers: list[int] = []
        for name, pieces, sizes in zip(names, addresses, lengths, strict=True):
            answers.append(Code.OBJECT_ALREADY_EXISTS if name in self.values else Code.OK)
            read = b"".join(map(ctypes.string_at, pieces, sizes))
            self.values.setdefault(name, read)
        return answers

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: object, lengths: object, /
    ) -> list[int]:
        """Read values of the length asked for into one piece each."""
        assert isinstance(addresses, list)
        assert isinstance(lengths, list)
        answers: list[int] = []
        for name, pieces, sizes in zip(names, addresses, lengths, strict=True):
            value = self.values.get(name)
            if value is None or len(value) != sum(sizes):
                answers.append(Code.OBJECT_NOT_FOUND if value is None else Code.INVALID_PARAMS)
                continue
            ctypes.memmove(pieces[0], value, len(value))
            answers.append(len(value))
        return answers

    def batch_is_exist(self, names: list[str], /) -> list[int]:
        """Return 1 for what is there, and lease it."""
        return [int(name in self.values) for name in names]

    def get_size(self, name: str, /) -> int:
        """Return the length of what is there."""
        return len(self.values[name]) if name in self.values else Code.OBJECT_NOT_FOUND

    def batch_remove(self, names: list[str], /) -> list[int]:
        """Remove what is not leased."""
        answers: list[int] = []
        for name in names:
            answers.append(Code.OBJECT_HAS_LEASE if name in self.leased else Code.OK)
            if name not in self.leased:
                self.values.pop(name, None)
        return answers


class Engine:
    """What an engine has of the siblings, over a dictionary.

    Args:
        native: the store.
        identity: of its namespace.
    """

    def __init__(self, native: ScriptedStore, identity: Namespace) -> None:
        self.clock = ManualClock()
        self.identity = identity
        self.store = open_store(native, self.clock)
        self.namespace = self.store.open_namespace(identity, is_new=False)

    def describe(self) -> None:
        """Store a block of its own, which describes the namespace when it is due."""
        self.store.store(self.namespace, [key_of(9)], [0])

    def look(self) -> dict[str, str | float] | None:
        """Return what is said of block 1, which is missing."""
        self.store.siblings.look_for(self.identity, [key_of(1)])
        miss = self.store.siblings.explain(key_of(1))
        return None if miss is None else dict(miss.detail)


def described(native: DictStore) -> dict[str, bytes]:
    """Return the descriptions that are there."""
    return {name: value for name, value in native.values.items() if name in DESCRIPTION_NAMES}


def identity_of(model: str) -> Namespace:
    return make_namespace(make_config(model), ROW_BYTES)


A, B = identity_of("model-a"), identity_of("model-b")


def hold(native: DictStore, identity: Namespace) -> None:
    native.values[f"{identity.name}/{key_of(1).hex()}"] = b"a block"


def test_a_block_of_another_namespace_is_found_with_the_field_that_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    native = DictStore()
    hold(native, B)
    Engine(native, B).describe()
    assert Engine(native, A).look() == {"namespace": B.name[:8], "model.name": "model-b (here model-a)"}
    (line,) = caplog.messages
    assert line == (
        f"tier mooncake: namespace {A.name[:8]} holds nothing here; {B.name[:8]} has an unknown number of blocks and "
        "differs in model.name model-b (here model-a)"
    )
    caplog.clear()
    engine = Engine(native, A)
    engine.describe()
    assert engine.look() is not None
    assert not caplog.messages


def test_each_namespace_is_described_once_and_again_when_it_was_evicted() -> None:
    native = DictStore()
    engines = [Engine(native, one) for one in (A, B, A)]
    for engine in engines:
        engine.describe()
    assert sorted(described(native)) == list(DESCRIPTION_NAMES[:2])
    native.values.clear()
    engines[0].describe()
    assert not described(native), "not looked for again at once"
    engines[0].clock.advance(DESCRIBE_S)
    engines[0].describe()
    assert list(described(native)) == [DESCRIPTION_NAMES[0]]
    assert {len(value) for value in described(native).values()} == {DESCRIPTION_BYTES}


def test_there_is_no_description_before_the_first_blocks() -> None:
    native = DictStore()
    engine = Engine(native, A)
    engine.store.check_reachable()
    assert not native.values
    engine.describe()
    assert len(described(native)) == 1


def test_a_description_that_is_gone_is_no_sign_of_lost_blocks() -> None:
    native = DictStore()
    engine = Engine(native, A)
    engine.describe()
    native.values.clear()
    engine.clock.advance(DESCRIBE_S)
    assert not engine.store.restore_description(engine.namespace)
    assert not described(native)


def test_a_full_store_makes_room_for_one_after_a_while() -> None:
    native = DictStore()
    for name, count in zip(DESCRIPTION_NAMES, range(100), strict=False):
        native.values[name] = f"{count:032x}\n{{}}".encode().ljust(DESCRIPTION_BYTES)
    before = dict(native.values)
    engine = Engine(native, A)
    engine.describe()
    assert described(native) == before
    native.leased = set(DESCRIPTION_NAMES)
    engine.clock.advance(DESCRIBE_S)
    engine.describe()
    assert described(native) == before
    native.leased.clear()
    engine.clock.advance(DESCRIBE_S)
    engine.describe()
    assert len([name for name in before if native.values[name] != before[name]]) == 1


def test_a_document_that_is_too_long_is_not_described() -> None:
    native = DictStore()
    long = dataclasses.replace(A, document=json.dumps({"layout_version": 1, "x": "a" * DESCRIPTION_BYTES}))
    Engine(native, long).describe()
    assert list(native.values) == [f"{long.name}/{key_of(9).hex()}"]


def padded(text: bytes) -> bytes:
    return text.ljust(DESCRIPTION_BYTES)


HOSTILE = {
    "no JSON": padded(b"ab" * 16 + b"\n{"),
    "no name": padded(b'{"layout_version": 1}'),
    "deep": padded(b"ab" * 16 + b'\n{"layout_version": 1, "a":' + b"[" * 7000 + b"]" * 7000 + b"}"),
    "short": b"x",
    "long": b"x" * 2**20,
    "no text": bytes(range(256)) * (DESCRIPTION_BYTES // 256),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_description_costs_its_own_words_only(value: bytes) -> None:
    native = DictStore()
    native.values[DESCRIPTION_NAMES[0]] = value
    engine = Engine(native, A)
    assert engine.look() is None
    hold(native, B)
    Engine(native, B).describe()
    engine.clock.advance(60.0)
    assert engine.look() is not None


@pytest.mark.parametrize("answer", [-1, Code.RPC_FAIL, Code.NO_AVAILABLE_HANDLE, 1])
def test_a_store_that_answers_nothing_of_use_costs_nothing(answer: int) -> None:
    engine = Engine(ScriptedStore(answer), A)
    assert engine.look() is None
    with suppress(TierError):
        engine.describe()


def test_after_a_reset_no_description_is_made() -> None:
    native = DictStore()
    store = Engine(native, A).store
    reset = make_namespace(make_config("model-a"), ROW_BYTES, epoch=bytes(15) + b"1")
    store.store(store.open_namespace(reset, is_new=True), [key_of(1)], [0])
    assert len(native.values) == 1
    store.store(store.open_namespace(A, is_new=False), [key_of(2)], [0])
    assert DESCRIPTION_NAMES[0] in native.values
