"""The connection joins late, pauses after silence, and closes before a slot is free that may still be written."""

import threading
from collections.abc import Iterator

import pytest
from tests.ports import free_port
from tests.tiering.mooncake.fakes import ScriptedStore, make_settings
from tests.tiering.mooncake.live import HANG_GUARD_S, LiveStore

from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.tiering.mooncake.client import PAUSE_S, MooncakeClient, ScatterLists
from kvtier.tiering.mooncake.errors import MASTER_AWAY, Code
from kvtier.tiering.mooncake.native import open_native
from kvtier.tiering.mooncake.settings import MooncakeSettings

pytestmark = pytest.mark.servers

MEMORY = memoryview(bytearray(4096))
NOWHERE = ScatterLists([], [])


class Rig:
    """A client over scripted stores, one for each time it joins.

    Args:
        master: where it knocks.
        stores: what it finds there.
    """

    def __init__(self, master: str, *stores: ScriptedStore) -> None:
        self.clock = ManualClock()
        self.settings = make_settings(master)
        self._stores = iter(stores)
        self.num_joined = 0
        self.client = MooncakeClient(self.settings, [MEMORY], self.clock, self._open)

    def _open(self, settings: MooncakeSettings) -> ScriptedStore:
        self.num_joined += 1
        return next(self._stores)


@pytest.fixture(scope="module")
def master() -> Iterator[LiveStore]:
    """A store without memory: somebody to knock at."""
    store = LiveStore(num_providers=0)
    yield store
    store.close()


def nobody() -> str:
    """Return an address where nobody listens."""
    return f"127.0.0.1:{free_port()}"


def test_nothing_is_joined_before_the_first_call_and_then_once() -> None:
    rig = Rig(nobody(), ScriptedStore(1))
    assert rig.num_joined == 0
    assert rig.client.exist(["a"]) == [1]
    assert rig.client.exist(["b"]) == [1]
    assert rig.num_joined == 1


def test_the_memory_is_registered_once_before_the_first_call() -> None:
    store = ScriptedStore()
    rig = Rig(nobody(), store)
    rig.client.exist(["a"])
    rig.client.exist(["a"])
    assert store.registered_bytes == [len(MEMORY)]


@pytest.mark.parametrize("code", sorted(MASTER_AWAY))
def test_a_master_that_does_not_answer_fails_the_call_by_name(code: Code) -> None:
    rig = Rig(nobody(), ScriptedStore(code))
    with pytest.raises(TierError, match=code.name):
        rig.client.exist(["a"])


def test_after_silence_nothing_is_asked_for_a_while() -> None:
    store = ScriptedStore(Code.RPC_FAIL)
    rig = Rig(nobody(), store)
    for _ in range(3):
        with pytest.raises(TierError, match="RPC_FAIL"):
            rig.client.exist(["a"])
    assert store.calls == ["exist"]


def test_after_the_pause_a_dead_master_is_knocked_at_and_not_asked() -> None:
    store = ScriptedStore(Code.RPC_FAIL)
    rig = Rig(nobody(), store)
    with pytest.raises(TierError):
        rig.client.exist(["a"])
    rig.clock.advance(PAUSE_S)
    with pytest.raises(TierError, match="is mooncake_master running there"):
        rig.client.exist(["a"])
    assert store.calls == ["exist"]


def test_after_the_pause_a_living_master_is_asked_again(master: LiveStore) -> None:
    store = ScriptedStore(Code.RPC_FAIL)
    rig = Rig(master.address, store)
    with pytest.raises(TierError):
        rig.client.exist(["a"])
    store.answer = 1
    rig.clock.advance(PAUSE_S)
    assert rig.client.exist(["a"]) == [1]
    assert rig.num_joined == 1


def test_a_failed_join_is_tried_again_after_the_pause_and_not_before(master: LiveStore) -> None:
    rig = Rig(nobody())
    client = MooncakeClient(rig.settings, [MEMORY], rig.clock, open_native)
    for _ in range(2):
        with pytest.raises(TierError, match="is mooncake_master running there"):
            client.exist(["a"])
    late = Rig(master.address)
    joined = MooncakeClient(late.settings, [MEMORY], late.clock, open_native)
    assert joined.exist(["a"]) == [0]
    joined.close()


def test_a_hung_master_is_found_out_before_the_library_is_asked() -> None:
    store = LiveStore(num_providers=0)
    store.master.freeze()
    try:
        with pytest.raises(TierError, match="does not answer"):
            open_native(make_settings(store.address))
    finally:
        store.close()


def test_a_transfer_that_may_go_on_is_ended_before_its_call_returns() -> None:
    rig = Rig(nobody())
    slow = ScriptedStore(Code.TRANSFER_FAIL, lambda: rig.clock.advance(60.0))
    rig._stores = iter([slow, ScriptedStore(1)])
    assert rig.client.get(["a"], NOWHERE) == [Code.TRANSFER_FAIL]
    assert slow.calls == ["get", "close"]
    assert rig.client.exist(["a"]) == [1]
    assert rig.num_joined == 2


def test_a_transfer_that_failed_at_once_costs_no_connection() -> None:
    store = ScriptedStore(Code.TRANSFER_FAIL)
    rig = Rig(nobody(), store)
    assert rig.client.get(["a"], NOWHERE) == [Code.TRANSFER_FAIL]
    assert store.calls == ["get"]


def test_a_connection_is_closed_only_when_no_other_call_uses_it() -> None:
    rig = Rig(nobody())
    is_in, may_leave = threading.Event(), threading.Event()

    def during() -> None:
        if threading.current_thread() is other:
            is_in.set()
            assert may_leave.wait(HANG_GUARD_S)
        else:
            assert is_in.wait(HANG_GUARD_S)
            rig.clock.advance(60.0)

    store = ScriptedStore(Code.TRANSFER_FAIL, during)
    rig._stores = iter([store])
    other = threading.Thread(target=lambda: rig.client.exist(["b"]))
    other.start()
    slow = threading.Thread(target=lambda: rig.client.get(["a"], NOWHERE))
    slow.start()
    slow.join(0.1)
    assert "close" not in store.calls
    may_leave.set()
    slow.join(HANG_GUARD_S)
    other.join(HANG_GUARD_S)
    assert store.calls.count("close") == 1


def test_a_closed_client_refuses_calls_and_has_left_the_store() -> None:
    store = ScriptedStore(1)
    rig = Rig(nobody(), store)
    rig.client.exist(["a"])
    rig.client.close()
    with pytest.raises(TierError, match="shut down"):
        rig.client.exist(["a"])
    assert store.calls == ["exist", "close"]
