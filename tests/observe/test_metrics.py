"""Each number that kvtier gives is read by one declared family, and each family reads one."""

import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.small_engine import running_engine, serve_some

from kvtier.connector.control_arm import MIN_ROUNDS, Arm, ControlArm
from kvtier.connector.metrics import SchedulerCounters
from kvtier.histogram import LATENCY_BOUNDS_S, SIZE_BOUNDS_BYTES
from kvtier.misses import MissCause
from kvtier.observe.family import Family, Kind, SampleFinder, unread
from kvtier.observe.metrics import FAMILIES
from kvtier.observe.tier_metrics import FAILURE_CAUSES, TIER_FAMILIES
from kvtier.tiering.base import TierFailure
from kvtier.tiering.fs.store import COUNTER_NAMES as FS_NAMES
from kvtier.tiering.kit.blobs.store import CAPACITY_COUNTS, COUNTS

pytest.importorskip(
    "mooncake.store",
    exc_type=ImportError,
    reason="needs Mooncake's libraries: apt-get install libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4",
)

from kvtier.tiering.mooncake.blobs import COUNTS as MOONCAKE_NAMES

BASE_UNITS = ("_seconds", "_bytes", "_tokens", "_blocks", "_ratio", "_jobs", "_requests")

TIER_COUNTS = {
    "fs": (*FS_NAMES, "expired_blocks", "keyless_blocks"),
    "obj": (*COUNTS, *CAPACITY_COUNTS),
    "valkey": (*COUNTS, *CAPACITY_COUNTS),
    "mooncake": (*COUNTS, *MOONCAKE_NAMES, "deferred_deletes"),
}
"""What the tiers count themselves, those included that are tested with servers."""

CONNECTOR_COUNTS = {
    **SchedulerCounters(loaded_tokens={"CPU": 1}).stats(),
    "connector.not_loaded_tokens.fs": 1.0,
}


def names_of(tier: str, names: Iterable[str]) -> list[str]:
    """Return the dotted names of a tier's numbers."""
    return [f"tier.0.{tier}.{name}" for name in names]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Return the dotted names of what an engine with every local tier gives, and of what other tiers count."""
    with running_engine(
        tmp_path_factory.mktemp("engine"), load_if="faster", ttl_s=3600, tenants={"*": {}}
    ) as engine:
        serve_some(engine)
        names = {*engine.stats(), *engine.histograms()}
    counted = [name for tier, own in TIER_COUNTS.items() for name in names_of(tier, own)]
    arm = ControlArm(random.Random(0))
    for kind in (Arm.LOADED, Arm.AUDITED) * MIN_ROUNDS:
        arm.add("fs", 300, 1.0, kind)
    return frozenset({*names, *counted, *CONNECTOR_COUNTS, *arm.stats()})


def test_each_number_is_read_by_a_family(numbers: frozenset[str]) -> None:
    assert len(numbers) > 150
    assert unread(FAMILIES, sorted(numbers)) == []


def test_each_family_reads_a_number(numbers: frozenset[str]) -> None:
    finder = SampleFinder(FAMILIES)
    read = {sample.family.name for name in numbers if (sample := finder.find(name)) is not None}

    assert {family.name for family in FAMILIES} == read


def test_no_number_is_read_by_two_families(numbers: frozenset[str]) -> None:
    for name in numbers:
        readers = [family.name for family in FAMILIES if family.label_values(name) is not None]
        assert len(readers) == 1, f"{name}: {readers}"


def test_the_histograms_of_an_engine_have_the_declared_buckets(tmp_path: Path) -> None:
    finder = SampleFinder(FAMILIES)
    with running_engine(tmp_path) as engine:
        snapshots = engine.histograms()
    for name, snapshot in snapshots.items():
        sample = finder.find(name)
        assert sample is not None
        assert sample.family.kind is Kind.HISTOGRAM
        assert sample.family.bounds == snapshot.bounds
    assert set(map(len, (LATENCY_BOUNDS_S, SIZE_BOUNDS_BYTES))) == {len(s.bounds) for s in snapshots.values()}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_follow_prometheus(family: Family) -> None:
    assert re.fullmatch(r"kvtier_[a-z][a-z0-9_]*[a-z]", family.name)
    assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_kib"))
    assert re.fullmatch(r"(vllm:kv_offload_\w+)?", family.vllm_name)
    if family.unit in ("seconds", "bytes"):
        assert family.name.endswith(f"_{family.unit}")
    if family.kind is Kind.HISTOGRAM:
        assert family.bounds == tuple(sorted(family.bounds))
    assert set(family.labels) <= {"tier", "tier_index", "cause", "origin", "tenant", "bound", "length"}
    assert family.help[0].isupper() or family.help[0].isdigit()
    assert family.help.endswith(".")


def test_names_are_given_once() -> None:
    for names in (
        [f.name for f in FAMILIES],
        [f.vllm_sample_name for f in FAMILIES],
        [f.path for f in FAMILIES],
    ):
        assert len(names) == len(set(names))


def test_each_family_of_a_tier_says_which_tier() -> None:
    assert {family.labels[:2] for family in TIER_FAMILIES} == {("tier_index", "tier")}


def test_the_causes_of_a_tiers_failures_are_those_that_tiers_name() -> None:
    assert FAILURE_CAUSES.split("|") == [failure.value for failure in TierFailure]


@pytest.mark.parametrize("cause", MissCause)
def test_each_cause_of_a_miss_has_a_sample_with_and_without_a_tier(cause: MissCause) -> None:
    finder = SampleFinder(FAMILIES)
    for tier in ("", "fs"):
        sample = finder.find(f"connector.missed_tokens.{cause.value}" + (f".{tier}" if tier else ""))
        assert sample is not None
        assert sample.family.sample_name == "kvtier_missed_tokens_total"
        assert sample.label_values == (cause.value, tier)
