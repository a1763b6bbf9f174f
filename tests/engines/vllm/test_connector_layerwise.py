"""Loads that vLLM waits for layer by layer: where they are offered, and what is forgotten when one fails."""

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import copy
from types import SimpleNamespace

import torch
from tests.engines.vllm.configs import NUM_BLOCKS, cache_config, full, group, window, with_kvtier
from tests.engines.vllm.mini_engine import Answers, MiniEngine
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.request import Request

from kvtier.engines.vllm import KVTierConnector, compat
from kvtier.engines.vllm.connector import find_layerwise_obstacle
from kvtier.engines.vllm.worker_hooks import make_canonical_kv_caches

PROMPT = list(range(1, 56))
LAYERS = ("a", "b")


class FakeBlockPool:
    """Remembers what was forgotten."""

    def __init__(self) -> None:
        self.evicted: set[int] = set()

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids


class LayerEngine(MiniEngine):
    """An engine whose forward pass waits for the layers that a test names."""

    layers: tuple[str, ...] = LAYERS

    def attach_pool(self) -> FakeBlockPool:
        """Hand the scheduler's connector a pool of device blocks."""
        pool = FakeBlockPool()
        self.scheduler.bind_gpu_block_pool(pool)
        return pool

    def compute_loading(self, request: Request, table: list[int], num_tokens: int) -> Answers:
        """Compute what a load by layer of ``num_tokens`` tokens leaves, in the step that begins the load."""
        self.allocate(request, [table], num_tokens)
        request.num_computed_tokens = num_tokens
        start = self.worker.start_load_kv

        def start_and_compute(forward_context: object, **kwargs: object) -> None:
            start(forward_context, **kwargs)
            for layer in self.layers:
                self.worker.wait_for_layer_load(layer)

        self.worker.start_load_kv = start_and_compute  # type: ignore[method-assign]  # a forward pass
        answers = self.step(self.schedule(request, [table], request.num_tokens - num_tokens))
        self.worker.start_load_kv = start  # type: ignore[method-assign]
        return answers


@pytest.fixture
def engine(vllm_config: VllmConfig) -> Iterator[LayerEngine]:
    """Return an engine with two layers that has stored the prompt's three blocks."""
    config = synchronous(with_kvtier(vllm_config, layerwise_load=True))
    caches = {name: torch.zeros(NUM_BLOCKS, 2, 16, 16) for name in LAYERS}
    engine = LayerEngine(config, cache_config(group(full(), *LAYERS)), caches)
    for position, cache in enumerate(caches.values()):
        for block in (1, 2, 3):
            cache[block] = 10.0 + block + position / 8
    engine.compute(engine.request("stored", PROMPT), [[1, 2, 3, 4]], len(PROMPT))
    yield engine
    engine.shutdown()


def synchronous(config: VllmConfig) -> VllmConfig:
    """Return the configuration of an engine that could load by layer."""
    config.scheduler_config.async_scheduling = False
    return config


def test_a_step_computes_with_what_comes_layer_by_layer(engine: LayerEngine) -> None:
    engine.attach_pool()
    request = engine.request("r", PROMPT)

    answer = engine.scheduler.get_num_new_matched_tokens(request, 0)
    answers = engine.compute_loading(request, [5, 6, 7, 8], 48)

    assert answer == (48, False)
    assert answers == Answers()
    for cache in engine.kv_caches.values():
        assert torch.equal(cache[5:8], cache[1:4])
    assert engine.scheduler._scheduler.stats()["connector.open_jobs"] == 0


def test_without_a_pool_whose_blocks_can_be_forgotten_loads_run_beside_the_steps(engine: LayerEngine) -> None:
    assert engine.scheduler.get_num_new_matched_tokens(engine.request("r", PROMPT), 0) == (48, True)


def test_blocks_that_were_computed_with_a_failed_load_are_told_and_forgotten(engine: LayerEngine) -> None:
    pool = engine.attach_pool()
    engine.layers = ("a",)
    request = engine.request("r", PROMPT)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (48, False)

    answers = engine.compute_loading(request, [5, 6, 7, 8], 48)

    assert answers.finished == []
    assert answers.invalid_blocks == {5, 6, 7}
    assert pool.evicted == {5, 6, 7, 8}
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    # The hook is missing: from here on loads run beside the steps.
    assert engine.scheduler.get_num_new_matched_tokens(engine.request("s", PROMPT), 0) == (48, True)


def test_a_request_that_is_not_offloaded_waits_too_when_it_shares_the_blocks(engine: LayerEngine) -> None:
    engine.attach_pool()
    request = engine.request("r", PROMPT)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.allocate(request, [[5, 6, 7, 8]], 48)
    session = engine.request("session", PROMPT, resumable=True)

    assert engine.scheduler.get_num_new_matched_tokens(session, 48) == (None, False)
    engine.step(engine.schedule(request, [[5, 6, 7, 8]], 7))
    assert engine.scheduler.get_num_new_matched_tokens(session, 48) == (0, False)


def asynchronous(config: VllmConfig) -> None:
    config.scheduler_config.async_scheduling = True


def with_full_graphs(config: VllmConfig) -> None:
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE


def with_drafts(config: VllmConfig) -> None:
    config.speculative_config = SimpleNamespace()


def with_two_halves(config: VllmConfig) -> None:
    config.parallel_config.enable_dbo = True


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (asynchronous, "--no-async-scheduling"),
        (with_full_graphs, "PIECEWISE"),
        (with_drafts, "speculative decoding"),
        (with_two_halves, "--enable-dbo"),
    ],
)
def test_where_vllm_cannot_wait_or_compute_anew_the_log_names_the_remedy(
    vllm_config: VllmConfig, change: Callable[[VllmConfig], None], remedy: str
) -> None:
    config = synchronous(copy.deepcopy(vllm_config))
    without_change = find_layerwise_obstacle(config)
    change(config)

    assert without_change is None
    assert remedy in (find_layerwise_obstacle(config) or "")


def test_a_release_without_the_hook_for_the_pool_is_not_offered_it(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "HAS_BLOCK_POOL_HOOK", False)

    assert find_layerwise_obstacle(synchronous(copy.deepcopy(vllm_config))) is not None


def test_the_second_model_runner_is_not_offered_it() -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False), use_v2_model_runner=True
    )

    assert "VLLM_USE_V2_MODEL_RUNNER=0" in (find_layerwise_obstacle(config) or "")


@pytest.mark.parametrize("obstacle", ["second model runner", "asynchronous scheduling"])
def test_no_load_is_waited_for_in_a_step_where_a_failed_one_would_leave_wrong_tokens(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    # vllm-project/vllm#49250: a rejected load that a step waits for leaves the second runner with tokens taken back.
    config = synchronous(with_kvtier(vllm_config, layerwise_load=True))
    if obstacle == "second model runner":
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    else:
        config.scheduler_config.async_scheduling = True
    caches = {name: torch.zeros(NUM_BLOCKS, 2, 16, 16) for name in LAYERS}
    engine = LayerEngine(config, cache_config(group(full(), *LAYERS)), caches)
    engine.attach_pool()
    engine.compute(engine.request("stored", PROMPT), [[1, 2, 3, 4]], len(PROMPT))

    found = engine.scheduler.get_num_new_matched_tokens(engine.request("again", PROMPT), 0)
    engine.shutdown()

    assert found == (48, True)


def test_graphs_of_the_whole_model_are_given_up_for_the_hook_alone() -> None:
    assert KVTierConnector.requires_piecewise_for_cudagraph({"layerwise_load": True})
    assert not KVTierConnector.requires_piecewise_for_cudagraph({"layerwise_load": False})
    assert not KVTierConnector.requires_piecewise_for_cudagraph({})


def test_each_layer_names_the_ref_with_its_bytes() -> None:
    config = cache_config(group(full(), "a", "b", "c"))
    apart = {name: torch.zeros(NUM_BLOCKS, 2, 16, 16) for name in "abc"}
    whole = torch.zeros(NUM_BLOCKS, 3, 2, 16, 16)
    packed = {name: whole[:, index] for index, name in enumerate("abc")}
    some = {**{name: whole[:, index] for index, name in enumerate("ab")}, "c": apart["c"]}

    assert make_canonical_kv_caches(config, apart).ref_of_layer == {"a": 0, "b": 1, "c": 2}
    assert make_canonical_kv_caches(config, packed).ref_of_layer == {"a": 0, "b": 0, "c": 0}
    assert make_canonical_kv_caches(config, some).ref_of_layer == {"a": 0, "b": 0, "c": 1}


def test_with_several_groups_no_layer_is_waited_for() -> None:
    config = cache_config(group(full(), "a"), group(window(20), "b"))
    caches = {name: torch.zeros(NUM_BLOCKS, 2, 16, 16) for name in LAYERS}

    assert make_canonical_kv_caches(config, caches).ref_of_layer == {}
