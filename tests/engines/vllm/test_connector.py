"""KVTierConnector as vLLM finds, builds and asks it: both roles from a real engine's configuration."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.configs import NUM_BLOCKS, cache_config, full, group, window, with_kvtier
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.request import Request, RequestStatus

from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.engines.vllm import KVTierConnector
from kvtier.engines.vllm.compat import HAS_FAILED_RECVING, release
from kvtier.errors import ConfigError, KVCacheLayoutError
from kvtier.operating import __version__

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


@pytest.fixture
def config(vllm_config: VllmConfig) -> VllmConfig:
    return with_kvtier(vllm_config)


@pytest.fixture
def scheduler(config: VllmConfig) -> Iterator[KVTierConnector]:
    """Return the scheduler's connector of an engine with one group of two layers."""
    connector = KVTierConnector(config, SCHEDULER, cache_config(group(full(), "a", "b")))
    yield connector
    connector.shutdown()


def test_vllm_finds_the_class_by_its_module(config: VllmConfig) -> None:
    found = KVConnectorFactory.get_connector_class(config.kv_transfer_config)

    assert found is KVTierConnector
    assert issubclass(found, KVConnectorBase_V1)
    assert supports_hma(found)


def test_vllm_builds_it_through_its_factory(config: VllmConfig) -> None:
    connector = KVConnectorFactory.create_connector(config, SCHEDULER, cache_config(group(full(), "a")))

    assert isinstance(connector, KVTierConnector)
    assert connector.role is SCHEDULER
    connector.shutdown()


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM reserves cores on CPU hosts")
@pytest.mark.parametrize(
    ("environment", "is_warned"),
    [
        ({}, True),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}, False),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, False),
    ],
)
def test_a_core_that_vllm_takes_from_its_workers_for_a_connector_is_named_once(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environment: dict[str, str],
    is_warned: bool,
) -> None:
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with caplog.at_level(logging.INFO, logger="kvtier"):
        KVTierConnector(config, SCHEDULER, cache_config(group(full(), "a"))).shutdown()

    lines = [record.getMessage() for record in caplog.records if "RESERVED_CPU" in record.getMessage()]
    assert len(lines) == is_warned
    assert all("set VLLM_CPU_NUM_OF_RESERVED_CPU=1" in line for line in lines)


def test_the_first_lines_say_that_it_works_with_what_and_how_to_watch_it(
    vllm_config: VllmConfig, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}
    config = with_kvtier(vllm_config, instance_id="first-lines", secondary_tiers=[tier])
    with caplog.at_level(logging.INFO, logger="kvtier"):
        KVTierConnector(config, SCHEDULER, cache_config(group(full(), "a", "b"))).shutdown()

    lines = [record.getMessage() for record in caplog.records if record.name.endswith("vllm.connector")]
    assert lines[:4] == [
        f"kvtier {__version__} keeps the KV cache of {config.model_config.model} (full x2) for vLLM {release()}",
        "kvtier: host memory 1.0 MiB: 256 blocks of 16 tokens and 4.0 KiB, room for 4,096 tokens",
        f"kvtier: tier 0 fs: {tmp_path}/kv, at most 4.0 MiB, 0 blocks found",
        "kvtier: instance first-lines, watch it with: kvtier top first-lines",
    ]
    assert [line for line in lines if not line.startswith("kvtier")] == []


def test_without_a_control_socket_the_last_line_says_so(
    vllm_config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_kvtier(vllm_config, instance_id="unwatched", control_socket=False, metrics_port=0)
    with caplog.at_level(logging.INFO, logger="kvtier"):
        KVTierConnector(config, SCHEDULER, cache_config(group(full(), "a"))).shutdown()

    assert (
        "kvtier: instance unwatched, it has no control socket, so kvtier top cannot watch it"
        in caplog.messages
    )


def test_failed_loads_are_computed_instead_of_ending_the_request(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"

    with caplog.at_level(logging.INFO, logger="kvtier"):
        connector = KVTierConnector(config, SCHEDULER, cache_config(group(full(), "a")))
    connector.shutdown()

    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert "sets kv_load_failure_policy to 'recompute'" in caplog.text


def test_a_policy_that_is_right_already_is_not_talked_about(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config.kv_transfer_config.kv_load_failure_policy = "recompute"

    with caplog.at_level(logging.INFO, logger="kvtier"):
        KVTierConnector(config, SCHEDULER, cache_config(group(full(), "a"))).shutdown()

    assert "kv_load_failure_policy" not in caplog.text


def test_a_refused_setting_leaves_nothing_behind(vllm_config: VllmConfig) -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        KVTierConnector(
            with_kvtier(vllm_config, cpu_bytes_to_use="16"), SCHEDULER, cache_config(group(full(), "a"))
        )


def test_a_layout_that_cannot_be_placed_is_refused_before_the_first_request(config: VllmConfig) -> None:
    worker = KVTierConnector(config, WORKER, cache_config(group(full(), "a")))

    with pytest.raises(KVCacheLayoutError, match="layer 'a'"):
        worker.register_kv_caches({"a": torch.zeros(2, NUM_BLOCKS, 2, 16, 8)})
    worker.shutdown()


@pytest.mark.parametrize("metadata_class", [OffloadingConnectorMetadata, OffloadingWorkerMetadata])
def test_metadata_is_never_taken_for_nothing(metadata_class: type) -> None:
    """VLLM drops metadata that is false, and with it what a worker has to do or to say."""
    assert not hasattr(metadata_class, "__len__")
    assert not hasattr(metadata_class, "__bool__")


def test_empty_metadata_is_true() -> None:
    assert OffloadingConnectorMetadata({}, {})
    assert OffloadingWorkerMetadata()


def test_nobody_waits_for_what_is_stored(scheduler: KVTierConnector) -> None:
    assert scheduler.requires_kv_delivery is False
    assert scheduler.has_pending_push_work() is False


def test_no_layout_is_asked_for_and_graphs_stay_whole(config: VllmConfig) -> None:
    assert KVTierConnector.get_required_kvcache_layout(config) is None
    assert KVTierConnector.requires_piecewise_for_cudagraph({}) is False


def test_the_schedulers_counters_are_reported_at_once_and_then_now_and_then(
    scheduler: KVTierConnector,
) -> None:
    first, second = scheduler.get_kv_connector_stats(), scheduler.get_kv_connector_stats()

    assert first is not None
    assert first.counters["connector.load_jobs"] == 0
    assert second is None


def test_shutdown_twice_is_shutdown_once(scheduler: KVTierConnector) -> None:
    scheduler.shutdown()
    scheduler.shutdown()


@pytest.mark.skipif(not HAS_FAILED_RECVING, reason="this vLLM cannot be told which request's load failed")
def test_what_is_offloaded_is_said_at_start(config: VllmConfig, caplog: pytest.LogCaptureFixture) -> None:
    kv_cache_config = cache_config(group(full(), "a", "b"), group(window(), "c"))

    with caplog.at_level(logging.INFO, logger="kvtier"):
        KVTierConnector(config, SCHEDULER, kv_cache_config).shutdown()

    assert "full x2, window x1" in caplog.text


def test_kvtier_writes_to_vllms_log_where_the_process_has_none(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)

    KVTierConnector(config, SCHEDULER, cache_config(group(full(), "a"))).shutdown()

    assert ours.handlers == theirs.handlers
    assert ours.level == theirs.level


@pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "register_finished_partial_tail"), reason="this vLLM has no such hook"
)
def test_a_state_within_a_block_is_left_to_vllm_when_its_request_ends(scheduler: KVTierConnector) -> None:
    request = cast("Request", SimpleNamespace(request_id="r", status=RequestStatus.FINISHED_ABORTED))

    # As vLLM's scheduler calls both: group 1, device block 7, 20 of the 32 tokens that the block has room for.
    is_kept = scheduler.register_finished_partial_tail(request, ([3, 4], [0, 7]), [(1, 7, 20)])

    assert is_kept is False, "the blocks would be kept until a worker reports the request"
    assert scheduler.request_finished_all_groups(request, ([3, 4], [0, 7])) == (False, None)
