"""Which weights an engine runs: two that differ anywhere that matters have different names."""

import copy
import json
import struct
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import save_file
from tests.engines.vllm.configs import TINY_LLAMA, with_kvtier
from vllm.config import ModelConfig, VllmConfig

from kvtier.engines.vllm.identity import describe_settings, fingerprint_checkpoint, make_model_identity


@pytest.fixture
def config(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration of an engine that reads its weights from a checkpoint."""
    copied = with_kvtier(vllm_config)
    copied.load_config.load_format = "auto"
    return copied


def tensors() -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, one of them longer than what is sampled."""
    return {"embed": torch.arange(4096.0).reshape(64, 64), "norm": torch.ones(64), "scale": torch.ones(())}


def checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    names = sorted(weights)
    save_file({names[0]: weights[names[0]]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[1:]}, folder / "model-00002-of-00002.safetensors")
    return folder


def revision(config: VllmConfig, folder: Path) -> str:
    """Return the revision of an engine's identity when it runs the checkpoint in ``folder``."""
    copied = copy.deepcopy(config)
    copied.model_config.model = str(folder)
    return make_model_identity(copied).revision


def test_a_copy_of_a_checkpoint_has_its_fingerprint(config: VllmConfig, tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one", tensors()), checkpoint(tmp_path / "other", tensors())

    assert revision(config, one) == revision(config, other)
    assert revision(config, one).startswith("sampled-weights:")


@pytest.mark.parametrize("name", ["embed", "norm", "scale"])
def test_a_change_of_one_value_in_the_first_row_of_any_tensor_is_seen(
    config: VllmConfig, tmp_path: Path, name: str
) -> None:
    changed = tensors()
    changed[name].view(-1)[0] += 1

    before = revision(config, checkpoint(tmp_path / "before", tensors()))
    assert revision(config, checkpoint(tmp_path / "after", changed)) != before


@pytest.mark.parametrize("change", ["name", "shape", "type", "missing"])
def test_tensors_of_another_form_are_another_checkpoint(
    config: VllmConfig, tmp_path: Path, change: str
) -> None:
    changed = tensors()
    norm = changed.pop("norm")
    if change != "missing":
        other = {"name": norm, "shape": norm.reshape(8, 8), "type": norm.view(torch.int32)}[change]
        changed["norms" if change == "name" else "norm"] = other

    before = revision(config, checkpoint(tmp_path / "before", tensors()))
    assert revision(config, checkpoint(tmp_path / "after", changed)) != before


def test_weights_in_other_formats_are_told_apart_by_size_and_time(tmp_path: Path) -> None:
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(b"1" * 10)
    first = fingerprint_checkpoint(tmp_path)
    weights.write_bytes(b"2" * 11)
    second = fingerprint_checkpoint(tmp_path)

    assert first != second
    assert fingerprint_checkpoint(weights) == second


@pytest.mark.parametrize(
    "header", [b"", b"\x05", struct.pack("<Q", 1 << 60) + b"{", struct.pack("<Q", 2) + b"[]"]
)
def test_a_damaged_checkpoint_is_named_and_left_for_vllm_to_refuse(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(header)

    assert fingerprint_checkpoint(tmp_path).startswith("sampled-weights:")


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert fingerprint_checkpoint(tmp_path) == ""


def test_random_weights_are_named_by_their_seed(vllm_config: VllmConfig) -> None:
    first, second = with_kvtier(vllm_config), with_kvtier(vllm_config)
    second.model_config.seed = first.model_config.seed + 1

    assert make_model_identity(first).revision == f"random-weights-of-seed:{first.model_config.seed}"
    assert make_model_identity(second).revision != make_model_identity(first).revision


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


class DraftConfig:
    """What is read of a speculative configuration."""

    def __init__(self, draft_model_config: ModelConfig) -> None:
        self.draft_model_config = draft_model_config


def test_another_drafting_model_is_another_identity(vllm_config: VllmConfig) -> None:
    config = with_kvtier(vllm_config)
    alone = make_model_identity(config)
    drafts = []
    for seed in (1, 2):
        draft = copy.deepcopy(config.model_config)
        draft.seed = seed
        object.__setattr__(config, "speculative_config", DraftConfig(draft))
        drafts.append(make_model_identity(config))

    assert len({identity.revision for identity in (alone, *drafts)}) == 3
    assert drafts[0].config_digest != alone.config_digest


def test_settings_that_change_nothing_do_not_count_wherever_they_stand(vllm_config: VllmConfig) -> None:
    first, second = copy.deepcopy(vllm_config.model_config), copy.deepcopy(vllm_config.model_config)
    first.hf_config.text_config = {"hidden_size": 1, "transformers_version": "5.0", "_name_or_path": "a"}
    second.hf_config.text_config = {"hidden_size": 1, "transformers_version": "5.1", "_name_or_path": "b"}
    third = copy.deepcopy(second)
    third.hf_config.text_config["hidden_size"] = 2

    assert describe_settings(first) == describe_settings(second)
    assert describe_settings(third) != describe_settings(second)


@pytest.mark.parametrize(("rope_type", "is_different"), [("longrope", True), ("linear", False)])
def test_the_longest_request_counts_where_it_decides_how_keys_are_rotated(
    vllm_config: VllmConfig, rope_type: str, is_different: bool
) -> None:
    short = copy.deepcopy(vllm_config.model_config)
    short.hf_config.rope_parameters = {"rope_type": rope_type, "factor": 2.0}
    long = copy.deepcopy(short)
    long.max_model_len = 2 * short.max_model_len

    assert (describe_settings(short) != describe_settings(long)) is is_different
