"""Prometheus scrapes a real vLLM server: each query of the dashboard has data; kvtier's own page is there too."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.documents import FOLDER, read
from tests.deploy.prometheus_process import PrometheusProcess
from tests.deploy.queries import ASKED
from tests.e2e.vllm.prompts import WHOLE_TOKENS, make_prompt
from tests.e2e.vllm.server_process import ServerProcess
from tests.ports import free_port

ALERTS = FOLDER / "prometheus" / "alerts.yml"


@pytest.fixture(scope="module")
def own_port() -> int:
    """Return the port of the engine's own page."""
    return free_port()


@pytest.fixture(scope="module")
def server(llama: str, own_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a server with the settings of the compose file, smaller, and without its Valkey."""
    folder = tmp_path_factory.mktemp("server")
    flags = read("compose.yaml")["services"]["vllm"]["command"]
    (flag,) = [flag for flag in flags if flag.startswith("--kv-transfer-config=")]
    settings = json.loads(flag.partition("=")[2])["kv_connector_extra_config"]
    (tier,) = [tier for tier in settings["secondary_tiers"] if tier["type"] == "fs"]
    own = {
        **settings,
        "cpu_bytes_to_use": "16MiB",
        "metrics_port": own_port,
        "secondary_tiers": [{**tier, "root_dir": str(folder / "blocks"), "capacity_bytes": "1GiB"}],
    }
    with ServerProcess(llama, own, "tcp://127.0.0.1:*", folder / "server.log") as server:
        yield server


def use(server: ServerProcess) -> int:
    """Compute more prompts than host memory holds, and ask for the first again; return its cached tokens."""
    for seed in range(1000, 1006):
        server.ask(make_prompt(seed))
    server.forget_device()
    return server.ask(make_prompt(1000)).num_cached_tokens


def test_each_query_of_the_dashboard_has_data_and_no_alert_fires(
    server: ServerProcess, tmp_path: Path
) -> None:
    assert use(server) == WHOLE_TOKENS
    with PrometheusProcess(tmp_path, {"vllm": server.place}, [ALERTS]) as prometheus:
        assert prometheus.ask_until_known(["kvtier_requests"]) == []
        use(server)
        missing = prometheus.ask_until_known(ASKED)
        alerts = prometheus.alerts()

    assert missing == []
    assert alerts == []


def test_the_engines_own_page_shows_what_vllms_page_shows_under_kvtiers_names(
    server: ServerProcess, own_port: int
) -> None:
    server.ask(make_prompt(2000))
    with urllib.request.urlopen(f"http://127.0.0.1:{own_port}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        own = {sample.name: sample.value for family in families for sample in family.samples}

    on_vllms_page = server.metrics("vllm:kv_offload_store_bytes_total", "engine")["0"]
    assert own["kvtier_store_bytes_total"] >= on_vllms_page > 0
    assert own["kvtier_tier_stored_blocks_total"] > 0
    assert own["kvtier_host_capacity_blocks"] == server.metrics("kvtier_host_capacity_blocks", "engine")["0"]
