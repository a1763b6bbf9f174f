"""``why`` explains the latest requests of a living engine."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.connector.fakes import FakeBlocks, FakeRequest
from tests.observe.controlled import Engine

from kvtier.engines.common.step import StepOutput

Run = Callable[..., tuple[int, str, str]]


def serve(engine: Engine, req_id: str, tokens: list[int]) -> None:
    """Begin a request of which nothing is loaded, and end it."""
    request = FakeRequest(req_id, tokens)
    engine.half.get_num_new_matched_tokens(request, 0)
    engine.half.update_state_after_alloc(request, FakeBlocks(([],)), 0)
    engine.step(StepOutput())
    engine.half.request_finished(request)


def test_a_living_engine_is_explained(engine: Engine, run: Run) -> None:
    for number in range(3):
        serve(engine, f"r-{number}", list(range(100 * (number + 1), 100 * (number + 1) + 17)))
    status, out, _ = run("why", "--json")
    report = json.loads(out)

    assert status == 0
    assert report["source"] == "engine serving"
    assert report["requests"] == 3
    assert run("why", "serving")[0] == 0
    assert "never_seen" in run("why")[1]


def test_without_an_engine_it_says_so(runtime: Path, run: Run) -> None:
    status, out, err = run("why")

    assert status == 1
    assert "engine" in out + err


def test_neither_an_engine_nor_a_file_is_one_line(engine: Engine, run: Run) -> None:
    status, _, err = run("why", "severing")

    assert status == 2
    assert "did you mean 'serving'" in err
    assert run("why", "./missing.jsonl")[0] == 2
