"""A tier is built from its configuration entry, or refused with the name of what is wrong."""

from pathlib import Path
from typing import ClassVar

import pytest
from tests.own_classes import write_package
from tests.servers import require_mooncake
from tests.tiering.tenant_driver import config_of_tenants

from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, NamedClassError, UnknownNameError
from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import TierSettings
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.factory import TIERS, create_secondary_tier, require_quotas


def test_other_keys_are_constructor_arguments_and_common_ones_become_settings() -> None:
    entry = {"type": "example", "max_blocks": 3, "required": True, "job_timeout_s": 2}
    before = dict(entry)
    tier = create_secondary_tier(entry, make_rows(), make_config())
    assert isinstance(tier, ExampleSecondaryTier)
    assert tier.max_blocks == 3
    assert tier.settings.required
    assert tier.settings.job_timeout_s == 2.0
    assert entry == before


@pytest.mark.parametrize("name", ["example", "mooncake"])
def test_a_quota_in_a_tier_that_keeps_none_is_refused_before_the_tier_is_built(name: str) -> None:
    if name == "mooncake":
        require_mooncake()
    config = config_of_tenants(name, {"alice": 2**20})
    with pytest.raises(ConfigError, match=f"tier '{name}' keeps no quotas"):
        require_quotas(name, TIERS.resolve(name), config.settings)


def test_a_quota_of_host_memory_alone_is_no_tiers_concern() -> None:
    config = config_of_tenants("host", {"alice": 2**20})
    require_quotas("valkey", TIERS.resolve("example"), config.settings)


def test_a_missing_type_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r'example, fs.*"package.module:Class"'):
        create_secondary_tier({"max_blocks": 3}, make_rows(), make_config())


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'example'"):
        create_secondary_tier({"type": "exmple"}, make_rows(), make_config())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("redis", "'valkey'"),
        ("s3", "'obj'"),
        ("GCS", "'obj'"),
        ("azure", "'obj'"),
        ("disk", "'fs'"),
        ("file", "'fs'"),
        ("ssd", "'fs'"),
        ("nvme", "'fs'"),
    ],
)
def test_the_name_of_a_place_is_answered_with_the_tier_for_it(name: str, meant: str) -> None:
    with pytest.raises(
        UnknownNameError, match=rf"did you mean {meant}\? known are .* \"package.module:Class\""
    ):
        create_secondary_tier({"type": name}, make_rows(), make_config())


def test_a_tier_of_one_s_own_has_the_settings_of_its_constructor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "own_tier_package")
    monkeypatch.syspath_prepend(tmp_path)
    entry = {"type": "own_tier_package.parts:FolderTier", "root_dir": str(tmp_path), "fill": True}
    rows = make_rows()

    tier = create_secondary_tier(entry, rows, make_config())

    assert (tier.get_tier_type(), tier.settings.fill) == ("folder", True)
    driver = TierDriver(tier, rows)
    assert driver.store([1, 2]).success
    assert driver.load([2, 1]).success
    with pytest.raises(UnknownNameError, match="did you mean 'root_dir'"):
        create_secondary_tier({**entry, "root_dr": "/"}, rows, make_config())
    with pytest.raises(ConfigError, match="missing a required argument: 'root_dir'"):
        create_secondary_tier({"type": entry["type"]}, rows, make_config())


def test_a_class_that_is_no_tier_is_refused() -> None:
    with pytest.raises(
        NamedClassError, match=r"must be a subclass of kvtier.tiering.base.SecondaryTierManager"
    ):
        create_secondary_tier({"type": "collections:OrderedDict"}, make_rows(), make_config())


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'max_blocks'"):
        create_secondary_tier({"type": "example", "max_block": 3}, make_rows(), make_config())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("required", "yes"),
        ("job_timeout_s", -1),
        ("max_in_flight_store_bytes", 0),
        ("cascade", "sometimes"),
        ("max_blocks", 0),
    ],
)
def test_a_value_that_cannot_work_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        create_secondary_tier({"type": "example", name: value}, make_rows(), make_config())


def test_a_policy_is_refused_by_a_tier_that_cannot_follow_it(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the obj tier needs its client: pip install 'kvtier[obj]'")
    config = {"type": "obj", "url": f"file://{tmp_path}", "policy": "lru"}
    with pytest.raises(ConfigError, match="orders its blocks by itself"):
        create_secondary_tier(config, make_rows(), make_config())


def test_every_tier_takes_an_admission() -> None:
    config = {"type": "example", "admission": {"min_reuse_probability": 0.3, "horizon_s": 10}}
    tier = create_secondary_tier(config, make_rows(), make_config())
    assert tier.settings.admission == TierAdmission(0.3, 10.0)


def test_a_bad_admission_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_reuse_probability"):
        create_secondary_tier({"type": "example", "admission": {"horizon_s": 10}}, make_rows(), make_config())


def test_a_missing_constructor_argument_names_the_tier() -> None:
    with pytest.raises(ConfigError, match="root_dir"):
        create_secondary_tier({"type": "fs", "capacity_bytes": 2**30}, make_rows(), make_config())


def test_a_missing_setting_says_what_it_is() -> None:
    with pytest.raises(ConfigError, match="root_dir=None: is required: the directory"):
        create_secondary_tier({"type": "fs", "capacity_bytes": 2**30}, make_rows(), make_config())


def test_an_unknown_setting_of_a_tier_with_common_ones_names_the_nearest_of_both(tmp_path: Path) -> None:
    config = {"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": 2**30}
    for wrong, right in (("capacity_byte", "capacity_bytes"), ("emit_event", "emit_events")):
        with pytest.raises(UnknownNameError, match=f"did you mean '{right}'"):
            create_secondary_tier(config | {wrong: 1}, make_rows(), make_config())


class PlainTier(ExampleSecondaryTier):
    """A tier of somebody's own, with arguments instead of a dataclass of settings."""

    own_settings: ClassVar = None

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings,
        num_shelves: int = 2,
    ) -> None:
        super().__init__(config, primary_kv_view, settings=settings)
        self.num_shelves = num_shelves


def test_the_arguments_of_a_tier_without_a_dataclass_are_its_settings() -> None:
    if "shelves" not in TIERS:
        TIERS.register("shelves", f"{__name__}:PlainTier")
    entry = {"type": "shelves", "num_shelves": 3, "emit_events": True}
    tier = create_secondary_tier(entry, make_rows(), make_config())
    assert isinstance(tier, PlainTier)
    assert (tier.num_shelves, tier.settings.emit_events) == (3, True)
    with pytest.raises(UnknownNameError, match="did you mean 'num_shelves'"):
        create_secondary_tier({"type": "shelves", "num_shelfs": 3}, make_rows(), make_config())
