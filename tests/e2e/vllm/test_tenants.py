"""Under a real vLLM two tenants who send the same prompts find only what they have stored themselves."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle

PROMPTS = make_cycle(2)


def sampling_of(tenant: str) -> dict[str, object]:
    return {**GREEDY, "extra_args": {"kv_transfer_params": {"tenant": tenant}}}


def test_neither_of_two_tenants_finds_the_others_blocks(llama: str) -> None:
    settings = {"cpu_bytes_to_use": "512MiB", "tenants": {"alice": {}, "bob": {}}}
    found: dict[str, list[int]] = {}
    texts = []
    with EngineProcess(EngineOptions(llama, settings)) as engine:
        for name in ("alice", "bob", "mallory", "alice", "bob", "mallory"):
            # vLLM's own prefix cache is vLLM's business: its cache_salt separates tenants there.
            assert engine.call("forget_device")
            answers = engine.call("generate_in_turn", PROMPTS, sampling_of(name))
            texts.append([answer.tokens for answer in answers])
            found.setdefault(name, []).extend(answer.num_cached_tokens for answer in answers)
            engine.call("settle")
        stats = engine.call("stats")

    known = [0, 0, WHOLE_TOKENS, WHOLE_TOKENS]
    assert found == {"alice": known, "bob": known, "mallory": [0] * 4}
    assert stats["connector.unknown_tenant_requests"] == 4
    assert all(one == texts[0] for one in texts)
