"""Each prompt token of a real vLLM has one origin or one cause, and the origins are those that vLLM counts."""

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import make_prompt

from kvtier.misses import MissCause
from kvtier.observe.why import explain_records
from kvtier.sim.formats.kvtier import read_records

ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}
NUM_DEVICE_BLOCKS = 80
NUM_ROUNDS = 10


def test_origins_and_causes_of_two_hundred_requests_sum_to_their_prompts(llama: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tier = {"type": "fs", "root_dir": str(tmp_path / "blocks"), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": "8MiB", "secondary_tiers": [tier], "record_trace": str(path)}
    # Twenty prompts of many lengths, some of whole blocks, come again and again; they fit neither device nor host.
    prompts = [make_prompt(seed, 100 + 7 * seed + 16 * (seed % 3)) for seed in range(20)]
    prompts[3] = prompts[3][: 4 * BLOCK_TOKENS]
    prompts[4] = prompts[4][: BLOCK_TOKENS - 1]
    answers = []
    with EngineProcess(EngineOptions(llama, settings, num_device_blocks=NUM_DEVICE_BLOCKS)) as engine:
        for turn in range(NUM_ROUNDS):
            call = "generate" if turn % 2 else "generate_in_turn"
            answers += engine.call(call, prompts, ONE_TOKEN)
        stats = engine.call("stats")

    records = list(read_records(path))
    assert len(records) == len(answers) == NUM_ROUNDS * len(prompts)
    for record in records:
        record.check()
    cached = Counter(sum(record.tokens_by_origin.values()) for record in records)
    # vLLM counts a prompt that was loaded whole with its last token, which it computes again.
    lengths = [len(prompt) for _ in range(NUM_ROUNDS) for prompt in prompts]
    pairs = zip(answers, lengths, strict=True)
    assert cached == Counter(min(answer.num_cached_tokens, length - 1) for answer, length in pairs)
    report = explain_records(records)
    assert sum(report.tokens_by_origin.values()) + report.num_missed_tokens == report.num_prompt_tokens
    assert report.num_prompt_tokens == NUM_ROUNDS * sum(map(len, prompts))
    assert {"device", "host", "fs"} & set(report.tokens_by_origin)
    missed = {row.cause for row in report.causes}
    assert {MissCause.NEVER_SEEN, MissCause.PARTIAL_BLOCK} <= missed
    assert stats["connector.recorded_requests"] == len(answers)


def test_a_request_with_prompt_logprobs_is_named(llama: str, tmp_path: Path) -> None:
    settings = {"cpu_bytes_to_use": "64MiB", "record_trace": str(tmp_path / "trace.jsonl")}
    with EngineProcess(EngineOptions(llama, settings, num_device_blocks=200)) as engine:
        engine.call("generate", [make_prompt(1)], ONE_TOKEN)
        engine.call("generate", [make_prompt(1)], {**ONE_TOKEN, "prompt_logprobs": 1})
        stats = engine.call("stats")

    assert stats["connector.recorded_requests"] == 2
    assert stats["connector.missed_tokens.limited"] == len(make_prompt(1))
