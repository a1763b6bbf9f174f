"""Sleep, wake-up and new weights of a real engine in a process of its own: what is kept, and that no token is wrong.

On a CPU vLLM leaves weights and KV cache in place while it sleeps; everything else of it happens, in its own order: it
empties its cache, resets its connector, calls the workers. Weights are loaded in place by vLLM's ``reload_weights``.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import Answer
from tests.e2e.vllm.conftest import CONTROL_POOL_BLOCKS
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_pool import Alone
from tests.e2e.vllm.prompts import WHOLE_TOKENS, make_prompt
from tests.e2e.vllm.server_process import HttpAnswer, ServerProcess
from tests.e2e.vllm.settings import settings_with
from tests.ports import free_port
from tests.tiering.fs.slots import stored_blocks

from kvtier.observe.control_client import EngineConnection, choose_instance

INSTANCE_ID = f"sleeper-{os.getpid()}"

COMMAND_TIMEOUT_S = 120.0
"""Guard against a hang."""

NUM_BLOCKS = 31
"""Whole blocks of a prompt."""

SHORT = {"temperature": 0.0, "max_tokens": 8}
"""As the server is asked."""

PROMPTS = {seed: make_prompt(seed) for seed in range(500, 510)}


@dataclass(frozen=True)
class Run:
    """A server and the folder of its fs tier."""

    server: ServerProcess
    blocks: Path

    def ask(self, seed: int) -> HttpAnswer:
        """Let it continue a prompt."""
        return self.server.ask(PROMPTS[seed])

    def ask_kvtier(self, seed: int) -> HttpAnswer:
        """Let it continue a prompt of which the device holds nothing."""
        self.server.forget_device()
        return self.ask(seed)

    def sleep_and_wake(self, level: int, *calls: dict[str, object]) -> None:
        """Sleep, call all workers while only the weights are awake, and wake up."""
        self.server.post(f"/sleep?level={level}")
        self.server.post("/wake_up?tags=weights")
        for call in calls:
            self.server.post("/collective_rpc", call)
        self.server.post("/wake_up")

    def reload(self, path: str | None = None) -> None:
        """Load weights in place."""
        self.server.post("/collective_rpc", reload_call(path))

    def num_files(self) -> int:
        """Return how many blocks are on the disk."""
        return len(stored_blocks(self.blocks))


def reload_call(path: str | None = None) -> dict[str, object]:
    """Return the call that loads the weights of a folder, or those of the last load, in place."""
    return {"method": "reload_weights", "kwargs": {} if path is None else {"weights_path": path}}


def start(model: str, blocks: Path, log: Path, **more: str) -> ServerProcess:
    """Return a server with host memory and a disk tier, which is not started yet; ``more`` are kvtier's settings."""
    return ServerProcess(model, settings_with(blocks) | more, f"tcp://127.0.0.1:{free_port()}", log)


@pytest.fixture(scope="module")
def run(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a server; each test has prompts of its own, and leaves the weights of the start."""
    folder = tmp_path_factory.mktemp("sleep")
    with start(llama, folder / "blocks", folder / "server.log", instance_id=INSTANCE_ID) as server:
        yield Run(server, folder / "blocks")


@pytest.fixture(scope="module")
def other_answers(other_llama: str, alone: Alone) -> dict[int, Answer]:
    """Return answers of an engine without kvtier that was started with the other weights."""
    options = EngineOptions(other_llama, num_device_blocks=CONTROL_POOL_BLOCKS)
    answers = alone.answers(options, "generate_in_turn", list(PROMPTS.values()), SHORT)
    return dict(zip(PROMPTS, answers, strict=True))


def test_sleep_of_level_1_keeps_what_is_held_and_another_process_finds_what_follows(run: Run) -> None:
    first = run.ask(500)
    run.sleep_and_wake(1)

    again = run.ask(500)
    num_before = run.num_files()
    later = run.ask(501)
    run.server.wait_for_blocks(run.blocks, num_before + NUM_BLOCKS)
    run.server.restart()
    found = run.ask(501)

    assert [one.num_cached_tokens for one in (first, again, later, found)] == [
        0,
        WHOLE_TOKENS,
        0,
        WHOLE_TOKENS,
    ]
    assert (again.tokens, found.tokens) == (first.tokens, later.tokens)


def test_a_sleeping_engine_drains_and_prefetches_and_sleeps_on(run: Run) -> None:
    first = run.ask(509)
    run.server.post("/sleep?level=1")
    with EngineConnection(choose_instance(INSTANCE_ID).path, COMMAND_TIMEOUT_S) as connection:
        drained = connection.ask("drain", COMMAND_TIMEOUT_S)
        purged = connection.ask("purge", COMMAND_TIMEOUT_S, tiers=["host"])
        fetched = connection.ask("prefetch", COMMAND_TIMEOUT_S, token_ids=PROMPTS[509][:WHOLE_TOKENS])
    is_sleeping = run.server.get("/is_sleeping")
    run.server.post("/wake_up")

    again = run.ask_kvtier(509)

    assert drained["ok"]
    assert purged["num_purged"]["host"] >= NUM_BLOCKS
    assert (fetched["num_blocks"], fetched["num_ready"]) == (NUM_BLOCKS, NUM_BLOCKS)
    assert is_sleeping == {"is_sleeping": True}
    assert (again.num_cached_tokens, again.tokens) == (WHOLE_TOKENS, first.tokens)


def test_sleep_of_level_2_with_the_same_weights_loaded_again_keeps_what_is_held(run: Run) -> None:
    first = run.ask(502)
    run.sleep_and_wake(2, reload_call())

    again = run.ask(502)

    assert (again.num_cached_tokens, again.tokens) == (WHOLE_TOKENS, first.tokens)


def test_other_weights_find_nothing_of_the_old_and_share_with_engines_started_with_them(
    run: Run, llama: str, other_llama: str, other_answers: dict[int, Answer], tmp_path: Path
) -> None:
    old = run.ask(503)
    num_before = run.num_files()
    run.sleep_and_wake(2, reload_call(other_llama))

    new = run.ask(503)
    run.server.wait_for_blocks(run.blocks, num_before + NUM_BLOCKS)
    with start(other_llama, run.blocks, tmp_path / "server.log") as server:
        found = server.ask(PROMPTS[503])
        num_before = run.num_files()
        server.ask(PROMPTS[504])
        server.wait_for_blocks(run.blocks, num_before + NUM_BLOCKS)
    from_other = run.ask(504)
    run.sleep_and_wake(2, reload_call(llama))
    back = run.ask(503)

    assert old.tokens != other_answers[503].tokens
    cached = [one.num_cached_tokens for one in (old, new, found, from_other, back)]
    assert cached == [0, 0, WHOLE_TOKENS, WHOLE_TOKENS, WHOLE_TOKENS]
    assert new.tokens == found.tokens == other_answers[503].tokens
    assert from_other.tokens == other_answers[504].tokens
    assert back.tokens == old.tokens


def test_weights_loaded_under_a_full_device_cache_share_nothing_until_it_is_reset(
    run: Run, llama: str, other_llama: str, other_answers: dict[int, Answer]
) -> None:
    run.ask(505)
    run.reload(other_llama)
    num_before = run.num_files()
    unstored = run.ask(506)
    computed = run.ask_kvtier(506)
    old = run.ask(505)
    again = run.ask_kvtier(506)
    run.server.wait_for_blocks(run.blocks, num_before + 2 * NUM_BLOCKS)
    run.reload(llama)
    run.server.forget_device()

    cached = [one.num_cached_tokens for one in (unstored, computed, old, again)]
    assert cached == [0, 0, 0, WHOLE_TOKENS]
    assert unstored.tokens == computed.tokens == again.tokens == other_answers[506].tokens
    assert old.tokens == other_answers[505].tokens


def test_weights_that_nothing_names_are_kept_in_host_memory_alone(run: Run, llama: str) -> None:
    old = run.ask(507)
    run.server.wait_for_blocks(run.blocks, run.num_files())
    run.sleep_and_wake(2)  # on a GPU they would be gone; here they are the old ones, which kvtier cannot know
    num_before = run.num_files()

    unknown = run.ask(507)
    again = run.ask_kvtier(507)
    num_after = run.num_files()
    run.reload(llama)
    run.server.forget_device()
    back = run.ask(507)

    cached = [one.num_cached_tokens for one in (old, unknown, again, back)]
    assert cached == [0, 0, WHOLE_TOKENS, WHOLE_TOKENS]
    assert num_after == num_before
    assert old.tokens == unknown.tokens == again.tokens == back.tokens


def test_a_reset_that_a_user_asks_for_is_one_and_sleep_does_not_undo_it(run: Run) -> None:
    first = run.ask(508)
    assert run.server.post("/reset_prefix_cache?reset_external=true") == {"success": True}
    run.sleep_and_wake(1)
    after = run.ask(508)
    run.sleep_and_wake(2, reload_call())
    kept = run.ask(508)

    assert [one.num_cached_tokens for one in (first, after, kept)] == [0, 0, WHOLE_TOKENS]
    assert first.tokens == after.tokens == kept.tokens
