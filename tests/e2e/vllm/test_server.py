"""vLLM's server over HTTP, its engine in processes of its own: answers, metrics, events, reset, restart."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.engine_host import BLOCK_TOKENS
from tests.e2e.vllm.prompts import WHOLE_TOKENS, make_prompt
from tests.e2e.vllm.server_process import ServerProcess
from tests.e2e.vllm.settings import settings_with

from kvtier.observe.control_client import EngineConnection, choose_instance

# vLLM brings both.
zmq = pytest.importorskip("zmq", reason="needs vLLM: make test-vllm")
msgspec = pytest.importorskip("msgspec", reason="needs vLLM: make test-vllm")

NUM_BLOCKS = WHOLE_TOKENS // BLOCK_TOKENS

BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS
"""Four layers, keys and values, two heads of 64 float32 numbers."""

INSTANCE_ID = f"server-{os.getpid()}"

COMMAND_TIMEOUT_S = 120.0
"""Guard against a hang; nothing but the command itself makes an idle server step."""

EVENTS_TIMEOUT_MS = 60_000
"""Guard against a hang; events come within milliseconds."""

TUNE_IN_MS = 500
"""How long a subscriber listens before it lets the server compute another prompt."""

MAX_TUNE_IN_PROMPTS = 60

Event = dict[str, Any]  # Any: msgpack from another process


class Subscriber:
    """Hears what vLLM publishes about KV blocks.

    Attributes:
        endpoint: where it listens; vLLM connects to an address without a wildcard.
        events: what it has heard so far.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.events: list[Event] = []

    def stored(self, medium: str) -> list[Event]:
        """Return the events that say that a medium has blocks."""
        return [
            event for event in self.events if event["type"] == "BlockStored" and event["medium"] == medium
        ]

    def device_hashes(self, prompt: list[int]) -> list[int]:
        """Return the names of a prompt's blocks, as the device's own events gave them."""
        pieces = set(blocks_of(prompt))
        return [
            block_hash
            for event in self.stored("GPU")
            for block_hash, piece in zip(event["block_hashes"], blocks_of(event["token_ids"]), strict=True)
            if piece in pieces
        ]

    def host_hashes(self) -> set[int]:
        """Return the names of the blocks that host memory has got."""
        return self.hashes_in("CPU")

    def hashes_in(self, medium: str) -> set[int]:
        """Return the names of the blocks that a medium has got."""
        return {block_hash for event in self.stored(medium) for block_hash in event["block_hashes"]}

    def tune_in(self, server: ServerProcess) -> None:
        """Let the server compute until something is heard: a subscription takes effect after the connection does."""
        for seed in range(MAX_TUNE_IN_PROMPTS):
            server.ask(make_prompt(10_000 + seed, 2 * BLOCK_TOKENS))
            if self._socket.poll(TUNE_IN_MS):
                return
        raise AssertionError("nothing is heard")

    def listen(self) -> None:
        """Wait for the next batch of events."""
        assert self._socket.poll(EVENTS_TIMEOUT_MS), "no event came"
        _, _, payload = self._socket.recv_multipart()
        _, events, *_ = msgspec.msgpack.decode(payload)
        self.events += events

    def close(self) -> None:
        """Stop listening."""
        self._context.destroy(linger=0)


def blocks_of(tokens: list[int]) -> list[tuple[int, ...]]:
    """Return the whole blocks of a text."""
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return [tuple(tokens[end - BLOCK_TOKENS : end]) for end in ends]


@pytest.fixture(scope="module")
def subscriber() -> Iterator[Subscriber]:
    """Return a subscriber that listens before the server starts."""
    subscriber = Subscriber()
    yield subscriber
    subscriber.close()


@pytest.fixture(scope="module")
def server(
    llama: str, subscriber: Subscriber, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Return a server with host memory and a disk tier; each test has prompts of its own."""
    folder = tmp_path_factory.mktemp("server")
    settings = settings_with(folder / "blocks") | {"instance_id": INSTANCE_ID}
    settings["secondary_tiers"][0]["emit_events"] = True
    log = folder / "server.log"
    with ServerProcess(llama, settings, subscriber.endpoint, log, is_new_interpreter=True) as server:
        yield server


def test_a_restarted_server_answers_from_disk(server: ServerProcess) -> None:
    # First of this file: what is stored after a reset belongs to the process that was reset, so a restarted one
    # would not find it.
    first = server.ask(make_prompt(800))
    server.restart()

    again = server.ask(make_prompt(800))

    assert again.num_cached_tokens == WHOLE_TOKENS
    assert again.tokens == first.tokens
    cached = server.metrics("vllm:prompt_tokens_cached_by_source_total", "source")
    assert cached.get("disk", WHOLE_TOKENS) == WHOLE_TOKENS  # a family of vLLM 0.32


def test_a_prompt_comes_back_from_host_memory_and_the_metrics_page_counts_it(server: ServerProcess) -> None:
    first = server.ask(make_prompt(100))
    server.forget_device()
    loaded_bytes = server.metrics("vllm:kv_offload_load_bytes_total", "engine").get("0", 0)

    again = server.ask(make_prompt(100))

    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == WHOLE_TOKENS
    assert again.tokens == first.tokens
    now_bytes = server.metrics("vllm:kv_offload_load_bytes_total", "engine")["0"]
    assert now_bytes - loaded_bytes == NUM_BLOCKS * BLOCK_BYTES


def test_the_metrics_page_has_every_family_and_the_counters_of_the_tiers(server: ServerProcess) -> None:
    server.ask(make_prompt(200))
    server.forget_device()
    server.ask(make_prompt(200))

    for direction in ("load", "store"):
        for family in ("bytes_total", "time_total", "size_count"):
            assert server.metrics(f"vllm:kv_offload_{direction}_{family}", "engine")["0"] > 0
    assert server.metrics("kvtier_host_capacity_blocks", "engine") == {"0": 128 * 2**20 // BLOCK_BYTES}
    assert server.metrics("kvtier_load_jobs_total", "model_name")["model"] > 0
    assert server.metrics("kvtier_tier_stored_blocks_total", "tier")["fs"] > 0
    assert server.metrics("kvtier_tier_breaker_open", "tier") == {"fs": 0}
    assert server.metrics("kvtier_load_duration_seconds_count", "engine")["0"] > 0


def test_a_subscriber_hears_which_blocks_host_memory_has(
    server: ServerProcess, subscriber: Subscriber
) -> None:
    prompt = make_prompt(300)
    subscriber.tune_in(server)

    server.ask(prompt)

    while len(subscriber.device_hashes(prompt)) < NUM_BLOCKS:
        subscriber.listen()
    expected = set(subscriber.device_hashes(prompt))
    while not expected <= subscriber.host_hashes():
        subscriber.listen()
    assert len(expected) == NUM_BLOCKS
    assert {event["block_size"] for event in subscriber.stored("CPU")} == {0}


def test_a_subscriber_hears_which_blocks_the_disk_has(server: ServerProcess, subscriber: Subscriber) -> None:
    prompt = make_prompt(350)
    subscriber.tune_in(server)

    server.ask(prompt)
    while len(subscriber.device_hashes(prompt)) < NUM_BLOCKS:
        subscriber.listen()
    expected = set(subscriber.device_hashes(prompt))
    for seed in range(MAX_TUNE_IN_PROMPTS):
        if expected <= subscriber.hashes_in("STORAGE") | subscriber.hashes_in("fs"):
            break
        server.ask(make_prompt(20_000 + seed, 2 * BLOCK_TOKENS))  # an idle engine publishes nothing
        subscriber.listen()

    in_storage, in_fs = subscriber.hashes_in("STORAGE"), subscriber.hashes_in("fs")
    assert expected <= in_storage | in_fs
    # Releases before 0.32 cannot name a tier beside the medium.
    assert not (in_storage and in_fs)
    assert {event["ownership"] for event in subscriber.stored("STORAGE")} <= {"fs"}
    if in_storage:
        assert {event["locality"] for event in subscriber.stored("CPU")} == {"LOCAL"}


def test_a_client_decides_what_is_loaded_for_its_request(server: ServerProcess) -> None:
    first = server.ask(make_prompt(400))
    server.forget_device()
    computed = server.ask(make_prompt(400), kv_transfer_params={"skip_load": True})
    server.forget_device()
    partly = server.ask(make_prompt(400), kv_transfer_params={"max_load_tokens": 10 * BLOCK_TOKENS})

    assert computed.num_cached_tokens == 0
    assert partly.num_cached_tokens == 10 * BLOCK_TOKENS
    assert computed.tokens == partly.tokens == first.tokens


def test_a_client_decides_what_is_stored_of_its_request(server: ServerProcess) -> None:
    first = server.ask(make_prompt(500), kv_transfer_params={"max_store_tokens": 10 * BLOCK_TOKENS})
    server.forget_device()
    partly = server.ask(make_prompt(500))

    assert partly.num_cached_tokens == 10 * BLOCK_TOKENS
    assert partly.tokens == first.tokens


def test_commands_reach_an_idle_server(server: ServerProcess) -> None:
    prompt = make_prompt(700)
    server.ask(prompt)
    with EngineConnection(choose_instance(INSTANCE_ID).path, COMMAND_TIMEOUT_S) as connection:
        while connection.ask("stats")["is_stepping"]:
            pass
        drained = connection.ask("drain", COMMAND_TIMEOUT_S)
        while connection.ask("stats")["is_stepping"]:
            pass
        pinned = connection.ask("pin", COMMAND_TIMEOUT_S, token_ids=prompt[:WHOLE_TOKENS])
        unpinned = connection.ask("unpin", COMMAND_TIMEOUT_S, all=True)

    assert drained["ok"]
    assert (pinned["num_blocks"], pinned["num_ready"]) == (NUM_BLOCKS, NUM_BLOCKS)
    assert unpinned["num_blocks"] == NUM_BLOCKS
    assert server.ask(prompt).num_cached_tokens == WHOLE_TOKENS


def test_a_reset_with_the_connector_forgets_host_memory_and_disk(server: ServerProcess) -> None:
    first = server.ask(make_prompt(600))
    assert server.post("/reset_prefix_cache?reset_external=true") == {"success": True}

    computed = server.ask(make_prompt(600))
    server.forget_device()
    found = server.ask(make_prompt(600))

    assert [computed.num_cached_tokens, found.num_cached_tokens] == [0, WHOLE_TOKENS]
    assert first.tokens == computed.tokens == found.tokens
