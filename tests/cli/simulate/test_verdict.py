"""The verdict says by how much the best case is better, and at which size of a sweep."""

import dataclasses
from collections.abc import Sequence

import pytest
from tests.cli.simulate.compared import BLOCK_BYTES, ENGINE, HOST, compare

from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.verdict import chosen_size, find_sweep_knee, make_verdict
from kvtier.sim.model import HostModel
from kvtier.sim.results import Period, Simulation, Spread
from kvtier.sim.sweep import WITHOUT, Case, Size, Sweep


def result_of(not_computed_ratio: float, median_s: float = 1.0) -> Simulation:
    """Return a result in which so large a share of 1,000 tokens was not computed."""
    spread = Spread(median_s, median_s, median_s, median_s, median_s)
    total = Period(
        0.0,
        10,
        1000,
        {"host": round(1000 * not_computed_ratio)},
        spread,
        dataclasses.replace(spread, p90_s=0),
    )
    return Simulation(total, (), 60.0, 0, 1.0, (), {}, num_bound_tokens=900)


def compared(results: Sequence[tuple[str, Simulation]]) -> Comparison:
    """Return a comparison without a sweep."""
    cases = tuple(Case(policy, ENGINE, None if policy == WITHOUT else HOST) for policy, _ in results)
    whole = compare(["lru"])
    return dataclasses.replace(whole, cases=cases, found=tuple(one for _, one in results))


def swept(*ratios: float) -> Comparison:
    """Return a sweep of host memory in doublings with these shares of tokens not computed."""
    sizes = tuple(Size(2**power, f"{2**power}MiB") for power in range(len(ratios)))
    cases = [Case(WITHOUT, ENGINE, None), *(Case("lru", ENGINE, HOST, size) for size in sizes)]
    found = [result_of(0.1, 2.0), *(result_of(ratio) for ratio in ratios)]
    whole = compare(["lru"])
    return dataclasses.replace(whole, sweep=Sweep("host", sizes), cases=tuple(cases), found=tuple(found))


def test_fewer_tokens_are_counted_against_those_that_were_computed() -> None:
    verdict = make_verdict(compared([(WITHOUT, result_of(0.2, 2.37)), ("lru", result_of(0.4, 1.51))]))

    assert verdict.text == "would compute 25% fewer prompt tokens; median first token 2.37 -> 1.51 s"
    assert verdict.fewer_ratio == pytest.approx(0.25)
    assert verdict.median_first_token_s == (2.37, 1.51)
    assert verdict.saved_s == pytest.approx(10 * (2.37 - 1.51))


def test_the_best_of_several_policies_is_named() -> None:
    results = [(WITHOUT, result_of(0.2)), ("lru", result_of(0.4)), ("arc", result_of(0.6))]

    assert make_verdict(compared(results)).text.startswith("arc: would compute 50% fewer")


def test_no_difference_is_said_with_what_could_be_found() -> None:
    verdict = make_verdict(compared([(WITHOUT, result_of(0.2)), ("lru", result_of(0.201))]))

    assert (
        verdict.text == "would not help: as many prompt tokens would be computed; not computed: at most 90%"
    )


def test_more_computed_tokens_are_said() -> None:
    verdict = make_verdict(compared([(WITHOUT, result_of(0.5)), ("lru", result_of(0.4))]))

    assert verdict.text.startswith("would compute 20% more prompt tokens")


def test_nothing_served_is_said() -> None:
    verdict = make_verdict(compare(engine=dataclasses.replace(ENGINE, num_device_blocks=2)))

    assert (verdict.policy, verdict.text.partition(":")[0]) == (None, "no request was served")


def test_times_that_are_hidden_are_not_in_the_verdict() -> None:
    saturated = result_of(0.4)
    queue = dataclasses.replace(saturated.total.queue, p90_s=1e9)
    saturated = dataclasses.replace(saturated, total=dataclasses.replace(saturated.total, queue=queue))
    comparison = compared([(WITHOUT, result_of(0.2)), ("lru", saturated)])

    verdict = make_verdict(dataclasses.replace(comparison, is_rate_derived=True))

    assert verdict.median_first_token_s is None
    assert "first token" not in verdict.text


@pytest.mark.parametrize(
    ("ratios", "size", "words"),
    [
        ((0.1, 0.3, 0.5, 0.52, 0.53), "4MiB", "the knee: from here on more brings less"),
        ((0.1, 0.11, 0.15, 0.3, 0.6), "16MiB", "hits still rise"),
        ((0.5, 0.5, 0.501), "1MiB", "more brings nothing"),
        ((0.1, 0.6), "2MiB", "hits still rise"),
    ],
)
def test_the_verdict_of_a_sweep_is_about_its_knee(ratios: tuple[float, ...], size: str, words: str) -> None:
    comparison = swept(*ratios)

    verdict = make_verdict(comparison)

    assert verdict.size == size
    assert verdict.text.startswith(f"{size} of host memory ({words}): would compute ")
    chosen = chosen_size(comparison)
    assert chosen is not None
    assert (chosen.label, chosen.num_blocks * BLOCK_BYTES) == (size, int(size.removesuffix("MiB")) * 2**20)


def test_sizes_that_do_not_help_are_compared_with_what_the_device_holds() -> None:
    # The device has 6 blocks of 1 MiB.
    small, large = swept(0.1, 0.1, 0.1), swept(0.1, 0.1, 0.1, 0.1)

    end = "as many prompt tokens would be computed; not computed: at most 90%"
    assert make_verdict(small).text == f"none of these sizes helps, the device holds 6MiB: {end}"
    assert make_verdict(large).text == f"none of these sizes helps: {end}"


@pytest.mark.parametrize("is_rate_derived", [False, True])
def test_a_saturated_run_has_no_times_in_its_verdict(is_rate_derived: bool) -> None:
    queued = result_of(0.2, 349_616.0)
    queue = dataclasses.replace(queued.total.queue, p90_s=1e9)
    queued = dataclasses.replace(queued, total=dataclasses.replace(queued.total, queue=queue))
    comparison = compared([(WITHOUT, queued), ("lru", result_of(0.4))])

    verdict = make_verdict(dataclasses.replace(comparison, is_rate_derived=is_rate_derived))

    assert (verdict.saved_s, verdict.median_first_token_s) == (None, None)
    assert verdict.text == "would compute 25% fewer prompt tokens"


@pytest.mark.parametrize("sweep", [None, Sweep("device", (Size(6, "6MiB"), Size(60, "60MiB")))])
def test_a_run_without_host_memory_says_what_the_device_finds(sweep: Sweep | None) -> None:
    comparison = compare(["lru", "arc"], sweep, host=HostModel(0))

    assert {case.policy for case in comparison.cases} == {WITHOUT}
    verdict = make_verdict(comparison)
    assert "without offloading" in verdict.text
    assert "of the prompt tokens are not computed" in verdict.text
    assert verdict.fewer_ratio == 0.0


def test_the_knee_of_a_curve_is_where_it_leaves_its_rise() -> None:
    assert find_sweep_knee(swept(0.1, 0.3, 0.5, 0.52, 0.53)) == 2
    assert find_sweep_knee(swept(0.1, 0.2, 0.3, 0.4)) is None
    assert find_sweep_knee(compare(["lru"])) is None
