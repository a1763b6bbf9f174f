"""The settings: what cannot work is refused with one clear error when the backend is attached."""

from typing import Any

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from tests.engines.sglang.conftest import MakeConfig, MakeStorage, key_of
from tests.engines.sglang.pools import HeadsPool

from kvtier.engines.sglang import KVTierStorage
from kvtier.errors import ConfigError, KVTierError, NamedClassError, UnknownNameError

FS = {"type": "fs", "root_dir": "/nowhere", "capacity_bytes": "1GiB"}
KEYS = [key_of(number) for number in range(4)]


@pytest.mark.parametrize(
    ("extra_config", "message"),
    [
        ({"teir": FS}, "did you mean 'tier'"),
        ({"tier": None}, "must be a tier with its settings"),
        ({"tier": "fs"}, "must be a tier with its settings"),
        ({"tier": {"type": "fz"}}, "did you mean 'fs'"),
        ({"tier": {"type": "redis"}}, "valkey"),
        ({"tier": {"type": "example"}}, "take fs, valkey or obj"),
        ({"tier": FS | {"root_dri": "/x"}}, "did you mean 'root_dir'"),
        ({"tier": FS | {"cascade": "on_evict"}}, "leave it out"),
        ({"tier": FS | {"fill": True}}, "leave it out"),
        ({"tier": FS | {"store_threshold": 2}}, "leave it out"),
        ({"staging_bytes": "many"}, "must be a whole number of bytes"),
        ({"tenant_salt": 7}, "must be a string"),
        ({"encryption": "yes"}, "key_file"),
        ({"engine_arguments": ["a"]}, "must be a mapping"),
        ({"metrics_port": 70_000}, "metrics_port"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(
    extra_config: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        KVTierStorage(make_config(extra_config=extra_config), {})


def test_a_missing_tier_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    del config.extra_config["tier"]
    with pytest.raises(ConfigError, match="tier"):
        KVTierStorage(config, {})


def test_a_directory_that_cannot_be_written_fails_the_attachment(make_storage: MakeStorage) -> None:
    with pytest.raises(KVTierError, match="root_dir"):
        make_storage(HeadsPool(), {"type": "fs", "root_dir": "/proc/kvtier", "capacity_bytes": "1GiB"})


def test_what_sglang_reads_of_the_same_json_is_left_to_it(make_config: MakeConfig) -> None:
    extra = {"prefetch_threshold": 1, "prefetch_timeout_base": 2, "tp_lcm_size": 4}
    KVTierStorage(make_config(extra_config=extra), {"later": 1}).close()


def test_the_configuration_is_not_changed(make_config: MakeConfig) -> None:
    config = make_config()
    before = dict(config.extra_config)
    KVTierStorage(config, {}).close()
    assert config.extra_config == before


def test_ranks_and_pools_share_one_directory(make_storage: MakeStorage, tmp_path: Any) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "16MiB"}
    pools = [HeadsPool(), HeadsPool()]
    ranks = [make_storage(pools[rank], tier, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    for rank, pool in zip(ranks, pools, strict=True):
        pool.fill(1)
        assert rank.batch_set_v1(KEYS[:1], pool.slots(3)) == [True]
        assert rank.batch_get_v1(KEYS[:1], pool.slots(4)) == [True]
        assert pool.page(3) == pool.page(4)
    assert len({path.parent for path in tmp_path.rglob("*.pack")}) == 2


def test_a_slab_is_refused_with_what_to_write(make_storage: MakeStorage, tmp_path: Any) -> None:
    tier = {"type": "slab", "path": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}
    with pytest.raises(NamedClassError, match='"type": "fs"'):
        make_storage(HeadsPool(), tier)
