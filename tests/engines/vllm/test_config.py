"""vLLM's configuration as kvtier's, and what is refused at start."""

import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.configs import BLOCK_TOKENS, cache_config, full, group, state, with_kvtier
from vllm.config import KVEventsConfig, ModelConfig, VllmConfig
from vllm.config.mamba import MambaBackendEnum
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.config import LoadIf
from kvtier.engines.vllm import compat
from kvtier.engines.vllm.config import (
    check_drafted_states,
    check_rope,
    check_supported,
    check_zeroing,
    make_offloading_config,
)
from kvtier.errors import ConfigError, ModelError, UnknownNameError
from kvtier.namespace import make_namespace

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


@pytest.fixture
def kv_cache_config() -> KVCacheConfig:
    return cache_config(group(full(), "a", "b"))


@pytest.fixture
def config(vllm_config: VllmConfig) -> VllmConfig:
    return with_kvtier(vllm_config)


def test_what_the_two_processes_say_differs_by_the_rank_alone(
    config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    config.parallel_config.rank = 0

    scheduler = make_offloading_config(config, kv_cache_config, SCHEDULER)
    worker = make_offloading_config(config, kv_cache_config, WORKER)

    assert (scheduler.rank, worker.rank) == (None, 0)
    assert make_namespace(scheduler, 64).digest == make_namespace(worker, 64).digest
    assert scheduler.engine_id == worker.engine_id == config.kv_transfer_config.engine_id


def test_the_engine_is_described_with_its_sizes(
    config: VllmConfig, kv_cache_config: KVCacheConfig, model_folder: Path
) -> None:
    made = make_offloading_config(config, kv_cache_config, SCHEDULER)

    assert made.engine_kind == "vllm"
    assert made.model.name == str(model_folder)
    assert made.model.dtype == "torch.float32"
    assert made.hash_block_size == BLOCK_TOKENS
    assert made.groups[0].page_size_bytes == 2 * 2048
    assert (made.world_size, made.num_hosts, made.context_parallel_size) == (1, 1, 1)
    assert made.kv_dtype == "auto: float32 NONE"
    assert made.settings.cpu_bytes_to_use == 2**20
    assert made.enable_events is False


def test_kv_events_are_recorded_when_vllm_publishes_them(
    config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)

    assert make_offloading_config(config, kv_cache_config, SCHEDULER).enable_events is True


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_only_stores_or_only_loads_is_refused(
    config: VllmConfig, kv_cache_config: KVCacheConfig, role: str
) -> None:
    config.kv_transfer_config.kv_role = role

    with pytest.raises(ConfigError, match=f"kv_role='{role}'.*kv_both"):
        make_offloading_config(config, kv_cache_config, SCHEDULER)


@pytest.mark.parametrize(
    ("field", "setting"),
    [
        ("pipeline_parallel_size", "pipeline_parallel_size"),
        ("prefill_context_parallel_size", "context_parallel_size"),
        ("decode_context_parallel_size", "context_parallel_size"),
    ],
)
def test_workers_that_split_layers_or_tokens_are_refused(
    config: VllmConfig, kv_cache_config: KVCacheConfig, field: str, setting: str
) -> None:
    setattr(config.parallel_config, field, 2)

    with pytest.raises(ConfigError, match=f"{setting}=2: must be 1"):
        make_offloading_config(config, kv_cache_config, WORKER)


def test_workers_on_several_machines_are_refused(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    config.parallel_config.nnodes = 2

    with pytest.raises(ConfigError, match="num_hosts=2"):
        make_offloading_config(config, kv_cache_config, SCHEDULER)


def test_an_engine_that_never_uses_a_prefix_again_is_refused(
    config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    config.cache_config.enable_prefix_caching = False

    with pytest.raises(ConfigError, match="enable_prefix_caching=False"):
        make_offloading_config(config, kv_cache_config, SCHEDULER)


def test_a_hybrid_without_prefix_caching_is_told_the_flag_that_switches_it_on(
    config: VllmConfig, kv_cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.cache_config.enable_prefix_caching = False
    monkeypatch.setattr(type(config.model_config), "is_hybrid", True)

    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        make_offloading_config(config, kv_cache_config, SCHEDULER)


def test_a_cache_mode_of_states_that_cannot_be_served_is_refused_before_the_groups_are_known(
    config: VllmConfig,
) -> None:
    object.__setattr__(config.cache_config, "mamba_cache_mode", "all")

    with pytest.raises(ConfigError, match=r"mamba_cache_mode='all'.*--mamba-cache-mode align"):
        check_supported(config)


@pytest.mark.parametrize(
    ("method", "is_asynchronous", "message"),
    [
        ("ngram", False, None),
        ("mtp", False, None),
        (
            "eagle3",
            False,
            r"speculative_config='eagle3'.*recurrent states.*'mtp' and 'ngram'.*without kvtier",
        ),
        ("mtp", True, r"async_scheduling=True.*--no-async-scheduling"),
    ],
)
def test_drafts_that_no_engine_has_confirmed_are_refused_with_recurrent_states_before_the_groups_are_known(
    config: VllmConfig, method: str, is_asynchronous: bool, message: str | None
) -> None:
    object.__setattr__(config, "speculative_config", SimpleNamespace(method=method))
    config.scheduler_config.async_scheduling = is_asynchronous
    check_supported(config)
    object.__setattr__(config.cache_config, "mamba_cache_mode", "align")

    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_supported(config)


@pytest.mark.skipif(not compat.NAMES_KEPT_STATES, reason="this vLLM does not name the blocks of states")
@pytest.mark.parametrize(
    ("kind", "message"), [("GDN_ATTN", None), ("MAMBA2", "recurrent states of kind MAMBA2")]
)
def test_drafts_are_refused_with_kinds_of_states_that_no_engine_has_confirmed(
    config: VllmConfig, kind: str, message: str | None
) -> None:
    states = state(mamba_type=MambaAttentionBackendEnum[kind])
    object.__setattr__(config, "speculative_config", SimpleNamespace(method="mtp"))

    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_drafted_states(config, cache_config(group(full(), "a"), group(states, "b")))


@pytest.mark.parametrize("flag", ["use_replayssm", "use_kda_recoverssm"])
def test_states_of_which_the_last_tokens_are_kept_apart_are_refused(
    config: VllmConfig, kv_cache_config: KVCacheConfig, flag: str
) -> None:
    if not hasattr(config.cache_config, flag):
        pytest.skip("this vLLM keeps every token in the state")
    setattr(config.cache_config, flag, True)

    with pytest.raises(ConfigError, match=f"{flag}=True"):
        make_offloading_config(config, kv_cache_config, SCHEDULER)


@pytest.mark.skipif(not compat.NAMES_KEPT_STATES, reason="this vLLM does not name the blocks of states")
def test_whatever_changes_a_states_bytes_changes_the_namespace(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(**fields: object) -> str:
        groups = [group(full(), "a"), group(state(**fields), "b")]
        made = make_offloading_config(config, cache_config(*groups), SCHEDULER)
        return make_namespace(made, 64).digest.hex()

    digests = [
        digest(),
        digest(shapes=((3, 32), (4, 4, 8))),
        digest(dtypes=(torch.float32, torch.float32)),
        digest(dtypes=(torch.bfloat16, torch.bfloat16)),
        digest(mamba_type=MambaAttentionBackendEnum.GDN_ATTN),
    ]
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    digests.append(digest())
    config.additional_config = {"gdn_prefill_backend": "triton"}
    digests.append(digest())
    config.mamba_config.backend = MambaBackendEnum.FLASHINFER
    digests.append(digest())
    assert len(set(digests)) == len(digests)


def test_an_unknown_setting_names_the_nearest_known_one(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    misspelt = with_kvtier(vllm_config, cpu_bytes_to_used="1GiB")

    with pytest.raises(UnknownNameError, match="did you mean 'cpu_bytes_to_use'"):
        make_offloading_config(misspelt, kv_cache_config, SCHEDULER)


class ZeroingEngine:
    """What ``check_zeroing`` reads of an engine."""

    def __init__(self, *, use_v2_model_runner: bool) -> None:
        self.use_v2_model_runner = use_v2_model_runner


@pytest.mark.parametrize(
    ("is_mixed", "is_second_runner", "role", "is_refused"),
    [
        (True, True, SCHEDULER, True),
        (True, True, WORKER, False),
        (True, False, SCHEDULER, False),
        (False, True, SCHEDULER, False),
    ],
)
def test_a_runner_that_zeroes_blocks_before_they_are_stored_is_refused(
    is_mixed: bool, is_second_runner: bool, role: KVConnectorRole, is_refused: bool
) -> None:
    import torch

    other = full(dtype=torch.bfloat16, head_size=16) if is_mixed else full()
    kv_cache_config = cache_config(group(full(), "a"), group(other, "b"), tensors=[])
    engine = ZeroingEngine(use_v2_model_runner=is_second_runner)

    if is_refused:
        with pytest.raises(ModelError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            check_zeroing(engine, kv_cache_config, role)
    else:
        check_zeroing(engine, kv_cache_config, role)


@pytest.mark.parametrize(("replica", "name"), [(0, "shared"), (1, "shared-dp1"), (3, "shared-dp3")])
def test_each_replica_has_a_region_of_its_own(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, replica: int, name: str
) -> None:
    config = with_kvtier(vllm_config, instance_id="shared")
    config.parallel_config.data_parallel_index = replica

    assert make_offloading_config(config, kv_cache_config, SCHEDULER).settings.instance_id == name
    assert config.kv_transfer_config.kv_connector_extra_config["instance_id"] == "shared"


def digest(config: VllmConfig, kv_cache_config: KVCacheConfig) -> bytes:
    """Return the namespace of an engine's blocks."""
    return make_namespace(make_offloading_config(config, kv_cache_config, SCHEDULER), 64).digest


def test_whatever_changes_the_bytes_of_a_block_changes_its_namespace(
    config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    variants = {"plain": config}
    for name in ("dtype", "seed", "algorithm", "kv dtype", "skipped layers", "rope"):
        variants[name] = copy.deepcopy(config)
    variants["dtype"].model_config.dtype = "bfloat16"
    variants["seed"].model_config.seed = 5
    variants["algorithm"].cache_config.prefix_caching_hash_algo = "sha256_cbor"
    variants["kv dtype"].cache_config.cache_dtype = "fp8"
    variants["skipped layers"].cache_config.kv_cache_dtype_skip_layers = ["0"]
    variants["rope"].model_config.hf_config.rope_parameters = {"rope_type": "linear", "factor": 2.0}

    digests = {name: digest(variant, kv_cache_config) for name, variant in variants.items()}

    assert len(set(digests.values())) == len(variants)
    assert digest(copy.deepcopy(config), kv_cache_config) == digests["plain"]


def test_last_rows_of_the_embedding_change_the_namespace(
    config: VllmConfig, kv_cache_config: KVCacheConfig, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    digests, sizes = set(), set()
    for value in (1.0, 2.0):
        embed = torch.ones(1024, 64)
        embed[-24:] = value
        save_file({"embed": embed}, tmp_path / "model.safetensors")
        sizes.add((tmp_path / "model.safetensors").stat().st_size)
        changed = copy.deepcopy(config)
        changed.load_config.load_format = "auto"
        changed.model_config.model = str(tmp_path)
        digests.add(digest(changed, kv_cache_config))

    assert (len(digests), len(sizes)) == (2, 1)


def test_weights_that_nothing_names_are_refused_with_tiers_and_only_with_them(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    alone = with_kvtier(vllm_config)
    lasting = with_kvtier(
        vllm_config, secondary_tiers=[{"type": "fs", "root_dir": "/x", "capacity_bytes": "1B"}]
    )
    for config in (alone, lasting):
        config.load_config.load_format = "auto"
        config.model_config.model = "s3://bucket/model"

    assert "unidentified" in make_offloading_config(alone, kv_cache_config, SCHEDULER).model.revision
    with pytest.raises(ConfigError, match=r"s3://bucket/model.*--revision"):
        make_offloading_config(lasting, kv_cache_config, SCHEDULER)


def test_a_worker_reads_no_weights(
    config: VllmConfig, kv_cache_config: KVCacheConfig, tmp_path: Path
) -> None:
    config.load_config.load_format = "auto"
    (tmp_path / "model.bin").symlink_to(tmp_path / "gone")
    config.model_config.model = str(tmp_path)

    assert make_offloading_config(config, kv_cache_config, WORKER).model.weights == "not read here"


def test_pages_of_another_type_are_another_namespace(config: VllmConfig) -> None:
    import torch

    same_size = cache_config(group(full(dtype=torch.bfloat16, head_size=16), "a", "b"))

    assert digest(config, same_size) != digest(config, cache_config(group(full(), "a", "b")))


def test_load_if_reaches_kvtier(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    config = with_kvtier(vllm_config, load_if="faster")

    for role in (SCHEDULER, WORKER):
        assert make_offloading_config(config, kv_cache_config, role).settings.load_if is LoadIf.FASTER


@pytest.fixture(scope="module")
def transformers_model(model_folder: Path) -> ModelConfig:
    """A model in the implementation of transformers, of 256 positions."""
    return ModelConfig(
        model=str(model_folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        model_impl="transformers",
    )


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0],
    "long_factor": [2.0],
    "original_max_position_embeddings": 128,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("rope", "max_model_len", "last"),
    [
        (LONGROPE, 129, 128),
        (DYNAMIC, 257, 256),
        ({"full_attention": LONGROPE, "sliding_attention": None}, 256, 128),
    ],
)
def test_a_rope_that_depends_on_the_batch_is_refused(
    transformers_model: ModelConfig, rope: dict[str, object], max_model_len: int, last: int
) -> None:
    model = copy.deepcopy(transformers_model)
    model.hf_text_config.rope_parameters = rope
    model.max_model_len = max_model_len

    with pytest.raises(
        ConfigError, match=rf"max_model_len={max_model_len}: must be at most {last} .*other requests"
    ):
        check_rope(model)
    model.max_model_len = last
    check_rope(model)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC])
def test_vllms_own_rotary_layers_do_not_depend_on_the_batch(
    vllm_config: VllmConfig, rope: dict[str, object]
) -> None:
    model = copy.deepcopy(vllm_config.model_config)
    model.hf_text_config.rope_parameters = rope
    model.max_model_len = 512

    check_rope(model)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"rope_type": "yarn", "factor": 2.0}])
def test_a_fixed_rope_is_served_in_the_implementation_of_transformers_too(
    transformers_model: ModelConfig, rope: dict[str, object] | None
) -> None:
    model = copy.deepcopy(transformers_model)
    model.hf_text_config.rope_parameters = rope
    model.max_model_len = 512

    check_rope(model)


@pytest.mark.parametrize(
    ("executor", "is_local"), [("mp", True), ("uni", True), ("ray", False), (object, False)]
)
def test_only_executors_of_this_machine_let_workers_share_host_memory(
    config: VllmConfig, kv_cache_config: KVCacheConfig, executor: object, *, is_local: bool
) -> None:
    object.__setattr__(config.parallel_config, "distributed_executor_backend", executor)

    assert make_offloading_config(config, kv_cache_config, WORKER).has_local_workers is is_local
