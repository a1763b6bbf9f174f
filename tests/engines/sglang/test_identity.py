"""Whose pages are found: those of the same weights, settings, layout and part of a rank, and no others."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from tests.engines.sglang.conftest import CONFIG, MakeConfig, MakeStorage, key_of
from tests.engines.sglang.pools import HeadsPool, LatentPool, SmallPool
from tests.tiering.fs.slots import stored_blocks

from kvtier.engines.sglang import KVTierStorage, identity
from kvtier.engines.sglang.identity import CONTEXT_MODULE
from kvtier.errors import ConfigError, FingerprintError

KEYS = [key_of(number) for number in range(4)]
HAS_ALL = 4


def count_found(storage: KVTierStorage, pool: SmallPool) -> int:
    """Return how many of the pages another backend has stored are found, looked up and loaded."""
    num = storage.batch_exists(KEYS)
    assert storage.batch_get_v1(KEYS, pool.slots(8, 9, 10, 11)).count(True) == num
    return num


@pytest.fixture
def stored(make_storage: MakeStorage) -> HeadsPool:
    """Store four pages and return their pool."""
    pool = HeadsPool()
    pool.fill(1)
    assert make_storage(pool).batch_set_v1(KEYS, pool.slots(0, 1, 2, 3)) == [True] * 4
    return pool


def test_another_start_of_the_same_finds_them(stored: HeadsPool, make_storage: MakeStorage) -> None:
    assert count_found(make_storage(HeadsPool()), stored) == HAS_ALL


def test_another_release_that_stores_the_same_bytes_finds_them(
    stored: HeadsPool, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "version", lambda _: "9.9.9")
    monkeypatch.setattr(identity, "CONFIRMED_RELEASES", identity.CONFIRMED_RELEASES | {"9.9.9"})
    assert count_found(make_storage(HeadsPool()), stored) == HAS_ALL


def test_the_same_bytes_are_found_in_a_moved_folder_and_under_another_name(
    model: Path, stored: HeadsPool, make_storage: MakeStorage
) -> None:
    moved = model.rename(model.parent / "moved")
    assert count_found(make_storage(HeadsPool(), model_name=str(moved)), stored) == HAS_ALL
    served = make_storage(HeadsPool(), model_name="served", extra_config={"model": str(moved)})
    assert count_found(served, stored) == HAS_ALL


def test_a_release_that_was_not_looked_at_finds_none(
    stored: HeadsPool, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "version", lambda _: "9.9.9")
    assert count_found(make_storage(HeadsPool()), stored) == 0


def rewrite(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return what writes a file of the model."""
    data = content.encode() if isinstance(content, str) else content

    def write(model: Path) -> None:
        (model / name).write_bytes(data)

    return write


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(rewrite("model.safetensors", b"weightS"), id="one byte of the weights"),
        pytest.param(rewrite("adapter.safetensors", b"more"), id="one more file"),
        pytest.param(rewrite("modeling.py", "x = 1"), id="the model's own code"),
        pytest.param(rewrite("config.json", json.dumps(CONFIG | {"rope_theta": 20_000.0})), id="RoPE's base"),
        pytest.param(
            rewrite("config.json", json.dumps(CONFIG | {"rope_scaling": {"factor": 4.0}})), id="RoPE's factor"
        ),
    ],
)
def test_another_model_of_the_same_name_finds_none(
    change: Callable[[Path], None], model: Path, stored: HeadsPool, make_storage: MakeStorage
) -> None:
    change(model)
    assert count_found(make_storage(HeadsPool()), stored) == 0


def test_what_changes_no_result_changes_no_identity(
    model: Path, stored: HeadsPool, make_storage: MakeStorage
) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": "9"}))
    (model / "README.md").write_text("words")
    assert count_found(make_storage(HeadsPool()), stored) == HAS_ALL


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tp_size": 2}, id="first of two ranks"),
        pytest.param({"tp_size": 2, "tp_rank": 1}, id="second of two ranks"),
        pytest.param({"pp_size": 2, "pp_rank": 1}, id="another stage"),
        pytest.param({"attn_cp_size": 2, "attn_cp_rank": 1}, id="another part of the tokens"),
        pytest.param({"model_name": "other", "extra_config": {"model_revision": "r1"}}, id="another name"),
        pytest.param({"extra_config": {"tenant_salt": "b"}}, id="another tenant"),
        pytest.param(
            {"extra_config": {"engine_arguments": {"kv_cache_dtype": "fp8_e5m2"}}}, id="another format"
        ),
        pytest.param({"extra_config": {"interface_v1": 0}}, id="pages as a whole"),
    ],
)
def test_other_settings_find_none(
    changes: dict[str, Any], stored: HeadsPool, make_storage: MakeStorage
) -> None:
    assert count_found(make_storage(HeadsPool(), **changes), stored) == 0


@pytest.mark.parametrize("kind", ["tp", "pp", "attn_cp"])
def test_each_rank_of_two_has_pages_of_its_own(kind: str, make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    first, second = (
        make_storage(pool, **{f"{kind}_size": 2, f"{kind}_rank": rank, "is_mla_model": False})
        for rank in (0, 1)
    )
    assert first.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    assert (first.batch_exists(KEYS), second.batch_exists(KEYS)) == (2, 0)


@pytest.mark.parametrize("kind", ["pp", "attn_cp"])
def test_latents_are_alike_on_tensor_parallel_ranks_alone(kind: str, make_storage: MakeStorage) -> None:
    pool = LatentPool()
    first, second = (
        make_storage(pool, **{f"{kind}_size": 2, f"{kind}_rank": rank, "is_mla_model": True})
        for rank in (0, 1)
    )
    assert first.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    assert (first.batch_exists(KEYS), second.batch_exists(KEYS)) == (2, 0)


def test_data_parallel_groups_share_pages(stored: HeadsPool, make_storage: MakeStorage) -> None:
    assert count_found(make_storage(HeadsPool(), dp_rank=1), stored) == HAS_ALL


@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(lambda: HeadsPool(dtype=torch.float16), id="another type of the same size"),
        pytest.param(lambda: HeadsPool("page_first_direct"), id="another layout of the same size"),
        pytest.param(lambda: HeadsPool(page_size=2, dim=16), id="other pages of the same size"),
        pytest.param(lambda: HeadsPool(heads=4), id="more heads"),
    ],
)
def test_other_pools_find_none(
    pool: Callable[[], HeadsPool], stored: HeadsPool, make_storage: MakeStorage
) -> None:
    other = pool()
    assert make_storage(other).batch_exists(KEYS) == 0


def test_another_stages_layers_are_other_pages(stored: HeadsPool, make_storage: MakeStorage) -> None:
    other = HeadsPool()
    other.start_layer, other.end_layer = 3, 6
    assert make_storage(other).batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name": "org/unknown"}, '"model": PATH'),
        ({"model_name": None}, '"model": PATH'),
        ({"model_name": "x" * 10_000}, '"model": PATH'),
        ({"extra_config": {"model": "/no/such/folder"}}, "not on this machine's disks"),
        ({"extra_config": {"model": "relative"}}, "must be an absolute path"),
    ],
)
def test_weights_that_cannot_be_found_are_refused_with_the_remedy(
    changes: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTierStorage(make_config(**changes), {})


def test_a_setting_leads_to_the_weights_or_names_them(
    model: Path, stored: HeadsPool, make_storage: MakeStorage
) -> None:
    # Where the weights are not read the revision is a part of the identity: these are other pages than the folder's.
    found = make_storage(HeadsPool(), model_name="served", extra_config={"model": str(model)})
    assert found.batch_set_v1(KEYS[:1], stored.slots(0)) == [True]
    named = make_storage(HeadsPool(), model_name="served", extra_config={"model_revision": "r1"})
    assert named.batch_exists(KEYS) == 0


def test_a_folder_without_weights_is_refused(tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no weights"):
        KVTierStorage(make_config(model_name=str(tmp_path / "empty")), {})


def test_a_configuration_that_is_no_json_is_refused(model: Path, make_config: MakeConfig) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        KVTierStorage(make_config(), {})


def test_raw_bytes_need_the_name_of_their_format(make_storage: MakeStorage) -> None:
    with pytest.raises(ConfigError, match="raw bytes of an unknown format"):
        make_storage(HeadsPool(dtype=torch.uint8))
    arguments = {"engine_arguments": {"kv_cache_dtype": "fp8_e4m3"}}
    pool = HeadsPool(dtype=torch.uint8)
    assert make_storage(pool, extra_config=arguments).batch_set_v1(KEYS[:1], pool.slots(0)) == [True]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Return the arguments of an engine that seems to run in this process, at their defaults."""
    arguments = types.SimpleNamespace(
        model_path=None, revision=None, enable_lora=None, lora_paths=None, speculative_draft_model_path=None
    )
    module = types.ModuleType(CONTEXT_MODULE)
    module.get_server_args = lambda: arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, CONTEXT_MODULE, module)
    # Its files are older than the process of an engine; those of a test are not.
    monkeypatch.setattr("kvtier.engines.checkpoint.files.process_start_ns", lambda: 2**63)
    return arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json_model_override_args", '{"rope_scaling": {"factor": 8}}'),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("quantization", "fp8"),
        ("attention_backend", "triton"),
        ("model_impl", "transformers"),
        ("mm_process_config", {"image": {"max_pixels": 1}}),
        ("image_processor_backend", "pil"),
        ("load_format", "pt"),
        ("an_argument_of_next_year", "x"),
        ("speculative_algorithm", "NEXTN"),
    ],
)
def test_an_argument_of_the_engine_that_changes_bytes_makes_other_pages(
    name: str, value: object, engine: types.SimpleNamespace, make_storage: MakeStorage
) -> None:
    pool = HeadsPool()
    assert make_storage(pool).batch_set_v1(KEYS, pool.slots(0, 1, 2, 3)) == [True] * 4
    assert count_found(make_storage(HeadsPool()), pool) == HAS_ALL
    setattr(engine, name, value)
    assert count_found(make_storage(HeadsPool()), pool) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_length", 131_072),
        ("served_model_name", "a"),
        ("port", 31_000),
        ("api_key", "sesame"),
        ("random_seed", 7),
        ("disable_cuda_graph", True),
        ("mem_fraction_static", 0.5),
        ("log_level", "debug"),
    ],
)
def test_an_argument_that_changes_none_finds_them(
    name: str, value: object, engine: types.SimpleNamespace, make_storage: MakeStorage
) -> None:
    pool = HeadsPool()
    assert make_storage(pool).batch_set_v1(KEYS, pool.slots(0, 1, 2, 3)) == [True] * 4
    setattr(engine, name, value)
    assert count_found(make_storage(HeadsPool()), pool) == HAS_ALL


def test_an_argument_without_a_form_makes_pages_of_one_start_and_is_named(
    engine: types.SimpleNamespace, make_storage: MakeStorage, caplog: pytest.LogCaptureFixture
) -> None:
    engine.forward_hooks = [lambda: None]
    pool = HeadsPool()
    assert make_storage(pool).batch_set_v1(KEYS, pool.slots(0, 1, 2, 3)) == [True] * 4
    assert count_found(make_storage(HeadsPool()), pool) == 0
    assert "forward_hooks: what it is set to has no form" in caplog.text


def test_no_secret_of_an_argument_stands_with_the_pages(
    engine: types.SimpleNamespace, make_storage: MakeStorage, tmp_path: Path
) -> None:
    engine.api_key = "sEsame"
    engine.model_loader_extra_config = '{"endpoint": "s3://user:sEsame@host", "access_key": "sEsame"}'
    pool = HeadsPool()
    assert make_storage(pool).batch_set_v1(KEYS[:1], pool.slots(0)) == [True]
    (document,) = tmp_path.rglob("namespace.json")
    assert "sEsame" not in document.read_text()


def test_the_engines_path_leads_to_weights_that_are_served_under_another_name(
    engine: types.SimpleNamespace, model: Path, make_storage: MakeStorage
) -> None:
    engine.model_path = str(model)
    pool = HeadsPool()
    storage = make_storage(pool, model_name="served-unified-token-major")
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [True]


def test_a_draft_models_weights_are_a_part_of_the_identity(
    engine: types.SimpleNamespace, tmp_path: Path, make_storage: MakeStorage
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"draft")
    engine.speculative_draft_model_path = str(draft)
    pool = HeadsPool()
    assert make_storage(pool).batch_set_v1(KEYS[:1], pool.slots(0)) == [True]
    (draft / "model.safetensors").write_bytes(b"other")
    assert make_storage(HeadsPool()).batch_exists(KEYS[:1]) == 0
    engine.speculative_draft_model_path = "org/unknown"
    with pytest.raises(ConfigError, match="draft model"):
        make_storage(HeadsPool())


@pytest.mark.parametrize("load_format", ["dummy", "remote_instance", "LoadFormat.NPCACHE", "of_next_year"])
def test_weights_that_are_not_the_folders_files_need_a_name(
    load_format: str, engine: types.SimpleNamespace, make_storage: MakeStorage
) -> None:
    engine.load_format = load_format
    with pytest.raises(ConfigError, match="model_revision"):
        make_storage(HeadsPool())
    make_storage(HeadsPool(), extra_config={"model_revision": "seed 1"})


def test_scales_are_named_by_their_bytes(
    engine: types.SimpleNamespace, tmp_path: Path, make_storage: MakeStorage
) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("1.0")
    engine.quantization_param_path = str(scales)
    pool = HeadsPool()
    assert make_storage(pool).batch_set_v1(KEYS[:1], pool.slots(0)) == [True]
    scales.write_text("2.0")
    assert make_storage(HeadsPool()).batch_exists(KEYS[:1]) == 0
    scales.unlink()
    with pytest.raises(ConfigError, match="quantization_param_path"):
        make_storage(HeadsPool())


def test_a_name_of_the_hub_leads_to_its_folder_in_the_cache(
    model: Path, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str, *, revision: object, local_files_only: bool) -> str:
        assert local_files_only
        if name != "org/model":
            raise OSError("not in the cache")
        return str(model)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = find  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    make_storage(HeadsPool(), model_name="org/model")
    with pytest.raises(ConfigError, match='"model": PATH'):
        make_storage(HeadsPool(), model_name="org/other")


def test_adapters_need_a_revision(engine: types.SimpleNamespace, make_storage: MakeStorage) -> None:
    engine.lora_paths = ["a=/adapters/a"]
    with pytest.raises(ConfigError, match="adapters_revision"):
        make_storage(HeadsPool())
    pool = HeadsPool()
    first = make_storage(pool, extra_config={"adapters_revision": "1"})
    assert first.batch_set_v1(KEYS[:1], pool.slots(0)) == [True]
    second = make_storage(HeadsPool(), extra_config={"adapters_revision": "2"})
    assert second.batch_exists(KEYS[:1]) == 0


def test_weights_that_are_younger_than_the_engine_are_refused(
    engine: types.SimpleNamespace, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.engines.checkpoint.files.process_start_ns", lambda: 0)
    with pytest.raises(FingerprintError, match="after the engine had started"):
        make_storage(HeadsPool())


def test_an_engine_whose_arguments_cannot_be_read_is_refused(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, CONTEXT_MODULE, types.ModuleType(CONTEXT_MODULE))
    with pytest.raises(ConfigError, match="engine_arguments"):
        make_storage(HeadsPool())
    make_storage(HeadsPool(), extra_config={"engine_arguments": {"kv_cache_dtype": "auto"}})


def test_every_rank_of_latents_finds_the_one_copy(make_storage: MakeStorage, tmp_path: Path) -> None:
    pool = LatentPool()
    pool.fill(1)
    ranks = [make_storage(pool, tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (1, 0)]
    assert ranks[0].batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    assert ranks[0].batch_exists(KEYS) == 0, "only the writer stores"
    assert ranks[1].batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    assert [rank.batch_exists(KEYS) for rank in ranks] == [2, 2]
    page = pool.page(1)
    assert ranks[0].batch_get_v1(KEYS[1:2], pool.slots(9)) == [True]
    assert pool.page(9) == page
    assert len([one for one in stored_blocks(tmp_path / "kv") if KEYS[0][:20] in one.name.hex()]) == 1


def test_a_pool_with_heads_is_divided_also_beside_latents(make_storage: MakeStorage) -> None:
    ranks = [make_storage(LatentPool(), tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1)]
    drafts = [HeadsPool(), HeadsPool()]
    for rank, draft in zip(ranks, drafts, strict=True):
        rank.register_mem_host_pool_v2(draft, "draft")
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    transfer = PoolTransfer("draft", drafts[0].slots(0), keys=KEYS[:1])
    assert ranks[0].batch_set_v2([transfer]) == {"draft": [True]}
    assert ranks[1].batch_get_v2([transfer]) == {"draft": [False]}
