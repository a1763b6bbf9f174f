"""Tenants beyond their quotas lose their own oldest blocks, whatever engines do at once and wherever one ends."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiering.tenant_driver import NAMES, config_of_tenants, count_by_name, key_of_tenant

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import make_namespace
from kvtier.quantities import MAX_BYTES
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import make_config
from kvtier.tiering.kit.backend import Counters
from kvtier.tiering.kit.blobs import Blob, Blobs, BlobSettings, FolderNames, Got, Listed, Put, Size, Target
from kvtier.tiering.kit.blobs.evictor import Evictor
from kvtier.tiering.kit.blobs.quotas import BlobQuotas, TenantNames
from kvtier.tiering.kit.blobs.store import CAPACITY_COUNTS
from kvtier.tiering.kit.quota_counts import make_quota_counts

BLOCK_BYTES = 1024
HANG_GUARD_S = 60.0
IDENTITY = make_namespace(make_config(), BLOCK_BYTES)


class Server:
    """Blocks in memory, the time of each one's last use, and what fails next."""

    def __init__(self) -> None:
        self.used_s: dict[OffloadKey, float] = {}
        self.fails_after: int | None = None
        self.keeps_all = False

    def store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Keep blocks; return those that were not there."""
        new = [key for key in keys if key not in self.used_s]
        for key in keys:
            self.used_s[key] = len(self.used_s) + max(self.used_s.values(), default=0.0)
        return new

    def note_call(self) -> None:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise TierError("fake", "the server has ended")


class ServerBlobs(Blobs):
    """The names on such a server; nothing is read or written."""

    settings = BlobSettings()
    where = "fake"

    def __init__(self, server: Server) -> None:
        self.names = FolderNames()
        self._server = server

    def put_new(self, blobs: Sequence[Blob], end_s: float | None) -> list[Put]:
        raise NotImplementedError

    def get_into(self, targets: Sequence[Target], end_s: float | None) -> list[Got]:
        raise NotImplementedError

    def sizes(self, names: Sequence[str], *, is_lookup: bool) -> dict[str, Size]:
        raise NotImplementedError

    def read_each(self, names: Sequence[str], max_bytes: int, start: int = 0) -> dict[str, memoryview]:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def list_all(self, namespace: str | None = None) -> Iterator[Listed]:
        self._server.note_call()
        for key, used_s in list(self._server.used_s.items()):
            yield Listed(used_s, self.names.block(IDENTITY.name, key), BLOCK_BYTES)

    def remove(
        self, names: Sequence[str], unless_used_since: Mapping[str, float] | None = None
    ) -> Collection[str]:
        removed = []
        for name in () if self._server.keeps_all else names:
            parsed = self.names.parse(name)
            assert parsed is not None
            if self._server.used_s.pop(OffloadKey(parsed.block), None) is not None:
                removed.append(name)
            self._server.note_call()  # the block is gone and was not counted yet
        return removed


class Engine:
    """An engine's evictor, whose passes run when the test says so."""

    def __init__(self, server: Server, quotas: dict[str, int | None]) -> None:
        sizes = {name: None if num is None else num * BLOCK_BYTES for name, num in quotas.items()}
        counts = make_quota_counts(config_of_tenants("valkey", sizes), "valkey", ManualClock())
        assert counts is not None
        self.counts = counts
        self._server = server
        blobs, self.counters = ServerBlobs(server), Counters(*CAPACITY_COUNTS)
        own = BlobQuotas(counts, blobs.names, is_bound=True)
        self.evictor = Evictor("fake", blobs, MAX_BYTES, self.counters, quotas=own)
        self.evictor.on_opened(IDENTITY)

    def run_pass(self) -> None:
        self.evictor._run_pass()

    def stats(self) -> dict[str, float]:
        return self.evictor.stats() | self.counters.snapshot()

    def store(self, name: str, numbers: Sequence[int]) -> None:
        keys = [key_of_tenant(name, number) for number in numbers]
        self.counts.on_stored(self._server.store(keys), BLOCK_BYTES)

    def sums(self) -> dict[str, float]:
        stats = self.stats()
        return {name: stats[f"tenant_blocks.{name}"] for name in NAMES if stats[f"tenant_blocks.{name}"]}


def wait_until(is_done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_GUARD_S
    while not is_done():
        assert time.monotonic() < end_s


def held(server: Server) -> dict[str, int]:
    return count_by_name(set(server.used_s))


def test_a_tenant_beyond_its_quota_loses_its_own_oldest_blocks() -> None:
    server = Server()
    engine = Engine(server, {"alice": 4, "bob": None, "carol": 5})
    engine.store("bob", range(20))
    engine.store("carol", range(5))
    engine.store("alice", range(7))
    engine.store("alice", [0])  # used again
    engine.run_pass()
    assert held(server) == {"alice": 4, "bob": 20, "carol": 5} == engine.sums()
    assert {key_of_tenant("alice", number) for number in (0, 4, 5, 6)} <= server.used_s.keys()
    assert engine.stats()["evicted"] == 3


def test_blocks_of_other_engines_count() -> None:
    server = Server()
    quotas: dict[str, int | None] = {"alice": 4, "*": 2}
    engines = [Engine(server, quotas) for _ in range(3)]
    for index, engine in enumerate(engines):
        engine.store("alice", range(4 * index, 4 * index + 4))
        engine.store("bob", [index])
    engines[0].run_pass()
    assert held(server) == {"alice": 4, "bob": 2}
    assert all(key_of_tenant("alice", number) in server.used_s for number in range(8, 12))


def test_what_a_pass_could_not_finish_the_next_one_does() -> None:
    server = Server()
    quotas: dict[str, int | None] = {"alice": 4, "bob": None, "carol": None}
    engine = Engine(server, quotas)
    engine.store("alice", range(10))
    engine.store("bob", range(3))
    for num_calls in (0, 1, 3, 5):
        server.fails_after = num_calls
        with pytest.raises(TierError, match="has ended"):
            engine.run_pass()
        assert engine.counts.is_due
    server.fails_after = None
    restarted = Engine(server, quotas)
    for each in (engine, restarted):
        each.run_pass()
        assert held(server) == {"alice": 4, "bob": 3} == each.sums()
        assert not each.counts.is_due


@pytest.mark.parametrize("name", ["alice", "carol"])
def test_a_pass_that_frees_nothing_ends_as_a_failed_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("evictor", "quotas"):
        monkeypatch.setattr(f"kvtier.tiering.kit.blobs.{module}.MAX_VICTIMS", 2)  # a round takes no more
    server = Server()
    engine = Engine(server, {"alice": 4, "*": 4})
    engine.store(name, range(20))
    server.keeps_all = True
    with pytest.raises(TierError, match="none of 2 blobs could be removed"):
        engine.run_pass()
    assert engine.counts.is_due
    server.keeps_all = False
    engine.run_pass()
    assert held(server) == {name: 4}


def test_a_capacity_that_nothing_can_be_removed_for_ends_a_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiering.kit.blobs.evictor.MAX_VICTIMS", 2)
    server = Server()
    server.store([key_of_tenant("alice", number) for number in range(20)])
    server.keeps_all = True
    evictor = Evictor("fake", ServerBlobs(server), 8 * BLOCK_BYTES, Counters(*CAPACITY_COUNTS))
    with pytest.raises(TierError, match="none of 2 blobs could be removed"):
        evictor._run_pass()
    server.keeps_all = False
    evictor._run_pass()
    assert len(server.used_s) == 7


def test_a_place_that_cannot_be_listed_is_refused_with_a_remedy() -> None:
    server = Server()
    server.fails_after = 0
    with pytest.raises(TierError, match=r"quota_bytes cannot be kept \(.*has ended\): let the user list it"):
        Engine(server, {"alice": 4}).evictor.check()


def test_a_thread_of_its_own_keeps_the_quota_and_says_once_when_it_cannot(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiering.kit.blobs.evictor.RETRY_S", 0.001)
    server = Server()
    server.fails_after = 0
    engine = Engine(server, {"alice": 4, "bob": None, "carol": None})
    stats = engine.stats
    new = server.store([key_of_tenant("alice", number) for number in range(9)])
    engine.evictor.on_stored(new, BLOCK_BYTES)
    wait_until(lambda: stats()["failed_passes"] >= 3)
    server.fails_after = None
    wait_until(lambda: held(server) == {"alice": 4} and not engine.counts.is_due)
    engine.evictor.close()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("cannot be kept for now" in line for line in lines) == 1
    assert sum("can be listed and deleted again" in line for line in lines) <= 1


def test_names_of_encrypted_blocks_tell_their_tenants_in_the_engines_own_namespace() -> None:
    names = TenantNames()
    key = key_of_tenant("alice", 1)
    assert names.key_of(IDENTITY.name, key) is None
    names.on_opened(IDENTITY)
    assert names.key_of("f" * 32, key) == key
    assert names.key_of(IDENTITY.name, None) is None


QUOTAS = st.fixed_dictionaries({name: st.none() | st.integers(1, 12) for name in NAMES})
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([*NAMES, "pass", "crash", "evict"]),
        st.integers(0, 20),
        st.integers(1, 8),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(QUOTAS.filter(lambda quotas: any(quotas.values())), STEPS)
def test_sums_are_what_is_held_and_tenants_within_their_quotas_lose_nothing(
    quotas: dict[str, int | None], steps: list[tuple[int, str, int, int]]
) -> None:
    server = Server()
    engines = [Engine(server, quotas) for _ in range(3)]
    for index, what, first, num in steps:
        before = held(server)
        if what == "evict":  # by the server
            for key in list(server.used_s)[:num]:
                del server.used_s[key]
        elif what == "crash":
            server.fails_after = num
            try:
                engines[index].run_pass()
            except TierError:
                engines[index] = Engine(server, quotas)
            server.fails_after = None
            require_none_lost_within(quotas, before, held(server))
        elif what == "pass":
            engines[index].run_pass()
            after = held(server)
            require_none_lost_within(quotas, before, after)
            assert engines[index].sums() == after
            assert all(num <= (quotas[name] or num) for name, num in after.items())
        else:
            engines[index].store(what, range(first, first + num))


def require_none_lost_within(
    quotas: dict[str, int | None], before: dict[str, int], after: dict[str, int]
) -> None:
    """Compare what tenants keep after a pass with before: none has lost what lies within its quota."""
    for name, num in before.items():
        quota = quotas[name]
        assert after.get(name, 0) >= (num if quota is None else min(num, quota))
