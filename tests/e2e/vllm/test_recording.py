"""What a real vLLM is asked is recorded: by its connector, and from the events that it publishes."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.cli.record.publisher import free_endpoint
from tests.e2e.vllm.answers import Answer
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, CHUNK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, PROMPT_TOKENS, WHOLE_TOKENS, make_prompt

from kvtier.sim.formats.kvtier import read_end
from kvtier.sim.formats.registry import detect_format, read_trace
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.simulate import simulate
from kvtier.sim.trace import make_trace

NUM_BLOCKS = WHOLE_TOKENS // BLOCK_TOKENS
NUM_SHARED_BLOCKS = 10
NUM_SHARED_TOKENS = NUM_SHARED_BLOCKS * BLOCK_TOKENS

BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS
"""Four layers, keys and values, two heads of 64 float32 numbers."""

PAUSE_S = 60.0
GUARD_S = 120.0
"""Guard against a hang; the recording takes some seconds to start."""

POLL_S = 0.05


def prompts() -> list[list[int]]:
    """Return a prompt, another that begins like it, the first again, and a short one."""
    first, second = make_prompt(1), make_prompt(2)
    return [first, first[:NUM_SHARED_TOKENS] + second[NUM_SHARED_TOKENS:], first, make_prompt(3, 20)]


def test_the_recorded_trace_has_each_request_its_lengths_and_its_shared_blocks(
    llama: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    settings = {"cpu_bytes_to_use": "256MiB", "record_trace": str(path)}
    with EngineProcess(EngineOptions(llama, settings, num_device_blocks=200)) as engine:
        answers = engine.call("generate_in_turn", prompts(), GREEDY)
        together = engine.call("generate", [make_prompt(seed) for seed in range(10, 14)], GREEDY)

    trace = read_trace(path)

    end = read_end(path)
    assert end is not None
    assert (end.num_requests, end.num_dropped) == (len(answers) + len(together), 0)
    assert trace.block_tokens == BLOCK_TOKENS
    assert [one.num_prompt_tokens for one in trace.requests] == [PROMPT_TOKENS] * 3 + [20] + [
        PROMPT_TOKENS
    ] * 4
    assert {one.num_output_tokens for one in trace.requests} == {GREEDY["max_tokens"]}
    first, second, again, short, *others = (one.hash_ids for one in trace.requests)
    assert len(first) == NUM_BLOCKS
    assert again == first
    assert second[:NUM_SHARED_BLOCKS] == first[:NUM_SHARED_BLOCKS]
    assert not set(second[NUM_SHARED_BLOCKS:]) & set(first)
    assert short == ()
    assert len({one for ids in others for one in ids}) == 4 * NUM_BLOCKS


def test_the_simulator_finds_in_the_recorded_trace_the_hits_that_vllm_had(llama: str, tmp_path: Path) -> None:
    # The pool holds two prompts and a quarter. Answers of one token leave no block of their own.
    path, num_device_blocks, num_slots = tmp_path / "trace.jsonl", 72, 80
    settings = {"cpu_bytes_to_use": num_slots * BLOCK_BYTES, "record_trace": str(path)}
    order = (1, 2, 1, 3, 1, 2, 4, 3, 3, 1, 2, 2)
    turns = [
        make_prompt(seed, 992 if number % 3 == 2 else PROMPT_TOKENS) for number, seed in enumerate(order)
    ]
    answers: list[Answer] = []
    # vLLM keeps one block of its pool for itself.
    with EngineProcess(EngineOptions(llama, settings, num_device_blocks=num_device_blocks + 1)) as engine:
        for turn in turns:
            answers += engine.call("generate", [turn], {"temperature": 0.0, "max_tokens": 1})
            engine.call("settle")
    recorded = read_trace(path)
    apart = [replace(one, arrival_s=PAUSE_S * number) for number, one in enumerate(recorded.requests)]
    speed = LinkSpeed(1e12, 1e12)
    model = EngineModel(BLOCK_TOKENS, BLOCK_BYTES, num_device_blocks, max_step_tokens=CHUNK_TOKENS)

    found = simulate(
        make_trace(apart, BLOCK_TOKENS), model, HostModel(num_slots, speed=speed), period_s=PAUSE_S
    )

    predicted = [sum(period.hit_tokens.values()) for period in found.periods]
    assert predicted == [answer.num_cached_tokens for answer in answers]
    assert min(found.total.hit_tokens[source] for source in ("host", "device")) >= NUM_SHARED_TOKENS


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_events_that_vllm_publishes_become_a_log_without_tokens(llama: str, tmp_path: Path) -> None:
    path, endpoint = tmp_path / "events.jsonl", free_endpoint()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    options = EngineOptions(llama, None, 200, engine_arguments={"kv_events_config": events})
    command = [
        sys.executable,
        "-m",
        "kvtier.cli.main",
        "record",
        str(path),
        "--kv-events",
        endpoint,
        "--bind",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as recording:
        with EngineProcess(options) as engine:
            end_s, seeds = time.monotonic() + GUARD_S, count(10_000)
            while not num_lines(path):  # until the recording has started and is connected
                assert time.monotonic() < end_s, "nothing is recorded"
                engine.call("generate", [make_prompt(next(seeds), 2 * BLOCK_TOKENS)], GREEDY)
            num_before = num_lines(path)
            engine.call("generate_in_turn", prompts()[:2], {"temperature": 0.0, "max_tokens": 1})
            end_s = time.monotonic() + GUARD_S
            while count_stored(path, num_before) < 2 * NUM_BLOCKS - NUM_SHARED_BLOCKS:
                assert time.monotonic() < end_s, "the events did not come"
                time.sleep(POLL_S)
        recording.send_signal(signal.SIGINT)
        _, said = recording.communicate(timeout=GUARD_S)

    assert recording.returncode == 0, said
    assert detect_format(path) == "kv_events"
    assert "not received" not in said
    trace = read_trace(path)
    assert trace.block_tokens == BLOCK_TOKENS
    keys = {key for line in read_events(path) for key in line}
    assert keys <= {"type", "block_hashes", "parent_block_hash", "block_size", "medium", "group_idx"}


def read_events(path: Path) -> list[dict[str, object]]:
    return [event for line in path.read_text().splitlines() for event in json.loads(line)["events"]]


def count_stored(path: Path, num_before: int) -> int:
    """Return how many blocks were stored after the first lines; a line may be half written."""
    num_blocks = 0
    for text in path.read_text().splitlines(keepends=True)[num_before:]:
        if text.endswith("\n"):
            events = json.loads(text)["events"]
            num_blocks += sum(len(one["block_hashes"]) for one in events if one["type"] == "BlockStored")
    return num_blocks
