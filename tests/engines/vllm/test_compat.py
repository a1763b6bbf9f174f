"""What differs between vLLM's releases, in the installed one."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.engines.vllm.configs import BLOCK_TOKENS, cache_config, full, group, window
from vllm.config import VllmConfig

from kvtier.engines.vllm import compat
from kvtier.namespace import RANDOM_SEED


def test_a_release_is_its_major_and_minor_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.1.dev7+g123")

    assert compat.release() == "0.32"


def test_one_content_hash_covers_a_block_of_the_only_group(vllm_config: VllmConfig) -> None:
    assert compat.hash_block_size(vllm_config, cache_config(group(full(), "a"))) == BLOCK_TOKENS


def test_one_content_hash_covers_the_smallest_block_of_several_groups(vllm_config: VllmConfig) -> None:
    config = cache_config(group(full(block_size=32), "a"), group(window(), "b"), tensors=[])

    assert compat.hash_block_size(vllm_config, config) == 16


@pytest.mark.parametrize("word", ["0", "random"])
def test_a_seed_from_the_environment_is_fixed_whatever_it_says(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", word)

    assert compat.hash_seed(vllm_config) == f"PYTHONHASHSEED={word}"
    assert compat.hash_seed(vllm_config) != RANDOM_SEED


def test_without_a_seed_in_the_environment_hashes_are_random_where_vllm_draws_one(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    has_fixed_seed = hasattr(kv_cache_utils, "resolve_none_hash_seed")

    assert (compat.hash_seed(vllm_config) == RANDOM_SEED) is not has_fixed_seed


def test_a_hash_that_is_not_cryptographic_has_a_random_seed(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xxhash", reason="the hash in question")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(vllm_config.cache_config, "prefix_caching_hash_algo", "xxhash")

    assert compat.hash_seed(vllm_config) == RANDOM_SEED


def test_sources_of_hits_keep_their_sum_under_vllms_names() -> None:
    hit_source = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="these names came with 0.32")

    named = compat.name_hit_sources({"CPU": 32, "fs": 24, "valkey": 4, "other": 2})

    source = hit_source.CacheHitSource
    assert named == {source.HOST: 32, source.DISK: 24, source.EXTERNAL_UNSPECIFIED: 6}


def test_another_instruction_set_is_another_page_format(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    config = cache_config(group(full(), "a"))
    here = compat.page_format(vllm_config, config)
    has_amx = torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not has_amx)

    assert compat.page_format(vllm_config, config) != here


def format_of(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kind: str, release: str) -> str:
    """Return the page format on a kind of device under a release."""
    monkeypatch.setattr(compat, "device_kind", lambda: kind)
    monkeypatch.setattr(vllm, "__version__", f"{release}.1")
    return compat.page_format(config, cache_config(group(full(), "a")))


@pytest.mark.parametrize("kind", compat.CONFIRMED_RELEASES)
def test_releases_that_were_compared_have_one_page_format(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    confirmed = compat.CONFIRMED_RELEASES[kind]
    formats = {format_of(vllm_config, monkeypatch, kind, release) for release in confirmed}

    assert len(confirmed) > 1
    assert len(formats) == 1
    assert "vLLM" not in formats.pop()


@pytest.mark.parametrize(
    ("kind", "release"),
    [
        ("cpu CpuArchEnum.X86 avx512", "9.9"),
        ("cpu CpuArchEnum.ARM", "0.32"),
        ("cuda 9.0", "0.32"),
    ],
)
def test_a_release_that_was_not_compared_on_a_device_names_itself(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kind: str, release: str
) -> None:
    assert format_of(vllm_config, monkeypatch, kind, release).endswith(f", {kind}, vLLM {release}")


def test_another_layout_is_another_page_format(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cache_config(group(full(), "a"))
    formats = set()

    for name in ("LBNHC", "LBHNC"):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", name)
        if hasattr(config, "kv_cache_layout"):
            config.kv_cache_layout = name
        formats.add(compat.page_format(vllm_config, config))

    assert len(formats) == 2
