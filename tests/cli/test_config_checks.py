"""``kvtier doctor --config`` says what would keep an engine with those settings from starting, tier by tier."""

import json
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.ports import free_port

from kvtier.cli import config_checks, doctor, main
from kvtier.cli.output import CheckResult

OWN_TIER = "tests.cli.place.places:MemoryTier"


def check(config: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return what is found, by subject; of several about one the last."""
    return {one.subject: (one.result.value, one.found) for one in config_checks.check_config(config)}


def with_tier(**tier: object) -> dict[str, object]:
    return {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}


def test_settings_of_a_healthy_engine_are_good_in_both_forms(tmp_path: Path) -> None:
    extra = with_tier(type="fs", root_dir=str(tmp_path / "kv"), capacity_bytes="1MiB")
    whole = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    for config in (extra, whole):
        found = check(config)
        assert {found[subject][0] for subject in ("settings", "cpu_bytes_to_use", "tier 0 (fs)")} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def stock(tier: Mapping[str, object], **more: object) -> dict[str, object]:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 2**20,
        "secondary_tiers": [tier],
        **more,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_vllms_own_connector_with_a_tier_of_kvtier_is_checked_too(tmp_path: Path) -> None:
    tier = {"type": "kvtier-fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "1MiB", "room_wait_s": 1}
    by_class = tier | {
        "type": "KVTierFS",
        "module_path": "kvtier.engines.vllm.tiers",
        "model_identity": "main",
    }
    for one in (tier, by_class):
        found = check(stock(one, eviction_policy="kvtier-hazard"))
        assert {found[subject][0] for subject in ("settings", "cpu_bytes_to_use", "tier 0 (fs)")} == {"ok"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "subject", "words"),
    [
        (stock({"type": "kvtier-ffs"}), "settings", "did you mean 'kvtier-fs'"),
        (
            stock({"type": "kvtier-fs", "root_dir": "relative", "capacity_bytes": "1MiB"}),
            "settings",
            "absolute",
        ),
        (stock({"type": "fs"}, eviction_policy="kvtier-lruu"), "settings", "did you mean 'lru'"),
        (stock({"type": "kvtier-fs"}, cpu_bytes_to_use="1MiB"), "settings", "a number of bytes"),
        (stock({"type": "fs"}), "kv_connector", "another connector"),
        (
            stock(
                {"type": "kvtier-fs", "root_dir": "/kv", "capacity_bytes": "1MiB"},
                spec_name="CPUOffloadingSpec",
            ),
            "spec_name",
            "write 'TieringOffloadingSpec'",
        ),
        (
            stock({"type": "fs"}, cpu_bytes_to_use=2**60, eviction_policy="kvtier-lru"),
            "cpu_bytes_to_use",
            "give less",
        ),
    ],
)
def test_what_would_keep_vllms_own_connector_from_kvtiers_tiers_is_said(
    config: dict[str, object], subject: str, words: str
) -> None:
    assert words in check(config)[subject][1]


@pytest.mark.parametrize(
    ("config", "subject", "words"),
    [
        ({"cpu_bytes": 1}, "settings", "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "much"}, "settings", "8GiB"),
        ({"cpu_bytes_to_use": "1MiB", "eviction_policy": "lruu"}, "settings", "'lru'"),
        ({"spec_name": "CPUOffloadingSpec"} | with_tier(type="fs"), "settings", "spec_name='CPUOffloadingSpec'"),
        ({"cpu_bytes_to_use": "1MiB", "max_tracker_size": 5}, "settings", "store_threshold=0"),
        ({}, "cpu_bytes_to_use", "is required"),
        ({"cpu_bytes_to_use": "9999TiB"}, "cpu_bytes_to_use", "give less"),
        ({"kv_connector": "KVTierConnector", "kv_role": "kv_producer"}, "kv_role", "kv_both"),
        ({"kv_connector": "KVTierConnector", "kv_connector_extra_config": 7}, "settings", "kv_connector_extra_config"),
        (with_tier(type="ffs"), "tier 0 (ffs)", "did you mean 'fs'"),
        (with_tier(), "tier 0 (?)", "every secondary tier needs one"),
        (with_tier(type="fs", root_dir="relative", capacity_bytes="1MiB"), "tier 0 (fs)", "absolute"),
        (with_tier(type="fs", root_dir="/dev/null", capacity_bytes="1MiB"), "tier 0 (fs)", "no directory"),
        (with_tier(type="slab", path="/no/such/blocks.slab", capacity_bytes="1MiB"), "tier 0 (slab)", '"type": "fs"'),
        (with_tier(type="fs", root_dir="/b", capacity_bytes="1MiB", policy="mq"), "tier 0 (fs)", "write \"lru\""),
        (with_tier(type=OWN_TIER, where="away"), f"tier 0 ({OWN_TIER})", "looked"),
        (with_tier(type=OWN_TIER, where="crash"), f"tier 0 ({OWN_TIER})", "RuntimeError, places.py"),
    ],
)  # fmt: skip
def test_what_would_keep_an_engine_from_starting_is_broken(
    config: dict[str, object], subject: str, words: str, tmp_path: Path
) -> None:
    result, found = check(config)[subject]
    assert result == "broken"
    assert words in found


def test_a_server_that_is_not_there_is_broken_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="the valkey tier needs redis-py: pip install 'kvtier[valkey]'")
    tier = with_tier(type="valkey", url=f"redis://:hunter2@127.0.0.1:{free_port()}", timeout_s=0.5)
    result, found = check(tier)["tier 0 (valkey)"]
    assert result == "broken"
    assert "cannot be reached" in found
    assert "hunter2" not in found


def test_a_tier_that_cannot_be_probed_is_a_note(tmp_path: Path) -> None:
    assert check(with_tier(type="example"))["tier 0 (example)"][0] == "note"


def test_cores_of_several_nodes_are_a_note(tmp_path: Path) -> None:
    for node, cores in enumerate(("0-3,8", "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    assert config_checks.check_numa(tmp_path, {0, 8}).result is CheckResult.GOOD
    assert config_checks.check_numa(tmp_path, {0, 4}).result is CheckResult.NOTE
    assert config_checks.check_numa(tmp_path / "missing", {0}).result is CheckResult.GOOD


def test_among_several_connectors_kvtier_s_is_found_and_another_alone_is_broken(tmp_path: Path) -> None:
    own = {"kv_connector": "KVTierConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": "1MiB"}}
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{}, own]}}
    assert check(several)["cpu_bytes_to_use"][0] == "ok"
    for other in (
        {"kv_connector": "OffloadingConnector"},
        {"kv_connector": 7, "kv_connector_extra_config": 7},
    ):
        assert check(other)["kv_connector"][0] == "broken"


def test_too_little_memory_that_can_be_pinned_is_a_note() -> None:
    assert config_checks.check_locked_memory(2**20, 2**30).result is CheckResult.NOTE
    assert config_checks.check_locked_memory(2**30, 2**30).result is CheckResult.GOOD
    assert config_checks.check_locked_memory(resource.RLIM_INFINITY, 2**30).result is CheckResult.GOOD


def test_few_open_files_are_a_note() -> None:
    assert config_checks.check_open_files(256).result is CheckResult.NOTE
    assert config_checks.check_open_files(resource.RLIM_INFINITY).result is CheckResult.GOOD


@pytest.mark.parametrize("text", [None, "", "nonsense", "[]", "[" * 100_000])
def test_a_file_without_settings_is_wrong_input(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.json"
    if text is not None:
        path.write_text(text)
    assert main.main(["doctor", "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith("kvtier: --config=")


def test_the_command_prints_what_it_found_as_json_and_ends_with_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda _: iter(()))
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(with_tier(type="fs", root_dir=str(tmp_path / "kv"), capacity_bytes="1MiB")))
    assert main.main(["doctor", "--config", str(path), "--json"]) == 0
    found = {one["subject"]: one["result"] for one in json.loads(capsys.readouterr().out)["checks"]}
    assert found["tier 0 (fs)"] == "ok"
    path.write_text(json.dumps(with_tier(type="fs", root_dir="/dev/null", capacity_bytes="1MiB")))
    assert main.main(["doctor", "--config", str(path)]) == 1
