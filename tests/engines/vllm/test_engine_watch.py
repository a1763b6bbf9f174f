"""Sleep and new weights in the order of vLLM's own engine core, with a device whose memory is really taken away.

The engine core's methods are vLLM's; its executor calls one worker half, and forgets the KV caches while it sleeps, as
a GPU does. No CPU engine does that.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.configs import NUM_BLOCKS, cache_config, full, group, with_kvtier
from tests.engines.vllm.mini_engine import MiniEngine
from tests.engines.vllm.test_hooks import PROMPT, fill, pages, store
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.engine import core as engine_core

from kvtier.config import ModelIdentity
from kvtier.engines.vllm.engine_watch import EngineWatch, is_reached_by_calls_alone
from kvtier.engines.vllm.loaded_weights import Origin, Weights

pytestmark = pytest.mark.skipif(
    not hasattr(engine_core.EngineCore, "_reset_caches"), reason="this vLLM does not say why it resets"
)

WHOLE_TOKENS = 48


class Device:
    """vLLM's executor of one worker: it forgets the KV caches while it sleeps, and refuses copies meanwhile."""

    def __init__(self, engine: MiniEngine) -> None:
        self._engine = engine
        self.is_sleeping = False
        self.was_released = False
        self.weights = "started"

    def collective_rpc(
        self,
        method: Callable[[object], object] | str,
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, str] | None = None,
    ) -> list[object]:
        """Call a function with the worker, or one of the few methods that are known here."""
        if callable(method):
            return [method(self)]
        if method == "reload_weights":
            self.weights = (kwargs or {}).get("weights_path", "started")
        return [None]

    def sleep(self, level: int) -> None:
        """Take the KV caches' memory away."""
        self.was_released = not self._engine.worker._is_registered
        self.is_sleeping = True
        for cache in self._engine.kv_caches.values():
            cache.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring memory back, without its content; a wake-up of the weights leaves the caches asleep."""
        self.is_sleeping = tags == ["weights"]


class Namer:
    """Names weights by the path that they were read from, and a transfer not at all."""

    def before_load(self, path: str) -> None:
        """Nothing has to be read."""

    def name(self, weights: Weights, executor: object) -> ModelIdentity | None:
        """Return the identity of files."""
        del executor
        return ModelIdentity("model", weights.path or "started") if weights.origin is Origin.FILES else None


class Rig:
    """An engine core of vLLM's class around a connector's two halves.

    Attributes:
        engine: the halves.
        core: what vLLM's utility calls reach.
        device: its executor.
    """

    def __init__(self, engine: MiniEngine) -> None:
        self.engine = engine
        self.device = Device(engine)
        watch = engine.scheduler.engine_watch
        engine.scheduler.engine_watch = EngineWatch(
            watch._offloader, Namer(), ModelIdentity("model", "started")
        )
        core = engine_core.EngineCoreProc.__new__(engine_core.EngineCoreProc)
        parallel = SimpleNamespace(distributed_executor_backend="mp")
        core.vllm_config = SimpleNamespace(parallel_config=parallel)
        core.model_executor = self.device
        core.scheduler = self
        core.batch_queue = core.mm_receiver_cache = None
        core.engines_running = False
        core._idle_state_callbacks = []
        for name in ("reset_mm_cache", "reset_encoder_cache", "_send_abort_outputs"):
            setattr(core, name, lambda *_: None)
        self.core: Any = core
        self.connector = engine.scheduler
        self.is_busy = False

    def finish_requests(self, *_: object) -> list[object]:
        """Nothing runs."""
        return []

    def set_pause_state(self, state: object) -> None:
        """Nothing is scheduled by itself."""

    def has_requests(self) -> bool:
        """Return whether a pause has to wait."""
        return self.is_busy

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Do as vLLM's scheduler, whose cache is always empty here."""
        return not reset_connector or self.connector.reset_cache() is not False

    def num_found(self, name: str) -> int | None:
        """Search for the prompt as a new request."""
        request = self.engine.request(name, PROMPT)
        num_tokens, _ = self.engine.scheduler.get_num_new_matched_tokens(request, 0)
        self.engine.scheduler.request_finished(request, [])
        return num_tokens

    def reload(self, path: str) -> None:
        """Load weights in place, as a user does."""
        self.core.collective_rpc("reload_weights", None, (), {"weights_path": path})


@pytest.fixture
def rig(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Return an engine with one full-attention group of two layers and a tier."""
    config = with_kvtier(vllm_config, secondary_tiers=[{"type": "example"}])
    caches = {name: torch.zeros(NUM_BLOCKS, 2, 16, 16) for name in ("a", "b")}
    engine = MiniEngine(config, cache_config(group(full(), "a", "b")), caches)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", engine.worker)
    yield Rig(engine)
    engine.shutdown()


def test_level_1_ends_copies_before_the_memory_goes_and_what_is_held_is_loaded_afterwards(rig: Rig) -> None:
    engine = rig.engine
    request = engine.request("first", PROMPT)
    fill(engine, [1, 2, 3, 4], 10.0)
    expected = [pages(engine, block) for block in (1, 2, 3)]
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.allocate(request, [[1, 2, 3, 4]], 0)
    engine.step(engine.schedule(request, [[1, 2, 3, 4]], len(PROMPT)))  # its store has not begun
    engine.scheduler.request_finished(request, [])

    rig.core.sleep(1)
    was_released = rig.device.was_released
    rig.core.wake_up(["weights"])
    was_registered = engine.worker._is_registered
    rig.core.wake_up(["kv_cache"])
    engine.rest()
    num_tokens, answers = engine.load(engine.request("second", PROMPT), [[4, 5, 2, 3]])

    assert (was_released, was_registered, engine.worker._is_registered) == (True, False, True)
    assert (num_tokens, answers.failed, answers.invalid_blocks) == (WHOLE_TOKENS, set(), set())
    for block, before in zip((4, 5, 2), expected, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(pages(engine, block), before, strict=True))


def test_a_reset_of_a_user_forgets_also_beside_sleep(rig: Rig) -> None:
    store(rig.engine)
    rig.core.sleep(1)
    rig.core.wake_up()
    assert rig.num_found("kept") == WHOLE_TOKENS

    rig.core.reset_prefix_cache(reset_connector=True)

    assert rig.num_found("reset") == 0


def test_a_pause_that_clears_caches_is_a_reset(rig: Rig) -> None:
    store(rig.engine)

    rig.core.pause_scheduler(mode="abort", clear_cache=True)

    assert rig.num_found("paused") == 0


def test_sleep_that_waits_for_requests_keeps_what_is_held_and_a_users_reset_meanwhile_is_one(
    rig: Rig,
) -> None:
    store(rig.engine)
    rig.is_busy = True
    ending = rig.core.sleep(1, mode="wait")
    assert isinstance(ending, Future)

    rig.is_busy = False
    for callback in rig.core._idle_state_callbacks:
        callback(rig.core)
    assert ending.done()
    assert rig.device.was_released
    rig.core.wake_up()

    assert rig.num_found("kept") == WHOLE_TOKENS
    rig.core._idle_state_callbacks = []
    rig.is_busy = True
    rig.core.sleep(1, mode="wait")
    rig.core.reset_prefix_cache(reset_connector=True)
    assert rig.num_found("reset") == 0


@pytest.mark.parametrize(
    ("change", "num_found"),
    [
        (lambda rig: rig.reload("started"), WHOLE_TOKENS),
        (lambda rig: rig.reload("other"), 0),
        (lambda rig: None, 0),
        (lambda rig: rig.core.collective_rpc("a_method_of_an_extension"), 0),
        (lambda rig: rig.core.collective_rpc("finish_weight_update"), 0),
    ],
)
def test_after_level_2_only_the_same_weights_find_what_was_held(
    rig: Rig, change: Callable[[Rig], None], num_found: int
) -> None:
    store(rig.engine)

    rig.core.sleep(2)
    rig.core.wake_up(["weights"])
    change(rig)
    rig.core.wake_up(["kv_cache"])

    assert rig.num_found("woken") == num_found
    store(rig.engine, "later")
    assert rig.num_found("again") == WHOLE_TOKENS


def test_weights_loaded_under_a_full_device_cache_neither_store_nor_find_until_it_is_reset(rig: Rig) -> None:
    store(rig.engine)

    rig.reload("other")
    held = rig.num_found("held")
    store(rig.engine, "not stored")
    rig.core.reset_prefix_cache()
    after = rig.num_found("after")
    store(rig.engine, "stored")

    assert (held, after, rig.num_found("found")) == (0, 0, WHOLE_TOKENS)


def test_the_weights_of_before_a_users_reset_find_nothing_of_that_time(rig: Rig) -> None:
    store(rig.engine)
    rig.core.reset_prefix_cache(reset_connector=True)
    for path in ("other", "started"):
        rig.reload(path)
        rig.core.reset_prefix_cache()

    assert rig.num_found("back") == 0


def test_where_weights_can_change_unseen_sleep_is_a_reset(rig: Rig) -> None:
    rig.core.vllm_config.parallel_config.distributed_executor_backend = "an.executor.of.the.user"
    store(rig.engine)

    rig.core.sleep(1)
    rig.core.wake_up()

    assert not is_reached_by_calls_alone(rig.core)
    assert rig.num_found("woken") == 0
