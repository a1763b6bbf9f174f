"""Which weights an engine runs: two that differ anywhere that matters have different names."""

import copy
import hashlib
import json
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import save_file
from tests.engines.vllm.configs import TINY_LLAMA, cache_config, full, group, with_kvtier
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvtier.config import ModelIdentity
from kvtier.engines.checkpoint.files import process_start_ns
from kvtier.engines.vllm import identity
from kvtier.engines.vllm.config import make_offloading_config
from kvtier.engines.vllm.identity import LoadedWeightsNamer, make_model_identity, start_fingerprints
from kvtier.engines.vllm.loaded_weights import Origin, Weights
from kvtier.errors import ConfigError, FingerprintError
from kvtier.namespace import make_namespace


@pytest.fixture
def config(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration of an engine that reads its weights from a checkpoint."""
    copied = with_kvtier(vllm_config)
    copied.load_config.load_format = "auto"
    return copied


def tensors() -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint."""
    return {"embed": torch.arange(16384.0).reshape(256, 64), "norm": torch.ones(64), "scale": torch.ones(())}


def checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    names = sorted(weights)
    save_file({names[0]: weights[names[0]]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[1:]}, folder / "model-00002-of-00002.safetensors")
    return folder


def identify(config: VllmConfig, folder: Path, **settings: object) -> ModelIdentity:
    """Return an engine's identity when it runs the checkpoint in ``folder``."""
    copied = copy.deepcopy(config)
    copied.model_config.model = str(folder)
    for name, value in settings.items():
        object.__setattr__(copied.model_config, name, value)
    return make_model_identity(copied)


def weights_name(config: VllmConfig, folder: Path) -> str:
    """Return the name of the weights of the checkpoint in ``folder``."""
    return identify(config, folder).weights


def namespace_of(vllm_config: VllmConfig, identity: ModelIdentity) -> str:
    """Return the name under which an engine with this identity keeps its blocks."""
    caches = cache_config(group(full(), "layer.0"))
    config = make_offloading_config(vllm_config, caches, KVConnectorRole.SCHEDULER)
    return make_namespace(replace(config, model=identity), row_stride_bytes=8192).name


def test_a_copy_of_a_checkpoint_has_its_fingerprint(config: VllmConfig, tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one", tensors()), checkpoint(tmp_path / "other", tensors())

    assert weights_name(config, one) == weights_name(config, other)
    assert weights_name(config, one).startswith("blake3-of-every-byte:")


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("name", ["embed", "norm", "scale"])
def test_a_change_of_one_value_at_either_end_of_any_tensor_is_seen(
    config: VllmConfig, tmp_path: Path, name: str, position: int
) -> None:
    changed = tensors()
    changed[name].view(-1)[position] += 1

    before = weights_name(config, checkpoint(tmp_path / "before", tensors()))
    assert weights_name(config, checkpoint(tmp_path / "after", changed)) != before


@pytest.mark.parametrize("change", ["name", "shape", "type", "missing"])
def test_tensors_of_another_form_are_another_checkpoint(
    config: VllmConfig, tmp_path: Path, change: str
) -> None:
    changed = tensors()
    norm = changed.pop("norm")
    if change != "missing":
        other = {"name": norm, "shape": norm.reshape(8, 8), "type": norm.view(torch.int32)}[change]
        changed["norms" if change == "name" else "norm"] = other

    before = weights_name(config, checkpoint(tmp_path / "before", tensors()))
    assert weights_name(config, checkpoint(tmp_path / "after", changed)) != before


@pytest.mark.parametrize(
    "file_name",
    [
        "pytorch_model.bin",
        "model.pt",
        "consolidated.00.pth",
        "model-rank-0-part-0.safetensors",
        "modeling_mine.py",
    ],
)
def test_the_last_byte_counts_in_any_file_of_weights_or_code_whatever_its_times(
    config: VllmConfig, tmp_path: Path, file_name: str
) -> None:
    folder = checkpoint(tmp_path / "model", tensors())
    (folder / file_name).write_bytes(b"0" * 9999 + b"1")
    os.utime(folder / file_name, ns=(1, 1))
    before = weights_name(config, folder)
    (folder / file_name).write_bytes(b"0" * 9999 + b"2")
    os.utime(folder / file_name, ns=(1, 1))

    assert weights_name(config, folder) != before


@pytest.mark.parametrize(
    "file_name", ["tokenizer.json", "README.md", "generation_config.json", "original/a.pth"]
)
def test_files_that_change_no_block_do_not_count(config: VllmConfig, tmp_path: Path, file_name: str) -> None:
    folder = checkpoint(tmp_path / "model", tensors())
    before = weights_name(config, folder)
    (folder / file_name).parent.mkdir(exist_ok=True)
    (folder / file_name).write_bytes(b"anything")

    assert weights_name(config, folder) == before


def test_the_same_bytes_are_one_namespace_wherever_they_are_and_whatever_they_are_called(
    config: VllmConfig, tmp_path: Path
) -> None:
    one = checkpoint(tmp_path / "models" / "one", tensors())
    other = checkpoint(tmp_path / "mnt" / "2" / "renamed", tensors())
    link = tmp_path / "link"
    link.symlink_to(one)
    first = identify(config, one)
    moved = [identify(config, other), identify(config, link)]
    moved.append(identify(config, other, served_model_name="b", tokenizer="/t", revision="main", seed=7))

    assert first.name != moved[0].name
    assert {namespace_of(config, found) for found in moved} == {namespace_of(config, first)}
    changed = tensors()
    changed["embed"][-1] += 1
    different = identify(config, checkpoint(tmp_path / "changed", changed))
    assert namespace_of(config, different) != namespace_of(config, first)


@pytest.mark.parametrize("change", [{"model": "/mnt/other"}, {"revision": "w2"}])
def test_of_weights_that_are_not_read_name_and_revision_count(
    config: VllmConfig, change: dict[str, str]
) -> None:
    config.load_config.load_format = "tensorizer"
    config.model_config.model, config.model_config.revision = "/mnt/model", "w1"
    first = make_model_identity(config, outlives_engine=True)
    for name, value in change.items():
        object.__setattr__(config.model_config, name, value)
    second = make_model_identity(config, outlives_engine=True)

    assert (first.weights, first.revision) == ("", "w1")
    assert namespace_of(config, first) != namespace_of(config, second)


def test_a_model_in_a_bucket_is_called_by_its_url_without_credentials(config: VllmConfig) -> None:
    config.model_config.model, config.model_config.revision = "/root/.cache/pulled/3f2a", "w1"
    object.__setattr__(config.model_config, "model_weights", "s3://KEY:SECRET@bucket/model")

    assert make_model_identity(config, outlives_engine=True).name == "s3://bucket/model"
    config.model_config.revision = None
    with pytest.raises(ConfigError) as refusal:
        make_model_identity(config, outlives_engine=True)
    assert "SECRET" not in str(refusal.value)


def test_both_halves_read_one_configuration_and_only_the_schedulers_reads_files(
    config: VllmConfig, tmp_path: Path
) -> None:
    config.model_config.model = str(checkpoint(tmp_path / "model", tensors()))
    caches = cache_config(group(full(), "layer.0"))
    scheduler, worker = (
        make_offloading_config(config, caches, role).model
        for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    )

    assert scheduler == replace(worker, weights=scheduler.weights)
    assert worker.weights != scheduler.weights


def test_weights_loaded_in_place_have_the_name_of_an_engine_that_started_with_them(
    config: VllmConfig, tmp_path: Path
) -> None:
    changed = tensors()
    changed["embed"][-1] += 1
    places = [
        checkpoint(tmp_path / name, weights)
        for name, weights in (("first", tensors()), ("copy", tensors()), ("trained", changed))
    ]
    config.model_config.model = str(places[0])
    started = make_model_identity(config)
    namer = LoadedWeightsNamer(config, started)

    def load(place: Path) -> ModelIdentity | None:
        """Load the weights of a folder in place."""
        namer.before_load(str(place))
        return namer.name(Weights(Origin.FILES, str(place)), NoWorkers())

    assert load(places[1]) == started
    trained = load(places[2])
    assert trained is not None
    assert namespace_of(config, trained) == namespace_of(config, identify(config, places[2]))
    assert namespace_of(config, trained) != namespace_of(config, started)


class NoWorkers:
    """Stands for workers that cannot see their weights."""

    def collective_rpc(self, method: object) -> list[str]:
        """Return no digest."""
        del method
        return [""]


def test_one_file_of_weights_is_a_model_too(config: VllmConfig, tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"0" * 9999 + b"1")
    other.write_bytes(b"0" * 9999 + b"2")

    assert weights_name(config, one).startswith("blake3-of-every-byte:")
    assert weights_name(config, one) != weights_name(config, other)
    renamed = tmp_path / "moved" / "renamed.gguf"
    renamed.parent.mkdir()
    renamed.write_bytes(one.read_bytes())
    assert weights_name(config, renamed) == weights_name(config, one)


def test_a_background_job_that_has_begun_earlier_gives_the_same_name(
    config: VllmConfig, tmp_path: Path
) -> None:
    config.model_config.model = str(checkpoint(tmp_path / "model", tensors()))
    alone = make_model_identity(config)
    start_fingerprints(config)

    assert make_model_identity(config) == alone


def test_weights_that_change_between_reading_and_use_end_the_start(
    config: VllmConfig, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", tensors())
    config.model_config.model = str(folder)
    identity._running.start(config, folder, "model").wait()
    os.utime(folder / "model-00001-of-00002.safetensors", ns=(1, 1))

    with pytest.raises(FingerprintError, match=r"00002\.safetensors: it changed"):
        make_model_identity(config)
    assert make_model_identity(config).weights == weights_name(config, folder)


def test_weights_that_cannot_be_read_end_the_start(config: VllmConfig, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", tensors())
    (folder / "model-00003.safetensors").symlink_to(tmp_path / "gone")

    with pytest.raises(FingerprintError, match=r"model-00003.safetensors: No such file .*make it readable"):
        weights_name(config, folder)


def test_random_weights_are_named_by_their_seed(vllm_config: VllmConfig) -> None:
    first, second = with_kvtier(vllm_config), with_kvtier(vllm_config)
    second.model_config.seed = first.model_config.seed + 1

    assert make_model_identity(first).weights == f"random-weights-of-seed:{first.model_config.seed}"
    assert make_model_identity(second).weights != make_model_identity(first).weights


def test_a_model_of_a_hub_is_named_by_its_commit_then_by_what_the_user_says(config: VllmConfig) -> None:
    config.model_config.model = "someone/model"
    config.model_config.revision = "v2"
    by_user = make_model_identity(config).revision
    config.model_config.hf_config._commit_hash = "8cde5ca8"

    assert by_user == "v2"
    assert make_model_identity(config).revision == "8cde5ca8"


def test_weights_that_nothing_identifies_are_the_engines_own(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config.model_config.model = "s3://bucket/model"
    config.kv_transfer_config.engine_id = "engine-7"

    assert make_model_identity(config).revision == "unidentified-weights-of-engine:engine-7"
    assert "give --revision" in caplog.text


@pytest.mark.parametrize("load_format", ["tensorizer", "npcache", "modelexpress", "mine"])
def test_weights_from_elsewhere_are_refused_where_blocks_last(
    config: VllmConfig, tmp_path: Path, load_format: str
) -> None:
    config.model_config.model = str(checkpoint(tmp_path / "model", tensors()))
    config.load_config.load_format = load_format

    with pytest.raises(ConfigError, match=rf"{load_format}.*--revision.*secondary_tiers"):
        make_model_identity(config, outlives_engine=True)
    config.model_config.revision = "mine-of-november"
    assert make_model_identity(config, outlives_engine=True).revision == "mine-of-november"


def test_weights_in_a_bucket_are_not_named_by_the_folder_of_their_configuration(
    config: VllmConfig, tmp_path: Path
) -> None:
    config.model_config.model = str(checkpoint(tmp_path / "pulled", tensors()))
    object.__setattr__(config.model_config, "model_weights", "s3://bucket/model")

    with pytest.raises(ConfigError, match="cannot be read"):
        make_model_identity(config, outlives_engine=True)


def test_a_branch_is_no_name_that_lasts_and_a_commit_is(config: VllmConfig) -> None:
    config.model_config.model = "someone/model"
    config.model_config.revision = "main"
    with pytest.raises(ConfigError, match="main is not a commit"):
        make_model_identity(config, outlives_engine=True)

    config.model_config.revision = "8cde5ca8" * 5
    assert make_model_identity(config, outlives_engine=True).revision == "8cde5ca8" * 5


def test_code_of_another_repository_is_refused_until_its_commit_is_given(
    config: VllmConfig, tmp_path: Path
) -> None:
    config.model_config.model = str(checkpoint(tmp_path / "model", tensors()))
    config.model_config.trust_remote_code = True
    config.model_config.hf_config.auto_map = {"AutoModelForCausalLM": "someone/code--modeling.Model"}
    with pytest.raises(ConfigError, match="someone/code"):
        make_model_identity(config, outlives_engine=True)

    config.model_config.code_revision = "8cde5ca8" * 5
    assert make_model_identity(config, outlives_engine=True).weights.startswith("blake3-of-every-byte:")


def test_a_model_in_the_cache_of_a_hub_is_named_by_its_bytes(config: VllmConfig, tmp_path: Path) -> None:
    commit = "8cde5ca8" * 5
    repository = tmp_path / "models--someone--model"
    folder = checkpoint(repository / "snapshots" / commit, tensors())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    config.model_config.model = "someone/model"
    config.model_config.hf_config._commit_hash = commit
    config.load_config.download_dir = str(tmp_path)

    assert make_model_identity(config, outlives_engine=True).weights == weights_name(config, folder)


def test_weights_that_changed_after_the_engines_process_began_may_not_be_what_was_loaded(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.model_config.model = str(checkpoint(tmp_path / "model", tensors()))
    assert make_model_identity(config, outlives_engine=True).weights

    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore_DP0")
    with pytest.raises(
        FingerprintError, match=r"safetensors: it changed after the engine .*start the engine again"
    ):
        make_model_identity(config, outlives_engine=True)


def test_a_process_began_before_now_and_after_the_machine() -> None:
    began_ns = process_start_ns()

    assert time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) < began_ns <= time.time_ns()


@dataclass
class DraftConfig:
    """What is read of a speculative configuration."""

    draft_model_config: ModelConfig
    method: str = "draft_model"


def test_another_drafting_model_is_another_identity(vllm_config: VllmConfig) -> None:
    config = with_kvtier(vllm_config)
    alone = make_model_identity(config)
    drafts = []
    for seed in (1, 2):
        draft = copy.deepcopy(config.model_config)
        draft.seed = seed
        object.__setattr__(config, "speculative_config", DraftConfig(draft))
        drafts.append(make_model_identity(config))

    assert len({identity.weights for identity in (alone, *drafts)}) == 3
    assert drafts[0].config_digest != alone.config_digest


def test_the_configuration_is_there_in_words_and_its_digest_is_made_from_them(
    vllm_config: VllmConfig,
) -> None:
    found = make_model_identity(with_kvtier(vllm_config))
    words = json.loads(found.config_json)["model_config.hf_config"]
    assert hashlib.sha256(found.config_json.encode()).hexdigest() == found.config_digest
    assert words["hidden_size"] == TINY_LLAMA["hidden_size"]
    assert "rope_parameters" in words


def test_a_changed_drafting_model_is_another_identity(config: VllmConfig, tmp_path: Path) -> None:
    changed = tensors()
    changed["embed"][-1] += 1
    config.model_config.model = str(checkpoint(tmp_path / "model", tensors()))
    found = set()
    for name, weights in (("one", tensors()), ("other", changed)):
        draft = copy.deepcopy(config.model_config)
        draft.model = "draft"
        place = checkpoint(tmp_path / name / "draft", weights)
        draft.model = str(place)
        object.__setattr__(config, "speculative_config", DraftConfig(draft))
        found.add(make_model_identity(config).weights)

    assert len(found) == 2


def test_another_attention_backend_is_another_identity(vllm_config: VllmConfig) -> None:
    config = with_kvtier(vllm_config)
    found = [make_model_identity(config)]
    config.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
    found.append(make_model_identity(config))
    config.attention_config.backend_per_kind = {"sliding_window": AttentionBackendEnum.FLASH_ATTN}
    found.append(make_model_identity(config))

    assert len({identity.config_digest for identity in found}) == 3
    words = json.loads(found[2].config_json)
    assert "triton_attn" in str(words["attention_config.backend"])
    assert "flash_attn" in str(words["attention_config.backend_per_kind"])
