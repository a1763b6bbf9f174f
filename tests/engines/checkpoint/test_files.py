"""Everything in a checkpoint counts but what is known to change no block."""

import os
from pathlib import Path

import pytest

pytest.importorskip("blake3", reason="needs BLAKE3: pip install 'kvtier[vllm]'")

from kvtier.engines.checkpoint import find_files, has_weights, require_unchanged
from kvtier.errors import FingerprintError


def write(folder: Path, *names: str) -> Path:
    """Write files of one byte."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1")
    return folder


def names_in(place: Path) -> list[str]:
    """Return the names of the files that count."""
    return [file.name for file in find_files(place)]


COUNTED = [
    "adapter_config.json", "consolidated.00.pth", "hf_quant_config.json", "model.safetensors",
    "model.safetensors.index.json", "modeling.py", "preprocessor_config.json", "pytorch_model.bin", "sub/layers.py",
    "tokenizer.safetensors", "unknown.format", "whisper/model.safetensors",
]  # fmt: skip

NOT_COUNTED = [
    ".gitattributes", ".cache/model.safetensors", "README.md", "LICENSE", "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json", "optimizer.pt",
    "chat_template.jinja", "checkpoint-500/model.safetensors", "original/consolidated.00.pth", "training_args.bin",
    "__pycache__/modeling.pyc",
]  # fmt: skip


def test_everything_counts_but_what_is_known_to_change_no_block(tmp_path: Path) -> None:
    assert names_in(write(tmp_path, *COUNTED, *NOT_COUNTED)) == sorted(COUNTED)


def test_a_folder_has_weights_or_has_not(tmp_path: Path) -> None:
    assert not has_weights(find_files(write(tmp_path, "modeling.py", "index.json")))
    assert has_weights(find_files(write(tmp_path, "model.gguf")))


def test_links_lead_to_the_bytes(tmp_path: Path) -> None:
    write(tmp_path / "blobs", "one")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.bin").symlink_to(tmp_path / "blobs" / "one")

    (file,) = find_files(tmp_path / "snapshot")

    assert (file.name, file.path) == ("model.bin", (tmp_path / "blobs" / "one").resolve())


@pytest.mark.parametrize("kind", ["dangling link", "pipe", "no folder"])
def test_what_cannot_be_read_is_named_with_a_remedy(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "model"
    if kind != "no folder":
        place.mkdir()
    if kind == "dangling link":
        (place / "model.bin").symlink_to(tmp_path / "gone")
    if kind == "pipe":
        os.mkfifo(place / "model.bin")

    with pytest.raises(FingerprintError, match=r"model.*: .*make it readable") as caught:
        find_files(place)
    assert caught.value.path.startswith(str(place))


@pytest.mark.parametrize("change", ["bytes", "times", "gone"])
def test_a_file_that_is_not_what_it_was_is_refused(tmp_path: Path, change: str) -> None:
    files = find_files(write(tmp_path, "model.bin"))
    require_unchanged(files)
    if change == "gone":
        (tmp_path / "model.bin").unlink()
    elif change == "bytes":
        (tmp_path / "model.bin").write_bytes(b"22")
    else:
        os.utime(tmp_path / "model.bin", ns=(1, 1))

    with pytest.raises(FingerprintError, match=r"model\.bin"):
        require_unchanged(files)
