"""``top`` and ``stats`` show what tenants keep; ``purge --instance --tenant`` takes it from one."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.live.test_steer import stepping
from tests.observe.controlled import Engine

from kvtier.base import ReqContext, make_offload_key
from kvtier.cli.live.tenants import TenantState, draw_tenants, list_tenants
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.tenants import parse_tenants, tenant_number

Run = Callable[..., tuple[int, str, str]]

TENANTS = {"alice": {"quota_bytes": "2KiB"}, "bob.b": {}}

NUMBERS = {
    "primary.tenant_bytes.alice": 3072.0,
    "primary.tenant_bytes.bob.b": 1024.0,
    "tier.0.fs.tenant_bytes.bob.b": 4096.0,
    "tier.0.fs.stored_bytes": 1.0,
    "tier.1.obj.stored_bytes": 1.0,
}


@pytest.fixture
def engine(runtime: Path) -> Iterator[Engine]:
    manager = CPUOffloadingManager(16, tenants=parse_tenants(TENANTS, "", {"host"}), block_bytes=1024)
    for name, num_blocks in (("alice", 3), ("bob.b", 1)):
        keys = [make_offload_key(bytes([idx] * 32), 0, tenant_number(name)) for idx in range(num_blocks)]
        stored = ReqContext(name)
        assert manager.prepare_store(keys, stored) is not None
        manager.complete_store(keys, stored)
    running = Engine(runtime, "serving", manager, tenants=TENANTS)
    yield running
    running.close()


def test_each_place_that_counts_has_its_bytes_and_quotas() -> None:
    described = {"tenants": {"alice": {"host": 2048}, "bob.b": {}}}

    alice, bob = list_tenants(NUMBERS, described)

    assert alice == TenantState("alice", {"host": 3072}, {"host": 2048})
    assert bob == TenantState("bob.b", {"host": 1024, "fs": 4096}, {})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(draw_tenants([alice, bob]))
    shown = capture.get()
    assert "3.0 KiB of 2.0 KiB" in shown
    assert "4.0 KiB" in shown
    assert list_tenants(NUMBERS, {}) == []


def test_top_and_stats_show_tenants_with_their_quotas(engine: Engine, run: Run) -> None:
    expected = [
        {"name": "alice", "held_bytes": {"host": 3072}, "quota_bytes": {"host": 2048}},
        {"name": "bob.b", "held_bytes": {"host": 1024}, "quota_bytes": {}},
    ]
    assert json.loads(run("stats", "--json")[1])["tenants"] == expected
    assert json.loads(run("top", "--once", "--json", "--interval", "0.1")[1])["tenants"] == expected
    assert "3.0 KiB of 2.0 KiB" in run("top", "--once", "--interval", "0.1")[1]


def test_an_engine_without_tenants_shows_none(runtime: Path, run: Run) -> None:
    engine = Engine(runtime, "serving")
    try:
        assert "tenants" not in json.loads(run("stats", "--json")[1])
        assert "tenant" not in run("top", "--once", "--interval", "0.1")[1]
        status, _, err = run("purge", "--instance", "serving", "--tenant", "alice")
        assert status == 2
        assert "this engine has no tenants" in err
    finally:
        engine.close()


def test_one_tenants_blocks_are_purged(engine: Engine, run: Run) -> None:
    with stepping(engine):
        status, out, _ = run("purge", "--instance", "serving", "--tenant", "alice")
    assert (status, out) == (0, "serving: 3 blocks of host are purged\n")
    stats = engine.manager.stats()
    assert stats["primary.tenant_blocks.alice"] == 0.0
    assert stats["primary.tenant_blocks.bob.b"] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alise", "did you mean 'alice'? known are alice, bob.b"),
        ("*", "must be the name of a tenant of requests"),
    ],
)
def test_an_unknown_tenant_is_refused_with_the_known_ones(
    engine: Engine, run: Run, name: str, message: str
) -> None:
    status, _, err = run("purge", "--instance", "serving", "--tenant", name, "--tier", "host")

    assert status == 2
    assert message in " ".join(err.split())
    assert engine.manager.stats()["primary.held_blocks"] == 4.0
