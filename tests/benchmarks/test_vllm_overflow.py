"""What the overflow benchmark makes of its rounds, without an engine."""

from pathlib import Path

import pytest

from benchmarks.harness.measurement import OURS
from benchmarks.vllm.overflow import (
    FOUND_TOKENS,
    OWN,
    VLLM,
    Case,
    Returned,
    computed_ratio,
    make_options,
    summarize,
)


def returned(factor: float, computed: float) -> Returned:
    return Returned([factor * number for number in range(1, 21)], computed, [factor], computed / 2)


def test_each_figure_of_a_case_compares_ours_with_both_others() -> None:
    round_ = {OURS: returned(0.1, 0.0), VLLM: returned(0.4, 0.5), OWN: returned(0.2, 0.1)}

    found = {one.labels["figure"]: one for one in summarize(Case(4, in_bursts=True), [round_, round_])}

    assert found["first token, p50"].values[OURS] == pytest.approx((1050.0, 1050.0))
    assert found["first token, p95"].values[VLLM] == pytest.approx((8000.0, 8000.0))
    assert found["slowest first token, in medians"].values[OWN] == pytest.approx((20 / 10.5, 20 / 10.5))
    assert found["share computed"].values[VLLM] == (0.5, 0.5)
    assert found["share computed after a restart"].values[VLLM] == (0.25, 0.25)
    assert all(one.labels["sessions return"] == "in bursts" for one in found.values())


def test_a_partial_last_block_counts_neither_as_found_nor_as_computed() -> None:
    assert computed_ratio([(1.0, FOUND_TOKENS), (1.0, FOUND_TOKENS + 40)]) == 0
    assert computed_ratio([(1.0, 0), (1.0, FOUND_TOKENS)]) == 0.5


@pytest.mark.parametrize(
    ("contestant", "tier", "connector"),
    [
        (OURS, "kvtier-fs", "OffloadingConnector"),
        (VLLM, "fs", "OffloadingConnector"),
        (OWN, "fs", "KVTierConnector"),
    ],
)
def test_contestants_differ_in_connector_and_tier_alone(contestant: str, tier: str, connector: str) -> None:
    options = make_options(contestant, Case(4, in_bursts=False), "model", Path("/kv"))

    assert options.settings is not None
    assert options.settings["secondary_tiers"][0]["type"] == tier
    assert options.transfer_config is not None
    assert options.transfer_config["kv_connector"] == connector
    assert options.transfer_config["kv_connector_extra_config"]["cpu_bytes_to_use"] == 4 * 12 * 2**21
