"""Before a start, vLLM's arguments tell of the model and of the sizes what the engine's blocks will be named by."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.engines.vllm.configs import TINY_LLAMA

from kvtier.cli.config_checks import check_config
from kvtier.engines.vllm.before_start import identify
from kvtier.errors import ConfigError
from kvtier.namespace import LAYOUT_VERSION, tag_tenant

ARGUMENTS = ("--skip-tokenizer-init", "--load-format", "dummy", "--max-model-len", "256")


def arguments_of(folder: Path, *more: str, dtype: str = "float32") -> str:
    return " ".join((str(folder), *ARGUMENTS, "--dtype", dtype, *more))


def settings_of(root: Path) -> dict[str, object]:
    tier = {"type": "fs", "root_dir": str(root), "capacity_bytes": "64MiB"}
    return {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}


def leave_document(root: Path, folder: Path, more: Sequence[str] = (), **fields: object) -> None:
    """Leave what an engine with these arguments leaves: its identity, with the layers' part."""
    known = identify(arguments_of(folder, *more), settings_of(root))
    layers = {"groups": [], "row_stride_bytes": 4096, "kv_layout": "NHD"}
    place = root / f"{len(list(root.glob('*'))):032x}"
    place.mkdir(parents=True)
    document = {
        "layout_version": LAYOUT_VERSION,
        "tenant": tag_tenant(""),
        "epoch": "",
        **layers,
        **known,
        **fields,
    }
    (place / "namespace.json").write_text(json.dumps(document))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("offline")
def test_the_nearest_namespace_and_the_fields_that_separate_an_engine_from_it_are_named(
    tmp_path: Path, model_folder: Path
) -> None:
    root, other = tmp_path / "kv", tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(TINY_LLAMA | {"rope_theta": 1234.5, "rms_norm_eps": 0.25}))
    leave_document(root, other)
    leave_document(root, model_folder)
    settings = settings_of(root)

    def found(arguments: str) -> tuple[str, str]:
        checks = check_config(settings, vllm=arguments)
        (one,) = (each for each in checks if "is equal in" in each.found or "differs in" in each.found)
        return one.result.value, one.found

    result, text = found(arguments_of(model_folder))
    assert result == "ok", text
    assert f"namespace {'0' * 8} is equal in all of what is known before a start" in text
    result, text = found(arguments_of(model_folder, dtype="bfloat16"))
    assert result == "note"
    assert "model.dtype torch.float32 (here torch.bfloat16)" in text


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("arguments", ["", "--no-such-option 1", "/no/such/model --dtype float32", "'"])
def test_arguments_that_vllm_refuses_are_refused_in_a_line(arguments: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--vllm") as caught:
        identify(arguments, settings_of(tmp_path))
    assert "\n" not in str(caught.value)
