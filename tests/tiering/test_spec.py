"""The tiering spec builds both halves over one region, and leaves nothing behind when it cannot."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
    TransferJobId,
    TransferSpec,
)
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.instance_lock import make_lock_path
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY, make_region_path
from kvtier.errors import (
    ConfigError,
    KVTierError,
    MissingExtraError,
    NamedClassError,
    RegionOwnerError,
    TierError,
    UnknownNameError,
)
from kvtier.factory import OffloadingSpecFactory
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.base import TierSettings
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.factory import TIERS, check_tier_config
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec, describe_tier
from kvtier.worker.worker import OffloadingWorker

PAGE_BYTES = 6000
HANG_GUARD_S = 60.0


def make_config(rank: int | None, engine_id: str, world_size: int = 1, **extra: object) -> OffloadingConfig:
    """An engine with one group of one layer and an example tier."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer",), page_size_bytes=PAGE_BYTES)
    extra_config = {"cpu_bytes_to_use": 8 * 8192, "secondary_tiers": [{"type": "example"}]} | extra
    return OffloadingConfig(
        engine_id,
        ModelIdentity("model"),
        (group,),
        hash_block_size=16,
        rank=rank,
        world_size=world_size,
        extra_config=extra_config,
    )


def make_caches(num_blocks: int = 4) -> CanonicalKVCaches:
    """A device cache of one tensor with random bytes."""
    tensor = torch.randint(-128, 127, (num_blocks, PAGE_BYTES), dtype=torch.int8)
    refs = [[CanonicalKVCacheRef(0, PAGE_BYTES)]]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, PAGE_BYTES)], refs)


def leftovers(engine_id: str) -> list[Path]:
    """Names in shared memory that belong to the engine."""
    return [path for path in Path(SHARED_MEMORY_DIRECTORY).iterdir() if engine_id in path.name]


def test_rows_are_aligned_to_pages() -> None:
    spec = TieringOffloadingSpec(make_config(None, "aligned"))
    assert spec.row_stride == 8192
    assert spec.num_blocks == 8


def test_the_factory_takes_it_as_soon_as_there_is_a_tier() -> None:
    spec = OffloadingSpecFactory.create_spec(make_config(None, "implied"))
    assert isinstance(spec, TieringOffloadingSpec)


def test_without_a_list_of_tiers_it_is_refused() -> None:
    group = KVGroup(block_size_tokens=16, layer_names=("layer",), page_size_bytes=PAGE_BYTES)
    config = OffloadingConfig("e", ModelIdentity("m"), (group,), 16, extra_config={"cpu_bytes_to_use": 2**20})
    with pytest.raises(ConfigError, match="secondary_tiers"):
        TieringOffloadingSpec(config)
    with pytest.raises(ConfigError, match="must be a list"):
        make_config(None, "e", secondary_tiers={"type": "example"})


def test_both_halves_map_the_same_memory_and_move_bytes_through_it() -> None:
    scheduler = TieringOffloadingSpec(make_config(None, "two-halves"))
    worker = TieringOffloadingSpec(make_config(0, "two-halves"))
    caches = make_caches()
    manager = scheduler.get_manager()
    handlers = OffloadingWorker()
    for source, destination, handler in worker.get_handlers(caches):
        handlers.register_handler(source, destination, handler)
    assert scheduler.region_identity() == worker.region_identity() is not None
    scheduler.seal_region()
    assert not make_region_path("two-halves").exists()

    request = ReqContext("a")
    output = manager.prepare_store([key_of(1)], request)
    assert output is not None
    device = GPULoadStoreSpec([2], [1], [0])
    assert handlers.transfer_async(TransferJobId(0), TransferSpec(device, output.store_spec))
    handlers.wait({TransferJobId(0)})
    assert [result.success for result in handlers.get_finished()] == [True]
    manager.complete_store([key_of(1)], request)
    assert isinstance(manager, TieringOffloadingManager)
    row = np.asarray(manager.primary_tier.get_kv_memoryview())[0]
    assert np.array_equal(row[:PAGE_BYTES], caches.tensors[0].tensor[2].numpy())
    assert not row[PAGE_BYTES:].any()
    del row
    worker.shutdown()
    scheduler.shutdown()
    scheduler.shutdown()
    assert leftovers("two-halves") == []


@pytest.mark.parametrize(
    ("name", "kind"), [("exampl", UnknownNameError), ("kvtier.tiering.example:ExampleTier", NamedClassError)]
)
def test_a_tier_that_cannot_work_leaves_no_memory_behind(name: str, kind: type[KVTierError]) -> None:
    config = make_config(None, "bad-tier", secondary_tiers=[{"type": "example"}, {"type": name}])
    with pytest.raises(kind, match="example"):
        TieringOffloadingSpec(config).get_manager()
    assert leftovers("bad-tier") == []


def test_a_tier_of_one_s_own_is_named_by_its_class() -> None:
    entries = [{"type": f"{__name__}:OwnTier", "max_blocks": 3}]
    spec = TieringOffloadingSpec(make_config(None, "own-tier", secondary_tiers=entries))
    assert spec.get_manager().stats()["tier.0.own.blocks"] == 0
    spec.shutdown()


class OwnTier(ExampleSecondaryTier):
    """A tier that is registered nowhere."""

    @staticmethod
    def get_tier_type() -> str:
        return "own"


class UnableTier(ExampleSecondaryTier):
    """Cannot start: its server is not there, for example."""

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview, settings: TierSettings) -> None:
        raise ConnectionError("nobody listens")


@pytest.fixture
def unable_tier() -> str:
    """The name under which a tier that cannot start is known."""
    if "unable" not in TIERS:
        TIERS.register("unable", f"{__name__}:UnableTier")
    return "unable"


def test_a_tier_that_cannot_start_is_left_out_unless_it_is_required(unable_tier: str) -> None:
    entries = [{"type": unable_tier}, {"type": "example"}]
    spec = TieringOffloadingSpec(make_config(None, "optional", secondary_tiers=entries))
    assert [name for name in spec.get_manager().stats() if name.endswith(".blocks")] == [
        "tier.0.example.blocks"
    ]
    spec.shutdown()
    entries[0]["required"] = True  # type: ignore[assignment]  # JSON has values of any type
    with pytest.raises(TierError, match=r"cannot start: ConnectionError, test_spec\.py:"):
        TieringOffloadingSpec(make_config(None, "strict", secondary_tiers=entries)).get_manager()
    assert leftovers("strict") == []


class BareTier(ExampleSecondaryTier):
    """Its client library is not installed."""

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview, settings: TierSettings) -> None:
        raise MissingExtraError("redis", "valkey")


def test_a_tier_without_its_client_library_is_left_out_unless_it_is_required(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries: list[dict[str, object]] = [{"type": f"{__name__}:BareTier"}, {"type": "example"}]
    spec = TieringOffloadingSpec(make_config(None, "bare", secondary_tiers=entries))
    assert [name for name in spec.get_manager().stats() if name.endswith(".blocks")] == [
        "tier.0.example.blocks"
    ]
    spec.shutdown()
    assert "left out" in caplog.text
    assert "pip install '.[valkey]'" in caplog.text
    entries[0]["required"] = True
    with pytest.raises(MissingExtraError):
        TieringOffloadingSpec(make_config(None, "strict", secondary_tiers=entries)).get_manager()
    assert leftovers("strict") == []


AWAY: dict[str, dict[str, object]] = {
    "valkey": {"url": "redis://127.0.0.1:1"},
    "obj": {"url": "http://127.0.0.1:1/blocks", "allow_http": True},
    "mooncake": {"master": "127.0.0.1:1", "allow_any_interface": True},
}
"""Tiers whose server is not there."""


@pytest.mark.parametrize("name", AWAY)
def test_an_engine_starts_without_a_tier_s_server_and_says_why_unless_the_tier_is_required(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {"type": name, **AWAY[name]}
    try:
        check_tier_config(entry)
    except MissingExtraError as error:
        pytest.skip(str(error))
    spec = TieringOffloadingSpec(make_config(None, f"away-{name}", secondary_tiers=[entry]))
    manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    request = ReqContext("a")
    assert manager.lookup(key_of(1), request) is False
    lines = [record.getMessage() for record in caplog.records if f"tier '{name}'" in record.getMessage()]
    assert len(lines) == 1
    assert "tried again" in lines[0]
    spec.shutdown()
    required = TieringOffloadingSpec(
        make_config(None, f"required-{name}", secondary_tiers=[entry | {"required": True}])
    )
    with pytest.raises(TierError, match=r"127\.0\.0\.1"):
        required.get_manager()
    assert leftovers(f"required-{name}") == []


def test_a_region_of_a_dead_engine_is_removed_when_the_next_one_starts() -> None:
    dead = make_region_path("dead-engine", Path(SHARED_MEMORY_DIRECTORY))
    dead.write_bytes(b"\0" * 4096)
    spec = TieringOffloadingSpec(make_config(None, "next-engine"))
    spec.get_manager()
    assert not dead.exists()
    spec.shutdown()


def test_after_shutdown_nothing_of_the_region_stays_mapped() -> None:
    spec = TieringOffloadingSpec(make_config(None, "mapped"))
    manager = spec.get_manager()
    assert "mapped" in Path("/proc/self/maps").read_text()
    spec.shutdown()
    assert manager.stats()["primary.held_blocks"] == 0
    assert "kvtier_" + str(os.getuid()) + "_mapped" not in Path("/proc/self/maps").read_text()


def test_a_worker_without_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank"):
        list(TieringOffloadingSpec(make_config(None, "no-rank")).get_handlers(make_caches()))
    assert leftovers("no-rank") == []


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("num_blocks", [8, 16])
def test_a_second_engine_is_refused_while_the_first_lives_and_may_start_afterwards(
    num_blocks: int, is_sealed: bool
) -> None:
    first = TieringOffloadingSpec(make_config(None, "twice"))
    first.get_manager()
    if is_sealed:
        first.seal_region()
    second = TieringOffloadingSpec(make_config(None, "twice", cpu_bytes_to_use=num_blocks * 8192))
    with pytest.raises(ConfigError, match=r"instance_id='twice'.*its own instance_id"):
        second.get_manager()
    assert second.region_identity() is None
    first.shutdown()
    second.get_manager()
    second.shutdown()
    assert leftovers("twice") == []


def test_a_second_engine_whose_worker_came_first_is_refused_and_its_worker_harms_nobody() -> None:
    halves = [TieringOffloadingSpec(make_config(rank, "joined")) for rank in (0, 0, None, None)]
    stranger, worker, scheduler, second = halves
    caches = [make_caches(), make_caches()]
    for half, cache in zip((stranger, worker), caches, strict=True):
        list(half.get_handlers(cache))
    scheduler.get_manager()
    assert scheduler.region_identity() == worker.region_identity() == stranger.region_identity()
    with pytest.raises(ConfigError, match="joined"):
        second.get_manager()
    stranger.shutdown()
    assert make_region_path("joined").exists()
    scheduler.seal_region()
    for half in halves:
        half.shutdown()
    assert leftovers("joined") == []


@pytest.fixture
def unlockable_id() -> Iterator[str]:
    """An id whose lock cannot be made: there is a folder in its place."""
    path = make_lock_path("unlockable")
    path.mkdir()
    yield "unlockable"
    path.rmdir()


def test_an_engine_with_a_region_does_not_start_where_no_lock_can_be_made(unlockable_id: str) -> None:
    with pytest.raises(RegionOwnerError, match="another instance_id"):
        TieringOffloadingSpec(make_config(None, unlockable_id)).get_manager()
    assert not make_region_path(unlockable_id).exists()


ENGINE = """
import sys
from tests.tiering.test_spec import make_config
from kvtier.errors import KVTierError
from kvtier.tiering.spec import TieringOffloadingSpec, describe_tier

spec = TieringOffloadingSpec(make_config(None, sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    spec.get_manager()
    print("started", flush=True)
except KVTierError as error:
    print(error, flush=True)
sys.stdin.read()
spec.shutdown()
"""


@contextmanager
def engine_process(engine_id: str) -> Iterator["subprocess.Popen[str]"]:
    """Give a process that starts an engine's scheduler side when it gets a line, and ends it with its input."""
    command = [sys.executable, "-c", ENGINE, engine_id]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert read_line(process) == "ready"
            yield process
        finally:
            process.kill()


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def start(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_an_engine_in_another_process_keeps_its_id_until_it_is_killed() -> None:
    with engine_process("killed") as first:
        start(first)
        assert read_line(first) == "started"
        second = TieringOffloadingSpec(make_config(None, "killed"))
        with pytest.raises(ConfigError, match="instance_id='killed'"):
            second.get_manager()
        first.kill()
        first.wait(HANG_GUARD_S)
        # What it left is removed by whichever engine of this machine starts next, perhaps one of another test.
        assert len(leftovers("killed")) <= 2
        second.get_manager()
    second.shutdown()
    assert leftovers("killed") == []


@pytest.mark.slow
def test_of_engines_that_start_at_the_same_time_in_two_processes_one_is_refused() -> None:
    with engine_process("race") as first, engine_process("race") as second:
        for process in (first, second):
            start(process)
        answers = sorted(read_line(process) for process in (first, second))
        assert answers[1] == "started"
        assert "instance_id='race'" in answers[0]
        for process in (first, second):
            process.communicate(timeout=HANG_GUARD_S)
    assert leftovers("race") == []


def test_a_cache_that_was_taken_away_comes_back_with_what_was_stored() -> None:
    scheduler = TieringOffloadingSpec(make_config(None, "asleep"))
    worker = TieringOffloadingSpec(make_config(0, "asleep"))
    before, after = make_caches(), make_caches()
    scheduler.get_manager()
    device, rows, job = GPULoadStoreSpec([2], [1], [0]), CPULoadStoreSpec([5]), TransferJobId(0)
    store, _ = (entry.handler for entry in worker.get_handlers(before))
    assert store.transfer_async(job, TransferSpec(device, rows))
    worker.detach_kv_caches()
    _, load = (entry.handler for entry in worker.get_handlers(after))
    assert load.transfer_async(job, TransferSpec(rows, device))
    load.wait({job})
    assert torch.equal(after.tensors[0].tensor[2], before.tensors[0].tensor[2])
    assert scheduler.region_identity() == worker.region_identity()
    worker.shutdown()
    scheduler.shutdown()
    assert leftovers("asleep") == []


@pytest.mark.parametrize(("load_if", "is_timed"), [("always", False), ("faster", True)])
def test_loads_are_timed_only_where_a_hit_may_be_computed_instead(load_if: str, *, is_timed: bool) -> None:
    spec = TieringOffloadingSpec(make_config(None, f"timed-{load_if}", load_if=load_if))
    stats = spec.get_manager().stats()
    assert ("tier.0.example.load_bytes_per_s" in stats) is is_timed
    assert ("tier.0.example.load_latency_s" in stats) is is_timed
    spec.shutdown()


def test_settings_of_the_primary_reach_it() -> None:
    config = make_config(None, "settings", eviction_policy="arc", store_threshold=2, lookup_deadline_s=1.5)
    spec = TieringOffloadingSpec(config)
    manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    assert manager.primary_tier.counts is not None
    assert type(manager.primary_tier.table.policy).__name__ == "ARCCachePolicy"
    assert manager._waiting.lookup_deadline_s == 1.5
    spec.shutdown()


def test_a_start_names_host_memory_and_each_tier_with_its_place_size_and_blocks(tmp_path: Path) -> None:
    fs = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}
    spec = TieringOffloadingSpec(make_config(None, "described", secondary_tiers=[fs, {"type": "example"}]))
    spec.get_manager()
    lines = spec.describe_start()
    spec.shutdown()
    assert lines == [
        "host memory 64.0 KiB: 8 blocks of 16 tokens and 8.0 KiB, room for 128 tokens",
        f"tier 0 fs: {tmp_path}/kv, at most 4.0 MiB, 0 blocks found",
        "tier 1 example: no limit of its own, 0 blocks found",
    ]


@pytest.mark.parametrize(
    ("entry", "numbers", "is_indexed", "line"),
    [
        (
            {"type": "valkey", "url": "redis://user:hunter2@db:6379"},
            {"tier.2.valkey.lookups": 0.0},
            True,
            "tier 2 valkey: redis://***@db:6379, no limit of its own, its blocks are looked up there and not counted",
        ),
        (
            {"type": "slab", "path": "/kv/blocks", "capacity_bytes": 5 * 2**30},
            {"tier.2.slab.indexed_blocks": 1234.0, "tier.0.fs.indexed_blocks": 7.0},
            False,
            "tier 2 slab: /kv/blocks, at most 5.0 GiB, 1,234 blocks found so far",
        ),
    ],
)
def test_the_line_of_a_tier_has_no_password_and_says_when_it_is_not_counted(
    entry: dict[str, object], numbers: dict[str, float], is_indexed: bool, line: str
) -> None:
    assert describe_tier(2, entry, numbers, is_indexed=is_indexed) == line
