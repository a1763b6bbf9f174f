"""The page says what was asked and warns of what would mislead."""

import dataclasses
import importlib.metadata

from tests.cli.simulate.compared import HOST, compare, compare_host_sizes

from kvtier.cli.simulate.report.page import list_facts, list_limits, list_warnings
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import TierSettings


def test_the_facts_name_the_command_the_trace_and_each_place() -> None:
    facts = dict(
        list_facts(dataclasses.replace(compare_host_sizes(), command=("kvtier", "simulate", "my trace")))
    )

    assert facts["command"] == "kvtier simulate 'my trace'"
    assert facts["kvtier"] == importlib.metadata.version("kvtier")
    assert facts["trace"] == "trace.jsonl"
    assert facts["device"] == "6 blocks, 6MiB"
    assert facts["tier disk"].startswith("40 blocks, 40MiB, reads 1 GB/s, writes 1 GB/s, 0 ms, 1 at a time")
    assert facts["swept"] == "host: 4MiB, 32MiB instead of the above"


def test_the_facts_name_what_a_tier_wants() -> None:
    settings = TierSettings(admission=TierAdmission(min_reuse_probability=0.3, horizon_s=1024.0))
    disk = dataclasses.replace(HOST.tiers[0], settings=settings)

    wanted = dict(list_facts(compare(host=dataclasses.replace(HOST, tiers=(disk,)))))["tier disk"]

    assert wanted.endswith("admission 0.3 in 1024 s")
    assert "admission" not in dict(list_facts(compare()))["tier disk"]


def test_a_calm_comparison_warns_of_nothing() -> None:
    assert list(list_warnings(compare())) == []


def test_what_was_left_out_or_overloaded_is_warned_of() -> None:
    comparison = compare(["lru"])
    without, lru = comparison.found
    found = (
        dataclasses.replace(without, num_rejected=3),
        dataclasses.replace(lru, num_rejected=3, counters={"tier.0.disk.breaker_openings": 2.0}),
    )

    assert list(list_warnings(dataclasses.replace(comparison, found=found))) == [
        "3 requests need more device blocks than there are and were skipped (all).",
        "lru: disk was overloaded 2 times and skipped for some seconds each.",
    ]


def test_the_limits_say_what_the_bound_is() -> None:
    assert any("Belady's bound" in limit for limit in list_limits())
