"""Keys of a request with an adapter depend on the adapter's weights, whatever its name."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import save_file

from kvtier.engines.vllm.scheduler_hooks import CONFIG_NAME, NO_SALT, AdapterSalts


def save_adapter(folder: Path, value: float, scaling: int = 16) -> Path:
    """Write an adapter whose weights are all ``value``."""
    folder.mkdir(exist_ok=True)
    save_file({"lora_A": torch.full((4, 8), value)}, folder / "adapter_model.safetensors")
    (folder / CONFIG_NAME).write_text(f'{{"lora_alpha": {scaling}}}')
    return folder


def request_with(path: Path | None) -> Any:  # noqa: ANN401  # stands for vLLM's Request, of which one attribute is read
    """Return a request with the adapter in ``path``."""
    adapter = None if path is None else SimpleNamespace(lora_path=str(path))
    return SimpleNamespace(lora_request=adapter)


def test_a_request_without_an_adapter_has_no_salt() -> None:
    assert AdapterSalts().salt_of(request_with(None)) == NO_SALT


def test_equal_weights_have_one_salt_wherever_they_lie(tmp_path: Path) -> None:
    one, other = save_adapter(tmp_path / "one", 1.0), save_adapter(tmp_path / "other", 1.0)

    assert AdapterSalts().salt_of(request_with(one)) == AdapterSalts().salt_of(request_with(other))


def test_other_weights_and_other_scaling_have_other_salts(tmp_path: Path) -> None:
    salts = AdapterSalts()
    folders = [
        save_adapter(tmp_path / "a", 1.0),
        save_adapter(tmp_path / "b", 2.0),
        save_adapter(tmp_path / "c", 1.0, scaling=32),
    ]

    assert len({salts.salt_of(request_with(folder)) for folder in folders} - {NO_SALT, None}) == 3


def test_an_adapter_whose_files_change_is_given_up_until_the_next_start(tmp_path: Path) -> None:
    salts = AdapterSalts()
    folder = save_adapter(tmp_path / "a", 1.0)
    before = salts.salt_of(request_with(folder))

    save_adapter(folder, 2.0)
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    while_running = salts.salt_of(request_with(folder))
    save_adapter(folder, 1.0)

    assert before is not None
    assert while_running is None
    assert salts.salt_of(request_with(folder)) is None
    assert AdapterSalts().salt_of(request_with(folder)) == before


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_an_adapter_without_readable_weights_is_not_offloaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    assert AdapterSalts().salt_of(request_with(tmp_path / name)) is None
