"""Two replicas of one server, each with host memory of its own, find each other's blocks in the fs tier they share."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.prompts import WHOLE_TOKENS, make_prompt
from tests.e2e.vllm.server_process import ServerProcess
from tests.e2e.vllm.settings import settings_with
from tests.ports import free_port


def test_what_one_replica_has_computed_the_other_loads_from_the_shared_folder(
    llama: str, tmp_path: Path
) -> None:
    settings = settings_with(tmp_path / "blocks", instance_id="replicas")
    more = ("--data-parallel-size", "2")
    endpoint = f"tcp://127.0.0.1:{free_port()}"  # each replica adds its rank to the port
    with ServerProcess(llama, settings, endpoint, tmp_path / "server.log", more) as server:
        prompts = [make_prompt(seed) for seed in (300, 301)]
        computed = [server.ask(prompt, replica=rank) for rank, prompt in enumerate(prompts)]
        server.wait_for_blocks(tmp_path / "blocks", 2 * 31)
        found = [server.ask(prompt, replica=1 - rank) for rank, prompt in enumerate(prompts)]
        on_device = [server.ask(prompt, replica=1 - rank) for rank, prompt in enumerate(prompts)]

    assert [answer.num_cached_tokens for answer in computed] == [0, 0]
    assert [answer.num_cached_tokens for answer in found] == [WHOLE_TOKENS] * 2
    assert [answer.tokens for answer in found] == [answer.tokens for answer in computed]
    assert [answer.tokens for answer in on_device] == [answer.tokens for answer in computed]
