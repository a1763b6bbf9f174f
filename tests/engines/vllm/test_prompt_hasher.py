"""Operators name a prompt of vLLM as vLLM does: with its cache salt and its adapter."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.engines.vllm.configs import BLOCK_TOKENS
from tests.engines.vllm.test_scheduler_hooks import save_adapter
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.engines.vllm.scheduler_hooks import AdapterSalts, VLLMPromptHasher
from kvtier.errors import ControlError
from kvtier.observe.control_commands import PromptExtras
from kvtier.tenants import salt_hash

PROMPT = list(range(3 * BLOCK_TOKENS + 5))


def own_hashes(
    config: VllmConfig, token_ids: Sequence[int], salt: str | None = None, adapter: LoRARequest | None = None
) -> list[bytes]:
    """Return what vLLM itself makes of a request."""
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    request = Request(
        request_id="a",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        cache_salt=salt,
        lora_request=adapter,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, hash_function),
    )
    return [bytes(block_hash) for block_hash in request.block_hashes]


@pytest.fixture(autouse=True)
def _seed(vllm_config: VllmConfig) -> None:
    init_none_hash(get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo))


@pytest.fixture
def adapters() -> AdapterSalts:
    return AdapterSalts()


@pytest.fixture
def hasher(vllm_config: VllmConfig, adapters: AdapterSalts) -> VLLMPromptHasher:
    return VLLMPromptHasher(vllm_config, BLOCK_TOKENS, adapters)


@pytest.mark.parametrize("salt", ["", "alice's"])
def test_a_prompt_has_the_hashes_of_a_request_with_its_salt(
    hasher: VLLMPromptHasher, vllm_config: VllmConfig, salt: str
) -> None:
    found = hasher(PROMPT, PromptExtras(cache_salt=salt))
    assert found == own_hashes(vllm_config, PROMPT, salt or None)
    assert len(found) == 3
    assert (found == hasher(PROMPT)) == (salt == "")


@pytest.mark.parametrize("salt", ["", "alice's"])
def test_a_prompt_of_an_adapter_has_the_hashes_of_its_weights(
    hasher: VLLMPromptHasher, adapters: AdapterSalts, vllm_config: VllmConfig, tmp_path: Path, salt: str
) -> None:
    folder = save_adapter(tmp_path / "one", 1.0)
    lora = LoRARequest("polite", 1, str(folder))
    extras = PromptExtras(cache_salt=salt, adapter="polite")
    with pytest.raises(
        ControlError, match="adapter='polite': no request has used it since the engine's start"
    ):
        hasher(PROMPT, extras)
    request = Request("a", PROMPT, SamplingParams(max_tokens=4), None, lora_request=lora)
    key_salt = adapters.salt_of(request)
    assert key_salt
    own = own_hashes(vllm_config, PROMPT, salt or None, lora)
    assert hasher(PROMPT, extras) == [salt_hash(block_hash, key_salt) for block_hash in own]
    (folder / "adapter_model.safetensors").write_bytes(b"other weights")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    assert adapters.salt_of(request) is None
    with pytest.raises(ControlError, match="or its files cannot be read"):
        hasher(PROMPT, extras)
