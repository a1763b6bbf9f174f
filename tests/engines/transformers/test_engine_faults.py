"""Loads that fail, passes that break, streams that end early: no wrong token, no lost block."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
)

from kvtier.base import (
    CanonicalKVCaches,
    HandlerEntry,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.config import OffloadingConfig
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engines.transformers import GenerationResult, KVTierEngine
from kvtier.engines.transformers.paged_cache import PagedKVCache
from kvtier.engines.transformers.request import Request
from kvtier.errors import EngineStateError

HOST = {"cpu_bytes_to_use": "2MiB"}
WAIT_S = 30.0
NUM_NEW_TOKENS = 12

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[GenerationResult, Expected], None]
Difference = Callable[[GenerationResult, Expected], float]


class Tiny(Protocol):
    """The models that conftest.py builds."""

    def llama(self) -> LlamaForCausalLM: ...

    def gpt2(self) -> PreTrainedModel: ...


def tamper_with_loads(engine: KVTierEngine, tamper: Callable[[Request], None]) -> None:
    """Give device blocks of each request other bytes when its load has ended. For one engine of one test."""
    complete = engine._device.complete_load

    def complete_tampered(request: Request, num_external_tokens: int, failed: Collection[int]) -> int:
        tamper(request)
        return complete(request, num_external_tokens, failed)

    engine._device.complete_load = complete_tampered  # type: ignore[method-assign]  # no public switch plants this fault


def zero_block(pages: PagedKVCache, block_ids: list[int], index: int) -> None:
    pages.pages[block_ids[index]].zero_()


def swap_block(pages: PagedKVCache, block_ids: list[int], index: int) -> None:
    """Put another prompt's block in its place.

    Two blocks of one prefix may change places unseen: keys carry positions, and attention sums over a set.
    """
    foreign = next(number for number in range(len(pages.pages)) if number not in block_ids)
    assert pages.pages[foreign].any()
    pages.pages[block_ids[index]].copy_(pages.pages[foreign])


@pytest.mark.parametrize("tamper", [zero_block, swap_block])
@pytest.mark.parametrize("index", range(9))
def test_one_wrong_block_among_those_loaded_is_seen_in_the_logits(
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    prompt_of: PromptOf,
    tamper: Callable[[PagedKVCache, list[int], int], None],
    index: int,
    difference: Difference,
) -> None:
    expected = plain(llama, prompt, 1)
    engine = make_engine(llama, num_device_blocks=20, extra_config=HOST)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    engine.run(prompt_of(1, 80), 1)
    tamper_with_loads(engine, lambda request: tamper(engine._device.pages, request.block_ids, index))
    result = engine.run(prompt, 1, return_logits=True)
    assert result.sources == {"host": 72, "computed": 3}
    assert difference(result, expected) > 10


class FailingLoads(OffloadingHandler):
    """A handler whose transfers end badly once it is told so, are not even begun, or wait while Ctrl-C comes."""

    def __init__(self, inner: OffloadingHandler) -> None:
        self.inner = inner
        self.fault = ""
        self.num_waits = 0
        self._jobs: list[TransferJobId] = []

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        if self.fault == "declines":
            return False
        if self.fault == "raises":
            raise OSError("the device is gone")
        if self.fault == "fails":
            self._jobs.append(job_id)
            return True
        return self.inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        failed, self._jobs = self._jobs, []
        return [TransferResult(job_id, success=False) for job_id in failed] + self.inner.get_finished()

    def wait(self, job_ids: set[TransferJobId]) -> None:
        self.num_waits += 1
        if self.fault == "interrupts":
            self.fault = ""
            os.kill(os.getpid(), signal.SIGINT)
        self.inner.wait(job_ids)

    def shutdown(self) -> None:
        self.inner.shutdown()


class FailingSpec(CPUOffloadingSpec):
    """Host memory whose loads fail once told to."""

    loads: FailingLoads

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        store, load, *_ = super().get_handlers(kv_caches)
        self.loads = FailingLoads(load.handler)
        yield store
        yield HandlerEntry(load.source, load.destination, self.loads)


@pytest.mark.parametrize("fault", ["declines", "raises", "fails"])
def test_a_failed_load_is_computed_instead(
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    fault: str,
    assert_same: AssertSame,
) -> None:
    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    specs: list[FailingSpec] = []

    def make_spec(config: OffloadingConfig) -> FailingSpec:
        specs.append(FailingSpec(config))
        return specs[-1]

    engine = make_engine(llama, extra_config=HOST, make_spec=make_spec)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    specs[-1].loads.fault = fault
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"computed": 75}
    assert result.num_failed_load_blocks == 9
    assert_same(result, expected)
    specs[-1].loads.fault = ""
    engine.drop_device_cache()
    assert engine.run(prompt, 1).sources == {"host": 72, "computed": 3}
    engine._device.pool.check()


def test_ctrl_c_while_a_load_is_waited_for_comes_when_it_has_ended(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    specs: list[FailingSpec] = []

    def make_spec(config: OffloadingConfig) -> FailingSpec:
        specs.append(FailingSpec(config))
        return specs[-1]

    engine = make_engine(llama, extra_config=HOST, make_spec=make_spec)
    tokens = engine.run(prompt, 1).tokens
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    specs[-1].loads.fault = "interrupts"
    with pytest.raises(KeyboardInterrupt):
        engine.run(prompt, 1)
    assert specs[-1].loads.num_waits == 1
    assert engine._device.pool.num_free_blocks == 32
    engine._device.pool.check()
    assert engine.stats()["connector.open_jobs"] == 0
    engine.drop_device_cache()
    result = engine.run(prompt, 1)
    assert (result.sources, result.tokens) == ({"host": 72, "computed": 3}, tokens)


def test_a_stream_that_is_closed_early_leaves_the_engine_usable(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    tokens, _ = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, extra_config=HOST)
    stream = engine.generate(prompt, NUM_NEW_TOKENS)
    first = next(stream)
    with pytest.raises(EngineStateError, match="is being served"):
        engine.run(prompt, 1)
    with pytest.raises(EngineStateError, match="has not ended"):
        _ = stream.result
    stream.close()
    assert stream.result.tokens == [first] == tokens[:1]
    assert engine._device.pool.num_free_blocks == 32
    assert engine.run(prompt, NUM_NEW_TOKENS).tokens == tokens


class Interruption:
    """Breaks one forward pass of a model, at a given call."""

    def __init__(self, model: torch.nn.Module, call: int, error: BaseException | None) -> None:
        self._left = call
        self._error = error
        self._hook = model.register_forward_hook(self._break)

    def _break(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._hook.remove()
            if self._error is None:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise self._error


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), None], ids=["error", "ctrl-c"])
def test_a_forward_pass_that_breaks_leaves_no_wrong_block_behind(
    tiny: Tiny,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    call: int,
    error: BaseException | None,
    assert_same: AssertSame,
) -> None:
    model = tiny.llama()
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = make_engine(model, extra_config=HOST)
    handler = signal.getsignal(signal.SIGINT)
    Interruption(model, call, error)
    with pytest.raises(RuntimeError if error else KeyboardInterrupt):
        engine.run(prompt, NUM_NEW_TOKENS)
    assert signal.getsignal(signal.SIGINT) is handler
    assert engine._device.pool.num_free_blocks == 32
    engine._device.pool.check()
    assert engine.drain(WAIT_S)
    assert engine.stats()["connector.open_jobs"] == 0
    for _ in range(2):
        result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
        assert_same(result, expected)
        engine.drop_device_cache()
    assert result.sources == {"host": 72, "computed": 3}


def test_a_shut_down_engine_says_so(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    with engine:
        engine.run(prompt, 1)
    engine.shutdown()
    with pytest.raises(EngineStateError, match="shut down"):
        engine.run(prompt, 1)


FORKING = """
import os, sys
from tests.small_engine import prompt_of, running_engine
from kvtier.errors import EngineStateError
from pathlib import Path
with running_engine(Path(sys.argv[1])) as engine:
    engine.run(prompt_of(1), 2)
    child = os.fork()
    if child == 0:
        for call in (lambda: engine.run(prompt_of(2), 2), lambda: engine.drain(1.0), engine.reset):
            try:
                call()
            except EngineStateError as error:
                assert "is a fork" in str(error)
            else:
                os._exit(1)
        engine.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    engine.drop_device_cache()
    assert engine.run(prompt_of(1), 2).sources["computed"] < len(prompt_of(1))
"""


@pytest.mark.slow
def test_a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr


def test_a_shutdown_ends_the_request_that_is_being_served(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    stream = engine.generate(prompt, NUM_NEW_TOKENS)
    next(stream)
    engine.shutdown()
    assert engine._device.pool.num_free_blocks == 32
    with pytest.raises(EngineStateError, match="ended by shutdown"):
        next(stream)
    assert len(stream.result.tokens) == 1


def test_blocks_are_free_again_even_when_the_end_of_a_request_fails(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    server = engine._server
    finish = server._finish

    def fail(request: Request) -> None:
        finish(request)
        raise OSError("the end failed")

    server._finish = fail  # type: ignore[method-assign]  # a fault that no public switch can plant
    with pytest.raises(OSError, match="the end failed"):
        engine.run(prompt, max_new_tokens=2)
    server._finish = finish  # type: ignore[method-assign]  # the fault is over
    assert engine.stats()["device.free_blocks"] == engine.stats()["device.num_blocks"]
    assert len(engine.run(prompt, max_new_tokens=2).tokens) == 2
