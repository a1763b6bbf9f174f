"""Results are found by label, by size, and as JSON."""

import json

from tests.cli.simulate.compared import SIZES, compare, compare_host_sizes


def test_without_a_sweep_json_has_the_results_by_policy() -> None:
    comparison = compare()

    written = json.loads(json.dumps(comparison.to_json()))

    assert list(written) == comparison.policies == ["without", "lru", "arc"]
    assert written["lru"]["num_bound_tokens"] == comparison.found[1].num_bound_tokens
    assert len(written["lru"]["first_token_quantiles_s"]) == 30
    assert set(written["lru"]["history"]["held_blocks"]) == {"device", "host", "disk"}


def test_with_a_sweep_json_has_a_list_of_runs() -> None:
    written = json.loads(json.dumps(compare_host_sizes().to_json()))

    assert (written["sweep"], written["block_bytes"]) == ("host", 2**20)
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
