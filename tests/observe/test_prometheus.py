"""The exporter shows an engine's numbers at the moment of the scrape, in Prometheus' own format."""

import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from tests.small_engine import ROW_BYTES, WAIT_S, prompt_of, running_engine, serve_some

pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'kvtier[observe]'")

from prometheus_client.parser import text_string_to_metric_families
from tests.observe.fakes import FakeEngine

from kvtier.config import Settings, parse_settings
from kvtier.engines.common.step import StepOutput
from kvtier.errors import ConfigError, MissingExtraError
from kvtier.histogram import Histogram
from kvtier.observe import serve_metrics
from kvtier.observe.metrics import FAMILIES
from kvtier.observe.prometheus import MAX_CLIENTS, EngineCollector, PageHandler, open_metrics
from kvtier.tiering.manager import TieringOffloadingManager

Labels = frozenset[tuple[str, str]]


def scrape(url: str) -> dict[tuple[str, Labels], float]:
    """Return the samples of a page, as Prometheus' own parser reads them."""
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:  # noqa: S310 - our own server
        page = response.read().decode()
    families = text_string_to_metric_families(page)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def labels(**values: str) -> Labels:
    """Return labels as ``scrape`` has them."""
    return frozenset(values.items())


def test_counters_and_gauges_are_read_at_the_scrape() -> None:
    engine = FakeEngine({"connector.load_jobs": 1.0, "tier.0.fs.breaker_open": 0.0})
    with serve_metrics(engine, 0) as server:
        first = scrape(server.url)
        engine.numbers |= {"connector.load_jobs": 3.0, "tier.0.fs.breaker_open": 1.0}
        second = scrape(server.url)

    jobs, breaker = ("kvtier_load_jobs_total", labels()), labels(tier="fs", tier_index="0")
    assert (first[jobs], second[jobs]) == (1.0, 3.0)
    assert second["kvtier_tier_breaker_open", breaker] == 1.0


def test_a_histogram_has_cumulative_buckets_a_count_and_a_sum() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 0.5, 5.0):
        histogram.observe(value)
    with serve_metrics(FakeEngine(snapshots={"connector.search_s": histogram.snapshot()}), 0) as server:
        samples = scrape(server.url)

    buckets = {le: samples["kvtier_search_seconds_bucket", labels(le=le)] for le in ("0.1", "1.0", "+Inf")}
    assert buckets == {"0.1": 1, "1.0": 3, "+Inf": 4}
    assert samples["kvtier_search_seconds_count", labels()] == 4
    assert samples["kvtier_search_seconds_sum", labels()] == pytest.approx(6.05)


def test_numbers_of_a_tier_of_ones_own_that_nothing_declares_are_left_out() -> None:
    numbers = {"tier.0.mine.moon_phase": 1.0, "tier.0.mine.errors": 2.0}
    with serve_metrics(FakeEngine(numbers), 0) as server:
        samples = scrape(server.url)

    assert samples == {("kvtier_tier_errors_total", labels(tier="mine", tier_index="0")): 2.0}


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(MissingExtraError, match=r"prometheus_client.*pip install '.\[observe\]'"):
        serve_metrics(FakeEngine(), 0)


def test_two_engines_of_a_process_have_pages_of_their_own() -> None:
    first, second = FakeEngine({"connector.requests": 1.0}), FakeEngine({"connector.requests": 2.0})
    with serve_metrics(first, 0) as one, serve_metrics(second, 0) as other:
        values = [scrape(server.url)["kvtier_requests", labels()] for server in (one, other)]

    assert values == [1.0, 2.0]


def test_only_this_machine_reads_the_page_unless_told_otherwise() -> None:
    with serve_metrics(FakeEngine(), 0) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        with pytest.raises(OSError, match=r".*"), socket.create_connection((own_address(), server.port), 1.0):
            pass


def own_address() -> str:
    """Return another address of this machine: of loopback too, and not the one that is served."""
    return "127.0.0.2"


def test_a_port_that_is_taken_is_named_with_the_remedy() -> None:
    with serve_metrics(FakeEngine(), 0) as first:
        with pytest.raises(ConfigError, match=rf"metrics_port={first.port}: .*in use.*free port"):
            serve_metrics(FakeEngine(), first.port)
        assert scrape(first.url) == {}


def test_a_closed_server_gives_its_port_back_and_closing_twice_is_fine() -> None:
    server = serve_metrics(FakeEngine(), 0)
    server.close()
    server.close()

    with serve_metrics(FakeEngine({"connector.requests": 1.0}), server.port) as again:
        assert scrape(again.url)


@pytest.mark.slow
def test_clients_that_send_half_a_request_take_no_more_than_their_share_and_keep_nobody_out() -> None:
    num_threads = threading.active_count()
    with ExitStack() as held, serve_metrics(FakeEngine({"connector.requests": 1.0}), 0) as server:
        clients = []
        for _ in range(4 * MAX_CLIENTS):
            client = held.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT_S))
            client.sendall(b"GET /metrics HT")
            clients.append(client)

        assert clients[0].recv(1) == b""
        assert scrape(server.url)
        end_s = time.monotonic() + WAIT_S
        while threading.active_count() > num_threads + 1 + MAX_CLIENTS:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def test_a_silent_client_is_dropped_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PageHandler, "timeout", 0.05)
    with (
        serve_metrics(FakeEngine(), 0) as server,
        socket.create_connection(("127.0.0.1", server.port), WAIT_S) as client,
    ):
        client.sendall(b"GET /metrics HT")
        assert client.recv(1) == b""
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("value", [-1, 65_536, True, "9400", 1.5])
def test_a_setting_that_is_no_port_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="metrics_port"):
        parse_settings({"metrics_port": value})


def test_the_settings_say_whether_and_where() -> None:
    assert open_metrics(FakeEngine(), Settings()) is None
    server = open_metrics(FakeEngine(), parse_settings({"metrics_port": 0, "metrics_host": "127.0.0.2"}))
    assert server is not None
    with server:
        assert server.url.startswith("http://127.0.0.2:")
        assert scrape(server.url) == {}


def test_an_engine_serves_its_numbers_and_those_of_its_tiers(tmp_path: Path) -> None:
    with running_engine(tmp_path, metrics_port=0) as engine:
        serve_some(engine)
        assert engine.metrics is not None
        samples = scrape(engine.metrics.url)
        stats = engine.stats()

    assert samples["kvtier_host_capacity_blocks", labels()] == 8
    assert samples["kvtier_store_bytes_total", labels()] == stats["connector.store_bytes"] > 0
    small, large = labels(tier="fs", tier_index="0"), labels(tier="fs", tier_index="1")
    for tier in (small, large):
        assert samples["kvtier_tier_stored_blocks_total", tier] == 24
    assert samples["kvtier_tier_promotion_seconds_count", small] >= 1
    assert samples["kvtier_tier_promotion_seconds_count", large] == 0
    assert len({name for name, _ in samples}) > 100


def test_an_idle_engine_shows_what_its_tiers_have_written_after_the_last_step(tmp_path: Path) -> None:
    with running_engine(tmp_path, metrics_port=0, cpu_bytes_to_use=64 * ROW_BYTES) as engine:
        engine.run(prompt_of(0), 1)
        driver = engine._halves
        assert driver is not None
        assert engine.metrics is not None
        # Steps until the blocks are in host memory, and in no tier for all that the scheduler knows.
        while engine.stats()["connector.open_jobs"]:
            engine._server._step(StepOutput())
        # Only the tiers' threads work now: nothing steps or polls.
        tiers = [tier.tier for tier in cast("TieringOffloadingManager", driver.manager)._tiers]
        assert all(tier.drain(WAIT_S) for tier in tiers)
        samples = scrape(engine.metrics.url)

    disk = labels(tier="fs", tier_index="1")
    assert samples["kvtier_tier_stored_blocks_total", disk] == 4
    assert samples["kvtier_tier_open_jobs", disk] == 0
    # What only a step can see is shown as it is: the scheduler has not heard of the end.
    assert samples["kvtier_tier_cascade_jobs", disk] == 1


def test_a_shut_down_engine_serves_no_longer(tmp_path: Path) -> None:
    with running_engine(tmp_path, metrics_port=0) as engine:
        assert engine.metrics is not None
        url = engine.metrics.url

    with pytest.raises(urllib.error.URLError):
        scrape(url)


def test_an_engine_whose_port_is_taken_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with (
        serve_metrics(FakeEngine(), 0) as first,
        pytest.raises(ConfigError, match="metrics_port"),
        running_engine(tmp_path, metrics_port=first.port),
    ):
        raise AssertionError("it has started")
    # The directories and the region can be had again.
    with running_engine(tmp_path, record_trace=str(tmp_path / "another")) as engine:
        engine.run(prompt_of(0), 1)


def test_the_families_that_are_described_are_those_that_are_declared() -> None:
    described = list(EngineCollector(FakeEngine()).describe())

    assert [metric.name for metric in described] == [family.name for family in FAMILIES]
    assert [metric.documentation for metric in described] == [family.help for family in FAMILIES]
    assert [metric.type for metric in described] == [family.kind.value for family in FAMILIES]


def test_scrapes_at_any_moment_find_counters_that_only_grow(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        collector = EngineCollector(engine)
        is_over = threading.Event()
        seen: list[dict[tuple[str, Labels], float]] = []
        errors: list[Exception] = []

        def scrape_on() -> None:
            try:
                while not is_over.is_set():
                    seen.append(
                        {
                            (sample.name, frozenset(sample.labels.items())): sample.value
                            for metric in collector.collect()
                            if metric.type == "counter"
                            for sample in metric.samples
                        }
                    )
            except Exception as error:  # noqa: BLE001 - it is the test's result
                errors.append(error)

        scraper = threading.Thread(target=scrape_on)
        scraper.start()
        try:
            for seed in range(8):
                engine.run(prompt_of(seed % 5), 2)
                engine.drop_device_cache()
        finally:
            is_over.set()
            scraper.join(WAIT_S)

    assert errors == []
    assert len(seen) > 10
    for earlier, later in pairwise(seen):
        assert all(later[key] >= value for key, value in earlier.items() if key in later)
    assert seen[-1]["kvtier_store_jobs_total", labels()] > 0
