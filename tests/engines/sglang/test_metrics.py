"""What an operator sees: SGLang's own metrics of the storage, and kvtier's."""

import ast
import sys
import types
from dataclasses import dataclass, field

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from prometheus_client.core import CollectorRegistry
from tests.engines.sglang.conftest import MakeStorage, key_of
from tests.engines.sglang.pools import HeadsPool, source_of

from kvtier.observe.prometheus import EngineCollector

KEYS = [key_of(number) for number in range(4)]
COLLECTOR = "sglang.srt.observability.metrics_collector"


@pytest.fixture
def storage_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put SGLang's StorageMetrics, out of the wheel's source, where its module would be, which imports an engine."""
    tree = ast.parse(source_of(COLLECTOR))
    (found,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "StorageMetrics"
    ]
    module = types.ModuleType(COLLECTOR)
    vars(module).update(dataclass=dataclass, field=field, List=list)
    exec(compile(ast.Module([found], []), COLLECTOR, "exec"), vars(module))  # noqa: S102 - of the wheel
    monkeypatch.setitem(sys.modules, "sglang.srt.observability", types.ModuleType("sglang.srt.observability"))
    monkeypatch.setitem(sys.modules, COLLECTOR, module)


@pytest.mark.usefixtures("storage_metrics")
def test_sglangs_metrics_have_each_call_once(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage(pool, enable_storage_metrics=True)
    storage.batch_set_v1(KEYS[:3], pool.slots(0, 1, 2))
    storage.batch_get_v1(KEYS[:4], pool.slots(0, 1, 2, 3))
    found = storage.get_stats()
    assert type(found).__name__ == "StorageMetrics"
    assert (found.backup_pgs, found.prefetch_pgs) == ([3], [3])  # type: ignore[attr-defined]
    assert all(rate > 0 for rate in (*found.backup_bandwidth, *found.prefetch_bandwidth))  # type: ignore[attr-defined]
    assert storage.get_stats().backup_pgs == []  # type: ignore[attr-defined]


def test_nothing_is_kept_where_sglang_collects_no_metrics(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    storage.batch_set_v1(KEYS[:3], pool.slots(0, 1, 2))
    assert storage.get_stats() is None


def test_a_release_without_these_metrics_is_served_without(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, COLLECTOR, None)
    assert make_storage(HeadsPool(), enable_storage_metrics=True).get_stats() is None


def test_kvtiers_own_metrics_have_a_tier_for_each_pool(make_storage: MakeStorage) -> None:
    pool = HeadsPool("layer_first")
    storage = make_storage(pool)
    storage.register_mem_host_pool_v2(HeadsPool("layer_first"), "swa")
    storage.batch_set_v1(KEYS[:3], pool.slots(0, 1, 2))
    storage.batch_get_v1(KEYS[:2], pool.slots(0, 1))
    registry = CollectorRegistry()
    registry.register(EngineCollector(storage))

    def read(name: str, index: str) -> float | None:
        value: float | None = registry.get_sample_value(name, {"tier_index": index, "tier": "fs"})
        return value

    assert read("kvtier_tier_stored_blocks_total", "0") == 3
    assert read("kvtier_tier_loaded_blocks_total", "0") == 2
    assert read("kvtier_tier_stored_blocks_total", "1") == 0


def test_a_page_of_metrics_is_served_where_a_port_is_given(make_storage: MakeStorage) -> None:
    storage = make_storage(HeadsPool(), extra_config={"metrics_port": 0})
    assert storage._metrics is not None
    storage.close()
