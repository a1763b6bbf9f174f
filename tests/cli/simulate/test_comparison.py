"""Results are found by label, by size, and as JSON."""

import dataclasses
import importlib.metadata
import json

from tests.cli.simulate.compared import ENGINE, SIZES, compare, compare_host_sizes


def test_without_a_sweep_json_has_the_results_by_policy() -> None:
    comparison = compare()

    written = json.loads(json.dumps(comparison.results_to_json()))["results"]

    assert list(written) == comparison.policies == ["without", "lru", "arc"]
    assert written["lru"]["num_bound_tokens"] == comparison.found[1].num_bound_tokens
    assert len(written["lru"]["first_token_quantiles_s"]) == 30
    assert set(written["lru"]["history"]["held_blocks"]) == {"device", "host", "disk"}


def test_with_a_sweep_json_has_a_list_of_runs() -> None:
    written = json.loads(json.dumps(compare_host_sizes().results_to_json()))

    assert written["sweep"] == "host"
    assert [(run["policy"], run["size"], run["num_blocks"]) for run in written["runs"]] == [
        ("without", None, None),
        ("lru", "4MiB", 4),
        ("arc", "4MiB", 4),
        ("lru", "32MiB", 32),
        ("arc", "32MiB", 32),
    ]


def test_the_cases_of_a_size_include_those_that_no_sweep_touches() -> None:
    comparison = compare_host_sizes()

    labels = [case.label for case, _ in comparison.pairs(SIZES[1])]

    assert labels == ["without", "lru at 32MiB", "arc at 32MiB"]


def test_json_carries_version_command_trace_and_capacities() -> None:
    comparison = dataclasses.replace(compare(), command=("kvtier", "simulate", "my trace"))

    written = json.loads(json.dumps(comparison.inputs_to_json()))

    assert written["kvtier"] == importlib.metadata.version("kvtier")
    assert written["command"] == "kvtier simulate 'my trace'"
    assert written["trace"]["num_requests"] == 30
    assert written["capacities"] == {
        "block_bytes": 2**20,
        "device_blocks": 6,
        "host_blocks": 4,
        "tier_blocks": {"disk": 40},
    }
    assert written["engine"]["prefill_tokens_per_s"] == 50


def test_times_of_a_queue_are_hidden_only_when_the_rate_was_derived() -> None:
    calm = compare(["lru"])
    slow = compare(["lru"], engine=dataclasses.replace(ENGINE, prefill_tokens_per_s=0.5))

    assert (calm.saturated, calm.has_times) == ([], True)
    assert slow.has_times
    for comparison in (calm, slow):
        derived = dataclasses.replace(comparison, is_rate_derived=True)
        assert derived.has_times is not bool(comparison.saturated)
