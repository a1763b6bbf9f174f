"""Each mistake of an operator is named by ``kvtier why``."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.observe.site import (
    CONFIG,
    NUM_RETURNS,
    PROMPT,
    ROOMY,
    MakeSite,
    chat,
    example,
    faulty,
    fill_host,
    fs,
    look_around,
    miss_in,
    never_answering,
    not_stored_now,
    serve_again,
    with_model,
    with_settings,
)
from tests.tiering.fs.slots import stored_blocks

from kvtier.config import KVGroup, OffloadingConfig
from kvtier.errors import ConfigError
from kvtier.misses import Detail, Miss, MissCause, NotStored
from kvtier.observe.why import explain_records
from kvtier.testing.faults import Faults
from kvtier.testing.tiering_driver import ROW_BYTES
from kvtier.tiering.base import TierSettings

# What makes two engines strangers to each other.


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (with_model(dtype="float16"), "model.dtype"),
        (with_model(config_digest="bb", config_json='{"rope": 2}'), "model.config.rope"),
        (with_model(revision="two"), "model.revision"),
        (with_settings(tenant_salt="acme"), "tenant"),
        (replace(CONFIG, hash_seed="7"), "hash_seed"),
        (replace(CONFIG, kv_dtype="fp8"), "kv_dtype"),
    ],
    ids=["other dtype", "other RoPE", "other revision", "other tenant", "other hash seed", "other KV dtype"],
)
def test_an_engine_with_another_identity_is_told_which_field_differs(
    tmp_path: Path, make_site: MakeSite, config: OffloadingConfig, field: str
) -> None:
    make_site(fs(tmp_path)).serve(PROMPT)
    other = make_site(fs(tmp_path), config=config)
    other.serve(PROMPT)

    (finding, *_) = other.report.findings
    assert finding.name.startswith("other_namespace:")
    assert field in finding.name
    assert "(here " in finding.text


def test_a_random_hash_seed_is_refused_with_what_to_do(tmp_path: Path, make_site: MakeSite) -> None:
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        make_site(fs(tmp_path), config=replace(CONFIG, hash_seed="random"))


def test_a_prompt_of_another_adapter_is_told_so(make_site: MakeSite) -> None:
    site = make_site(example())
    site.serve(PROMPT)
    site.serve(PROMPT, key_salt=b"adapter")

    assert miss_in(site) == Miss(MissCause.NEVER_SEEN, "", {"adapter": "yes"})


# Prompts that cannot share.


def test_blocks_larger_than_the_prompts_are_named(make_site: MakeSite) -> None:
    config = replace(CONFIG, groups=(KVGroup(4, ("layer",), 8192),), extra_config={"block_size": 64})
    site = make_site(config=config)
    for number in range(8):
        site.serve(chat(number, 20))

    assert site.findings[0] == "block_larger_than_prompts"
    assert "block_size" in site.report.findings[0].text


def test_a_time_stamp_at_the_head_of_the_system_prompt_is_named_with_its_token(make_site: MakeSite) -> None:
    site = make_site(num_blocks=400)
    for second in range(10):
        site.serve([1, 2, 3, 4, 5, 6, 7, 8, 500 + second, *range(200)])

    found = next(finding for finding in site.report.findings if finding.name == "prefix_ends_early")
    assert "ends at token 8" in found.text
    assert "time stamp" in found.text


def test_a_salt_for_each_user_is_named(make_site: MakeSite) -> None:
    site = make_site()
    for number in range(8):
        site.serve(PROMPT, salt=f"user {number}", key_salt=b"%d" % number)

    assert "cache_salt_per_user" in site.findings
    assert not any("user 1" in finding.text for finding in site.report.findings)


# What is kept from being stored.


def test_a_store_threshold_is_named(make_site: MakeSite) -> None:
    site = make_site(store_threshold=3)
    site.serve(PROMPT)
    site.serve(PROMPT)

    (found,) = (each for each in site.report.findings if each.name == "not_stored:reuse_filter")
    assert "store_threshold" in found.text


def test_an_admission_is_named(make_site: MakeSite) -> None:
    site = make_site(cache_policy="tests.observe.site:RefusingPolicy")
    site.serve(PROMPT)
    site.serve(PROMPT)

    assert miss_in(site).detail["reason"] == "admission"
    assert "not_stored:admission" in site.findings


def test_a_tiers_own_store_threshold_is_named(make_site: MakeSite) -> None:
    site = make_site(example(replace(ROOMY, store_threshold=5)), num_blocks=16)
    site.serve(PROMPT)
    fill_host(site)
    site.serve(PROMPT)

    assert "not_stored:reuse_filter" in site.findings


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"skip_store": True}, "not_stored:skip_store"),
        ({"max_store_tokens": 3}, "not_stored:max_store_tokens"),
    ],
)
def test_a_client_that_does_not_let_its_prompts_be_stored_is_named(
    make_site: MakeSite, params: dict[str, object], name: str
) -> None:
    site = make_site()
    site.serve(PROMPT, params)
    site.serve(PROMPT)

    assert name in site.findings


def test_prompts_alone_being_stored_is_named_when_the_answer_comes_back(make_site: MakeSite) -> None:
    site = make_site(config=with_settings(offload_prompt_only=True))
    site.serve(PROMPT[:4], num_answer_tokens=40)
    site.serve([*PROMPT[:4], *range(900, 940)])

    assert miss_in(site).detail["reason"] == "prompt_only"
    assert "not_stored:prompt_only" in site.findings


def test_a_client_that_skips_loading_is_named(make_site: MakeSite) -> None:
    site = make_site()
    site.serve(PROMPT)
    site.serve(PROMPT, {"skip_load": True})

    assert "limited" in site.findings


# What is too small, too slow, or broken.


def test_a_host_that_is_too_small_is_named_with_how_late_prompts_come_back(make_site: MakeSite) -> None:
    site = make_site(num_blocks=16)
    site.serve(PROMPT)
    site.serve(chat(2))
    site.clock.advance(240.0)
    site.serve(PROMPT)

    assert site.findings[0] == "host_too_small"
    assert "240 s later" in site.report.findings[0].text


def test_a_tier_that_is_too_small_is_named(make_site: MakeSite) -> None:
    site = make_site(example(max_blocks=16), num_blocks=16)
    site.serve(PROMPT)
    fill_host(site)
    site.serve(PROMPT)

    assert "example_too_small" in site.findings


def test_a_directory_that_is_too_small_is_named(tmp_path: Path, make_site: MakeSite) -> None:
    site = make_site(fs(tmp_path, num_blocks=40), num_blocks=16)
    site.serve(PROMPT)
    for number in range(2, 5):
        site.serve(chat(number), {"skip_load": True})
    site.serve(PROMPT)

    assert miss_in(site).tier == "fs"
    assert "fs_too_small" in site.findings


def test_a_tier_slower_than_the_deadline_is_named(make_site: MakeSite) -> None:
    site = make_site(never_answering, deadline_s=0.0)
    site.serve(PROMPT)

    assert miss_in(site) == Miss(MissCause.LATE, "example", {"deadline_s": 0.0})
    assert "late" in site.findings


def test_an_open_breaker_is_named(make_site: MakeSite) -> None:
    faults = Faults()
    site = make_site(faulty(faults), num_blocks=16)
    site.serve(PROMPT)
    fill_host(site)
    faults.lookup_raise_ratio = faults.fail_ratio = 1.0
    for number in range(30, 36):
        site.serve(chat(number))
    site.serve(PROMPT)

    assert miss_in(site).detail["reason"] == "circuit breaker open"
    assert "tier_down:circuit breaker open" in site.findings


def test_a_tier_out_of_service_is_named(make_site: MakeSite) -> None:
    faults = Faults()
    site = make_site(faulty(faults), num_blocks=16)
    faults.poll_raise_ratio = 1.0
    site.serve(PROMPT)
    fill_host(site)
    site.serve(PROMPT)

    assert "tier_down:out of service" in site.findings


def test_a_tier_whose_writes_fail_is_named(make_site: MakeSite) -> None:
    faults = Faults(fail_ratio=1.0)
    site = make_site(faulty(faults), num_blocks=16)
    site.serve(PROMPT)
    faults.fail_ratio = 0.0
    fill_host(site)
    serve_again(site)

    assert miss_in(site) == not_stored_now(NotStored.JOB_FAILED, "faulty")
    assert site.findings[0] == "not_stored:job_failed"


def test_a_removed_directory_is_named(tmp_path: Path, make_site: MakeSite) -> None:
    site = make_site(fs(tmp_path / "cache"), num_blocks=16)
    site.serve(PROMPT)
    fill_host(site)
    shutil.rmtree(tmp_path / "cache")
    look_around(site)
    serve_again(site)

    removed: Detail = {"reason": "removed by another program", "ago_s": 0.0}
    returns = list(site.half.records.latest)[-NUM_RETURNS:]
    assert [record.missed[0].miss for record in returns] == [
        Miss(MissCause.PURGED, "fs", removed)
    ] * NUM_RETURNS
    assert site.findings[0] == "purged:removed by another program"


def test_a_damaged_block_is_named(tmp_path: Path, make_site: MakeSite) -> None:
    site = make_site(fs(tmp_path), num_blocks=16)
    site.serve(PROMPT)
    fill_host(site)
    for block in stored_blocks(tmp_path):
        block.flip()
    site.serve(PROMPT)

    assert miss_in(site).cause is MissCause.DAMAGED
    assert "damaged" in site.findings


def test_a_tier_that_cannot_take_blocks_in_time_is_named(make_site: MakeSite) -> None:
    faults = Faults(delay_ratio=1.0)
    few = TierSettings(max_in_flight_store_bytes=2 * ROW_BYTES)
    site = make_site(faulty(faults, few), num_blocks=32)
    site.serve(PROMPT, settles=False)
    for number in range(2, 5):
        site.serve(chat(number), {"skip_load": True, "max_store_tokens": 48}, settles=False)
    faults.delay_ratio = 0.0
    site.settle()
    serve_again(site, 10)

    assert site.manager.stats()["tier.0.faulty.declined_cascades"] > 0
    assert miss_in(site) == not_stored_now(NotStored.DECLINED, "faulty")
    assert site.findings[0] == "not_stored:declined"


def test_a_reset_is_named(make_site: MakeSite) -> None:
    site = make_site()
    site.serve(PROMPT)
    site.half.reset()
    site.serve(PROMPT)

    assert miss_in(site).cause is MissCause.PURGED
    assert "purged:reset" in site.findings


# When all is well, or nothing is there.


def test_an_engine_whose_device_serves_everything_is_told_that_all_is_well(make_site: MakeSite) -> None:
    site = make_site()
    for _ in range(6):
        site.serve(PROMPT, num_device_tokens=60)

    assert site.findings[0] == "all_from_device"
    assert "All is well" in site.report.findings[0].text


def test_without_a_request_nothing_else_is_said() -> None:
    (no_requests,) = explain_records([]).findings

    assert no_requests.name == "no_requests"


def test_hits_leave_nothing_to_say_but_the_last_block(make_site: MakeSite) -> None:
    site = make_site(example())
    site.serve(PROMPT, num_device_tokens=60)
    for _ in range(9):
        site.serve(PROMPT)

    assert site.report.tokens_by_origin["host"] > 0
    assert all(name in ("partial_block", "never_seen", "all_from_device") for name in site.findings)
