"""vLLM's requests are recorded as its hooks tell of them: when they came, how long they were, how they ended."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.configs import BLOCK_TOKENS, NUM_BLOCKS, cache_config, full, group, with_kvtier
from tests.engines.vllm.mini_engine import MiniEngine
from vllm.config import VllmConfig
from vllm.v1.request import RequestStatus

from kvtier.connector.common import StopReason
from kvtier.sim.formats.kvtier import read_end
from kvtier.sim.formats.registry import read_trace

PROMPT = tuple(range(1, 51))
"""Three full blocks of sixteen tokens, and two tokens."""

Start = Callable[..., MiniEngine]


@pytest.fixture
def start(vllm_config: VllmConfig) -> Iterator[Start]:
    """Return a function that starts an engine with one full-attention group and the given settings."""
    engines: list[MiniEngine] = []

    def start(**settings: object) -> MiniEngine:
        kv_caches = {"a": torch.zeros(NUM_BLOCKS, 2, 16, 16)}
        engine = MiniEngine(with_kvtier(vllm_config, **settings), cache_config(group(full(), "a")), kv_caches)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def serve(engine: MiniEngine, name: str, prompt: tuple[int, ...], status: RequestStatus) -> None:
    """Take a request through its hooks, with an answer of three tokens."""
    request = engine.request(name, prompt)
    engine.scheduler.on_new_request(request)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    request.append_output_token_ids([7, 8, 9])
    request.status = status
    engine.scheduler.request_finished_all_groups(request, ([],))


def test_the_setting_reaches_the_recorder_and_requests_are_in_the_file(start: Start, path: Path) -> None:
    engine = start(record_trace=str(path))
    serve(engine, "a", PROMPT, RequestStatus.FINISHED_STOPPED)
    serve(engine, "b", (*PROMPT[:32], 99, *PROMPT[33:]), RequestStatus.FINISHED_LENGTH_CAPPED)
    serve(engine, "c", PROMPT, RequestStatus.FINISHED_ABORTED)
    engine.shutdown()

    trace = read_trace(path)

    first, second, third = trace.requests
    assert trace.block_tokens == BLOCK_TOKENS
    assert {(one.num_prompt_tokens, one.num_output_tokens) for one in trace.requests} == {(50, 3)}
    assert first.hash_ids == third.hash_ids
    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert first.hash_ids[2] != second.hash_ids[2]
    assert [one.stop for one in trace.requests] == [
        StopReason.END_TURN,
        StopReason.UNKNOWN,
        StopReason.UNKNOWN,
    ]
    assert read_end(path) is not None


def test_requests_come_when_vllm_says_so_and_not_when_there_is_room_for_them(
    start: Start, path: Path
) -> None:
    engine = start(record_trace=str(path))
    early, late = engine.request("early", PROMPT), engine.request("late", PROMPT[:20])
    for request in (early, late):
        engine.scheduler.on_new_request(request)
    for request in (late, early):
        engine.scheduler.get_num_new_matched_tokens(request, 0)
        engine.scheduler.request_finished(request, [])
    engine.shutdown()

    assert [one.num_prompt_tokens for one in read_trace(path).requests] == [50, 20]


def test_a_request_that_kvtier_does_not_serve_is_not_in_the_file(start: Start, path: Path) -> None:
    engine = start(record_trace=str(path))
    request = engine.request("session", PROMPT, resumable=True)
    engine.scheduler.on_new_request(request)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.scheduler.request_finished(request, [])
    serve(engine, "a", PROMPT, RequestStatus.FINISHED_STOPPED)
    engine.shutdown()

    assert len(read_trace(path).requests) == 1


def test_the_environment_switches_recording_on(
    start: Start, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_RECORD_TRACE", str(path))
    engine = start()
    serve(engine, "a", PROMPT, RequestStatus.FINISHED_STOPPED)
    engine.shutdown()

    assert len(read_trace(path).requests) == 1
    assert [file.name for file in path.parent.iterdir()] == ["trace.jsonl"]
