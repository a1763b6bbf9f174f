"""``kvtier doctor --config`` says before a start what separates an engine from the blocks that its tiers hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.cli.config_checks import check_config
from kvtier.cli.main import main
from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.namespace import LAYOUT_VERSION

WAIT_S = 60.0


def settings_of(root: Path, **more: object) -> dict[str, Any]:  # Any: what a user writes as JSON
    tier = {"type": "fs", "root_dir": str(root), "capacity_bytes": "64MiB"}
    return {"cpu_bytes_to_use": "2MiB", "secondary_tiers": [tier], **more}


def run_engine(root: Path, *, seed: int = 0, dtype: str = "float32", **more: object) -> Path:
    """Store the blocks of a prompt and end the engine; return the document of its namespace."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    before = set(root.glob("*/namespace.json"))
    settings = EngineConfig(num_device_blocks=32, block_size_tokens=8, extra_config=settings_of(root, **more))
    engine = KVTierEngine(model, settings)
    engine.run(list(range(40)), 1)
    assert engine.drain(WAIT_S)
    engine.shutdown()
    (document,) = set(root.glob("*/namespace.json")) - before
    return document


def doctor(settings: dict[str, Any], engine: Path | None = None) -> list[tuple[str, str]]:
    """Return what is said of the blocks that the tier holds: the result and the text."""
    checks = check_config(settings, engine)
    return [
        (one.result.value, one.found)
        for one in checks
        if one.subject == "tier 0 (fs)" and "namespace" in one.found
    ]


def test_the_same_engine_is_equal_and_another_one_is_told_by_its_fields(tmp_path: Path) -> None:
    own = run_engine(tmp_path / "own")
    settings = settings_of(tmp_path / "own")
    ((result, text),) = doctor(settings, own)
    assert (result, text) == ("ok", f"namespace {own.parent.name[:8]} is equal in all fields")

    half = run_engine(tmp_path / "half", dtype="float16")
    ((result, text),) = doctor(settings, half)
    assert result == "note"
    assert f"the nearest namespace, {own.parent.name[:8]}, differs in " in text
    assert "model.dtype float32 (here float16)" in text.replace("torch.", "")


def test_the_nearest_of_several_is_the_one_that_differs_least(tmp_path: Path) -> None:
    near, _ = run_engine(tmp_path / "kv"), run_engine(tmp_path / "kv", seed=1, dtype="float16")
    run_engine(tmp_path / "kv", seed=1, dtype="float16", tenant_salt="another")
    other = run_engine(tmp_path / "other", tenant_salt="mine")
    ((_, text),) = doctor(settings_of(tmp_path / "kv"), other)
    assert near.parent.name[:8] in text
    assert "differs in tenant" in text


def test_the_settings_alone_tell_of_the_tenant_and_the_size_of_blocks(tmp_path: Path) -> None:
    run_engine(tmp_path)
    ((result, text),) = doctor(settings_of(tmp_path))
    assert result == "ok"
    assert "is equal in all of what is known before a start (epoch, layout, tenant)" in text
    ((result, text),) = doctor(settings_of(tmp_path, tenant_salt="mine"))
    assert result == "note"
    assert "none of its blocks will be found" in text
    assert "differs in tenant" in text
    assert "mine" not in text
    ((_, text),) = doctor(settings_of(tmp_path, block_size=16))
    assert "differs in block_size 8 (here 16)" in text


def test_blocks_of_an_older_layout_are_counted_and_not_compared(tmp_path: Path) -> None:
    path = run_engine(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout_version": LAYOUT_VERSION - 1}))
    ((result, text),) = doctor(settings_of(tmp_path))
    assert result == "note"
    assert text == (
        f"1 namespace is of an older layout and not readable: kvtier purge {tmp_path} --older-layouts"
    )


def test_a_directory_without_blocks_says_nothing_of_them(tmp_path: Path) -> None:
    assert not doctor(settings_of(tmp_path / "new"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "must be the namespace.json"),
        ("[]", "must be the namespace.json"),
        ('{"layout_version": 1}', "of layout 1"),
    ],
)
def test_what_is_no_document_of_this_layout_is_refused(
    tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine.json").write_text(content)
    (tmp_path / "config.json").write_text(json.dumps(settings_of(tmp_path / "kv")))
    files = ["--config", str(tmp_path / "config.json"), "--engine", str(tmp_path / "engine.json")]
    assert main(["doctor", *files]) == 2
    assert words in capsys.readouterr().err
    assert main(["doctor", *files, "--vllm", "MODEL"]) == 2
    assert main(["doctor", *files[2:]]) == 2
