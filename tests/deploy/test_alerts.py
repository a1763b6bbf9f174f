"""The alerts are ones that Prometheus accepts, about declared families, and each is shown to fire and not to fire."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.prometheus_process import PrometheusProcess, run_promtool
from tests.observe.fakes import FakeEngine

from kvtier.observe.metrics import FAMILIES
from kvtier.observe.prometheus import serve_metrics

pytestmark = pytest.mark.servers

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"

ALERTS = FOLDER / "alerts.yml"

CASES = Path(__file__).with_name("alerts_test.yml")

RULES: list[dict[str, Any]] = [  # Any: YAML
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]

NAMES = {name for family in FAMILIES for name in (family.sample_name, family.vllm_sample_name)}


def test_promtool_accepts_the_alerts_and_the_configuration() -> None:
    assert f"{len(RULES)} rules found" in run_promtool("check", "rules", str(ALERTS))
    assert "SUCCESS" in run_promtool("check", "config", str(FOLDER / "prometheus.yml"))


def test_each_case_of_the_alerts_holds() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", str(CASES))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(rule: dict[str, Any]) -> None:
    cases = [
        case
        for test in yaml.safe_load(CASES.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == rule["alert"]
    ]
    assert {bool(case.get("exp_alerts")) for case in cases} == {True, False}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_asks_for_declared_families_and_says_what_to_do(rule: dict[str, Any]) -> None:
    asked = set(re.findall(r"(?:kvtier_|vllm:)\w+", rule["expr"]))
    assert asked
    assert asked <= NAMES
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} == set(rule["annotations"])
    assert "$labels.instance" in rule["annotations"]["summary"]


def test_an_alert_fires_in_a_prometheus_that_scrapes_an_exporter(tmp_path: Path) -> None:
    broken = FakeEngine({"tier.0.fs.out_of_service": 1.0, "tier.1.obj.out_of_service": 0.0})
    with serve_metrics(broken, 0) as server:
        place = server.url.removeprefix("http://").removesuffix("/metrics")
        with PrometheusProcess(tmp_path, {"kvtier": place}, [ALERTS]) as prometheus:
            assert prometheus.ask_until_known(['ALERTS{alertname="KVTierOutOfService"}']) == []
            (alert,) = prometheus.alerts()

    assert alert["state"] == "firing"
    assert alert["labels"]["tier"] == "fs"
    assert alert["annotations"]["summary"].startswith(f"{place}: tier fs is out of service")
