"""Keys of a request with an adapter depend on the adapter's weights, whatever its name."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import save_file

from kvtier.engines.checkpoint import FingerprintJob
from kvtier.engines.vllm.scheduler_hooks import DEADLINE_S, NO_SALT, AdapterSalts


def save_adapter(folder: Path, value: float, scaling: int = 16) -> Path:
    """Write an adapter whose weights are all ``value``."""
    folder.mkdir(exist_ok=True)
    save_file({"lora_A": torch.full((4, 8), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {scaling}}}')
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


@pytest.mark.parametrize(
    "file_name", ["adapter_model.safetensors", "adapter_model.bin", "new_embeddings.safetensors"]
)
def test_the_last_byte_of_each_file_counts(tmp_path: Path, file_name: str) -> None:
    salts = []
    for name, last in (("one", b"1"), ("other", b"2")):
        folder = save_adapter(tmp_path / name, 1.0)
        (folder / file_name).write_bytes(b"0" * 9999 + last)
        os.utime(folder / file_name, ns=(1, 1))
        salts.append(AdapterSalts().salt_of(request_with(folder)))

    assert len(set(salts) - {NO_SALT, None}) == 2


def test_an_adapter_in_another_layout_has_another_salt(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", 1.0)
    fused = request_with(folder)
    fused.lora_request.is_3d_lora_weight = True

    assert AdapterSalts().salt_of(fused) != AdapterSalts().salt_of(request_with(folder))


def test_an_adapter_that_vllm_loads_from_elsewhere_is_not_offloaded(tmp_path: Path) -> None:
    request = request_with(save_adapter(tmp_path / "a", 1.0))
    request.lora_request.tensorizer_config_dict = {"tensorizer_dir": "s3://bucket"}

    assert AdapterSalts().salt_of(request) is None


def test_an_adapter_that_changed_after_the_engine_started_is_not_offloaded(tmp_path: Path) -> None:
    request = request_with(save_adapter(tmp_path / "a", 1.0))
    newest_ns = max(path.stat().st_ctime_ns for path in (tmp_path / "a").iterdir())

    assert AdapterSalts(newest_ns).salt_of(request) is not None
    assert AdapterSalts(newest_ns - 1).salt_of(request) is None


class HungJob(FingerprintJob):
    """Never ends to read."""

    def __init__(self, place: Path, label: str) -> None:
        pass

    @property
    def is_done(self) -> bool:
        return False


def test_a_request_waits_for_its_adapter_until_the_deadline_and_goes_on_without_kvtier(
    tmp_path: Path,
) -> None:
    now_s = 0.0
    salts = AdapterSalts(clock_s=lambda: now_s, read=HungJob)
    request = request_with(tmp_path)
    early = salts.is_ready(request)
    now_s = DEADLINE_S + 1

    assert not early
    assert salts.is_ready(request)
    assert salts.salt_of(request) is None


def test_a_request_without_an_adapter_waits_for_none() -> None:
    assert AdapterSalts().is_ready(request_with(None))


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
