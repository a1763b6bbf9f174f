"""Settings that every tier has reach one tier of the simulation through the production parser."""

import pytest

from kvtier.cli.simulate.options import SIMULATED_SETTINGS, apply_tier_settings
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.sim.link import LinkSpeed
from kvtier.sim.tier import TierModel
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import COMMON_SETTINGS, CascadeMode, TierSettings

FS, OBJ = (TierModel(name, 10, LinkSpeed(1e9, 1e9)) for name in ("fs", "obj"))


def apply(*texts: str) -> list[TierModel]:
    return apply_tier_settings([FS, OBJ], texts, block_bytes=100)


def test_a_tier_gets_its_settings_and_the_others_none() -> None:
    fs, obj = apply(
        "obj.cascade=on_evict", "obj.store_threshold=2", "obj.fill=true", "obj.job_timeout_s = 2.5"
    )

    assert fs == FS
    assert obj.settings == TierSettings(
        cascade=CascadeMode.ON_EVICT, store_threshold=2, fill=True, job_timeout_s=2.5
    )


def test_a_policy_orders_the_tier() -> None:
    assert [tier.cache_policy for tier in apply("fs.policy=arc")] == ["arc", "lru"]


def test_a_tier_is_told_which_blocks_are_worth_writing() -> None:
    fs, obj = apply('fs.admission={"min_reuse_probability": 0.3, "horizon_s": 1024}')

    assert fs.settings.admission == TierAdmission(0.3, 1024.0)
    assert obj.settings.admission is None


def test_a_budget_in_bytes_becomes_blocks_for_a_simulated_block_has_one_byte() -> None:
    budgets = [apply(f"fs.max_in_flight_store_bytes={size}")[0].settings for size in ("1KiB", "5B")]

    assert [settings.max_in_flight_store_bytes for settings in budgets] == [10, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fs.cascade", "must be NAME.SETTING=VALUE"),
        ("cascade=on_evict", "must be NAME.SETTING=VALUE"),
        (
            "fs.cascade=later",
            "--tier-setting fs.cascade='later': must be one of 'on_store', 'on_evict', 'must_write'",
        ),
        ("fs.store_threshold=-1", "--tier-setting fs.store_threshold=-1"),
        ("fs.store_threshold=two", "--tier-setting fs.store_threshold='two'"),
        ("fs.fill=1", "--tier-setting fs.fill=1: must be true or false"),
        ("fs.admission=0.3", r"--tier-setting fs.admission=0\.3: must be a mapping such as"),
        ("fs.admission={min_reuse_probability: 0.3}", "must be a mapping such as"),
        (
            'fs.admission={"min_reuse_probability": 0.3}',
            "--tier-setting fs.admission.horizon_s: must be a number",
        ),
    ],
)
def test_a_wrong_value_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sf.fill=true", "unknown tier for --tier-setting 'sf': did you mean 'fs'"),
        ("fs.fil=true", "unknown simulated setting for --tier-setting 'fil': did you mean 'fill'"),
        ("fs.required=true", "unknown simulated setting for --tier-setting 'required'"),
        ("fs.policy=lur", "unknown eviction policy for --tier-setting fs.policy 'lur': did you mean 'lru'"),
        ('fs.admission={"min": 1}', "unknown name in 'admission' for --tier-setting fs.admission 'min'"),
    ],
)
def test_an_unknown_name_is_refused(text: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        apply(text)


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fs\.fill is given twice"):
        apply("fs.fill=true", "fs.fill=false")


def test_what_can_be_set_is_a_setting_that_every_tier_has() -> None:
    assert set(SIMULATED_SETTINGS) < COMMON_SETTINGS
