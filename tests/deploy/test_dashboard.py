"""The dashboard is what the script makes, and each of its queries returns data from a real engine."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from tests.deploy.prometheus_process import PrometheusProcess
from tests.deploy.queries import ASKED, QUERIES
from tests.small_engine import prompt_of, running_engine, serve_some

from kvtier.observe.metrics import FAMILIES
from scripts.dashboard import expression_of, make_dashboard, names_of

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "kvtier.json"

DASHBOARD = make_dashboard()

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_the_file_is_what_the_script_makes() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == DASHBOARD, "run python -m scripts.dashboard"


def test_each_panel_says_what_it_shows_and_in_which_unit() -> None:
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [target["refId"] for target in panel["targets"]] == list("ABC")[: len(panel["targets"])]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(titles) == len(set(titles))
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert numbers == list(range(1, len(numbers) + 1))


def test_no_two_panels_are_in_one_place() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_each_label_of_a_legend_is_one_that_the_query_keeps() -> None:
    for query in QUERIES:
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert re.search(rf"by \([^)]*\b{label}\b", query.text), query


def test_a_query_finds_a_family_under_both_of_its_names() -> None:
    (family,) = [family for family in FAMILIES if family.name == "kvtier_load_bytes"]
    assert names_of(family) == ["kvtier_load_bytes_total", "vllm:kv_offload_load_bytes_total"]

    assert expression_of("rate({{kvtier_load_bytes}}[1m])", 'a="b"') == (
        'rate({__name__=~"kvtier_load_bytes_total|vllm:kv_offload_load_bytes_total",a="b"}[1m])'
    )
    assert expression_of("{{kvtier_requests}}", 'a="b"') == 'kvtier_requests{a="b"}'
    with pytest.raises(KeyError):
        expression_of("{{kvtier_moon_phase}}")


@pytest.mark.servers
def test_each_query_returns_data_from_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'kvtier[observe]'")
    for folder in ("engine", "prometheus"):
        (tmp_path / folder).mkdir()
    with running_engine(tmp_path / "engine", metrics_port=0) as engine:
        serve_some(engine)
        assert engine.metrics is not None
        place = engine.metrics.url.removeprefix("http://").removesuffix("/metrics")
        with PrometheusProcess(tmp_path / "prometheus", {"kvtier": place}) as prometheus:
            assert prometheus.ask_until_known(["kvtier_requests"]) == []
            for seed in range(20, 23):
                engine.run(prompt_of(seed), 1)
            missing = prometheus.ask_until_known(ASKED)

    assert missing == []
