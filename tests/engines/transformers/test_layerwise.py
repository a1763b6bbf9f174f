"""A model that computes while its prefix is loaded answers as without; a load that fails is computed instead."""

import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HandlerEntry,
    LayerwiseHandler,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.config import OffloadingConfig
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engines.transformers import GenerationResult, KVTierEngine

HOST = {"cpu_bytes_to_use": "2MiB", "layerwise_load": True}
WAIT_S = 30.0
NUM_NEW_TOKENS = 12
LAYERWISE = "connector.layerwise_load_jobs"

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[GenerationResult, Expected], None]


def fill(engine: KVTierEngine, prompt: list[int]) -> None:
    """Store a prompt and let the device forget it."""
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()


@pytest.mark.parametrize("block_size", [8, 16])
def test_tokens_are_the_same_when_layers_are_computed_as_they_come(
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    assert_same: AssertSame,
    block_size: int,
) -> None:
    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, extra_config=HOST | {"block_size": block_size})
    fill(engine, prompt)

    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    again = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)

    num_host = 75 // block_size * block_size
    assert result.sources == {"host": num_host, "computed": 75 - num_host}
    assert_same(result, expected)
    assert again.sources["device"] == 72
    assert_same(again, expected)
    assert engine.stats()[LAYERWISE] == 1
    assert engine.stats()["connector.open_jobs"] == 0
    engine._pool.check()


def test_a_prefix_on_the_device_is_lengthened_by_layer(
    llama: LlamaForCausalLM,
    plain: Plain,
    make_engine: MakeEngine,
    prompt_of: PromptOf,
    assert_same: AssertSame,
) -> None:
    long = prompt_of(0, 75)
    engine = make_engine(llama, extra_config=HOST)
    fill(engine, long)
    engine.run(long[:20], 1)

    result = engine.run(long, NUM_NEW_TOKENS, return_logits=True)

    assert result.sources == {"device": 16, "host": 56, "computed": 3}
    assert_same(result, plain(llama, long, NUM_NEW_TOKENS))
    assert engine.stats()[LAYERWISE] == 2


def test_a_cache_that_leaves_the_engine_is_loaded_whole(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    fill(engine, prompt)

    cache = engine.cache_for(prompt)

    assert cache.sources == {"host": 72, "computed": 3}
    assert cache.num_tokens == 72
    assert engine.stats()[LAYERWISE] == 0


class Faults(OffloadingHandler, LayerwiseHandler):
    """Loads that end badly once told to: at once, at a layer, or without anybody being told before the end."""

    def __init__(self, inner: OffloadingHandler, caches: CanonicalKVCaches) -> None:
        assert isinstance(inner, LayerwiseHandler)
        self._inner, self._by_layer, self._caches = inner, inner, caches
        self.fault = ""
        self._doomed: dict[TransferJobId, TransferSpec] = {}

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        return self._inner.transfer_async(job_id, spec)

    def num_refs(self) -> int:
        return self._by_layer.num_refs()

    def transfer_by_ref(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        if self.fault == "declined":
            return False
        if self.fault:
            self._doomed[job_id] = spec
        return self._by_layer.transfer_by_ref(job_id, spec)

    def wait_for_ref(self, job_ids: set[TransferJobId], ref_idx: int) -> bool:
        is_good = self._by_layer.wait_for_ref(job_ids, ref_idx)
        for spec in [self._doomed[job_id] for job_id in job_ids & self._doomed.keys()]:
            assert isinstance(spec.destination, GPULoadStoreSpec)
            self._caches.tensors[ref_idx].tensor[int(spec.destination.block_ids[1])] = 17
        return is_good and self.fault != f"layer {ref_idx}"

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(result.job_id, self._doomed.pop(result.job_id, None) is None)
            for result in self._inner.get_finished()
        ]

    def wait(self, job_ids: set[TransferJobId]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._inner.shutdown()


class FaultySpec(CPUOffloadingSpec):
    """Host memory whose loads fail once told to."""

    loads: Faults

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        store, load, *_ = super().get_handlers(kv_caches)
        self.loads = Faults(load.handler, kv_caches)
        yield store
        yield HandlerEntry(load.source, load.destination, self.loads)


@pytest.mark.parametrize("fault", ["declined", "layer 0", "layer 1", "layer 2", "at the end"])
@pytest.mark.parametrize("num_device_tokens", [0, 20])
def test_a_failed_load_is_computed_instead(
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    assert_same: AssertSame,
    fault: str,
    num_device_tokens: int,
) -> None:
    specs: list[FaultySpec] = []

    def make_spec(config: OffloadingConfig) -> FaultySpec:
        specs.append(FaultySpec(config))
        return specs[-1]

    engine = make_engine(llama, extra_config=HOST, make_spec=make_spec)
    fill(engine, prompt)
    if num_device_tokens:
        engine.run(prompt[:num_device_tokens], 1)
    num_held = num_device_tokens // 8 * 8
    before = engine.stats()[LAYERWISE]
    specs[-1].loads.fault = fault

    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)

    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    assert result.sources == ({"device": num_held} if num_held else {}) | {"computed": 75 - num_held}
    assert result.num_failed_load_blocks == (72 - num_held) // 8
    assert engine.stats()[LAYERWISE] == before + 1
    assert_same(result, expected)
    specs[-1].loads.fault = ""
    # Neither the device nor a tier has kept anything that was computed with the failed load.
    assert_same(engine.run(prompt, NUM_NEW_TOKENS, return_logits=True), expected)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    assert_same(engine.run(prompt, NUM_NEW_TOKENS, return_logits=True), expected)
    engine._pool.check()


def test_a_pass_that_breaks_between_two_layers_leaves_the_engine_usable(
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    assert_same: AssertSame,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    fill(engine, prompt)
    driver = engine._driver
    assert driver is not None
    wait = driver.wait_for_layer

    def break_at_the_second(layer_name: str) -> None:
        if layer_name == "layers.1":
            raise KeyboardInterrupt
        wait(layer_name)

    monkeypatch.setattr(driver, "wait_for_layer", break_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        engine.run(prompt, NUM_NEW_TOKENS)
    monkeypatch.undo()

    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)

    assert result.sources == {"host": 72, "computed": 3}
    assert_same(result, plain(llama, prompt, NUM_NEW_TOKENS))
    assert engine.stats()[LAYERWISE] == 2
    assert engine.drain(WAIT_S)
    assert engine.stats()["connector.open_jobs"] == 0
    engine._pool.check()


def test_an_interrupt_while_the_report_of_a_load_is_taken_loses_no_report(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    fill(engine, prompt)
    assert engine._driver is not None
    handlers = engine._driver._worker.worker
    take = handlers.get_finished

    def interrupt_once() -> list[TransferResult]:
        finished = take()
        if finished:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return finished

    monkeypatch.setattr(handlers, "get_finished", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        engine.run(prompt, NUM_NEW_TOKENS)

    assert engine.drain(WAIT_S)
    assert engine.stats()["connector.open_jobs"] == 0
    engine.drop_device_cache()
    assert engine.run(prompt, 1).sources == {"host": 72, "computed": 3}


def test_a_stream_that_is_closed_after_its_first_token_leaves_the_engine_usable(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    fill(engine, prompt)
    with engine.generate(prompt, NUM_NEW_TOKENS) as stream:
        next(iter(stream))

    engine.drop_device_cache()

    assert engine.run(prompt, 1).sources == {"host": 72, "computed": 3}
    assert engine.stats()["connector.failed_load_jobs"] == 0
