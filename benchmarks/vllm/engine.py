"""A real vLLM engine with the calls that benchmarks need; it lives in a child process.

The engine core runs in that same process, so that its idle steps can be run one by one and kvtier's counters read.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.tiering.manager import TieringOffloadingManager

MAX_IDLE_STEPS = 100_000
"""Steps after which an engine that is not idle counts as hung."""

DRAIN_S = 120.0
"""Guard against a tier that hangs."""

LOADED_TOKENS = "connector.loaded_tokens."
"""Prefix of the counters of loaded tokens; the tier's name follows."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Otherwise an engine with a connector computes with a core less than one without.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}


STOCK_SPEC = {"spec_name": "CPUHostTieringSpec", "spec_module_path": "tests.e2e.vllm.stock_cpu_spec"}
"""vLLM's own offloading with a worker that copies on the CPU."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine.

    Attributes:
        model: folder of the checkpoint.
        settings: kvtier's settings; None: vLLM without kvtier.
        num_device_blocks: size of the device pool, the null block included.
        block_tokens: tokens of a device block.
        max_model_tokens: longest request, with its answer.
        step_tokens: most tokens computed in a step.
        is_stock: give the settings to vLLM's own connector, with the tests' worker for CPUs.
    """

    model: str
    settings: dict[str, Any] | None  # Any: a user's JSON
    num_device_blocks: int = 34
    block_tokens: int = 128
    max_model_tokens: int = 4096
    step_tokens: int = 4096
    is_stock: bool = False

    @property
    def transfer_config(self) -> dict[str, Any] | None:  # Any: vLLM's own
        """What vLLM gets as ``kv_transfer_config``."""
        if self.settings is None:
            return None
        if self.is_stock:
            return {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": STOCK_SPEC | self.settings,
            }
        return {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.settings,
        }


@dataclass(frozen=True, slots=True)
class Served:
    """The answer to a prompt.

    Attributes:
        num_cached_tokens: prompt tokens that were not computed.
        time_s: from the submission of the prompt to the end of the answer.
        loaded_tokens: tokens that kvtier loaded, by tier.
        num_open_jobs: transfers that had not ended with the answer.
    """

    num_cached_tokens: int
    time_s: float
    loaded_tokens: dict[str, int]
    num_open_jobs: int


class Engine:
    """One vLLM ``LLM`` with its core in this process.

    Args:
        options: its settings.
    """

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM

        self._llm = LLM(
            options.model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=options.block_tokens,
            num_gpu_blocks_override=options.num_device_blocks,
            max_model_len=options.max_model_tokens,
            max_num_batched_tokens=options.step_tokens,
            max_num_seqs=8,
            use_tqdm_on_load=False,
            kv_transfer_config=options.transfer_config,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._has_kvtier = options.settings is not None and not options.is_stock

    def serve(self, prompt: Sequence[int], num_answer_tokens: int) -> Served:
        """Answer the prompt; its stores may still run afterwards."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_answer_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        request = {"prompt_token_ids": list(prompt)}
        loaded_before = self._loaded_tokens()
        start_s = time.perf_counter()
        (output,) = self._llm.generate([request], sampling, use_tqdm=False)
        time_s = time.perf_counter() - start_s
        loaded = {
            source: num_tokens - loaded_before.get(source, 0)
            for source, num_tokens in self._loaded_tokens().items()
            if num_tokens != loaded_before.get(source, 0)
        }
        num_open_jobs = int(self.stats().get("connector.open_jobs", 0))
        return Served(output.num_cached_tokens or 0, time_s, loaded, num_open_jobs)

    def serve_together(
        self, prompts: Sequence[Sequence[int]], at_once: int, num_answer_tokens: int
    ) -> list[tuple[float, int]]:
        """Answer the prompts, so many at a time: the next one begins when an answer is complete.

        Returns:
            For each prompt the seconds to its first token, and its tokens that were not computed.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_answer_tokens, ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        left = list(enumerate(prompts))[::-1]
        begun_s: dict[int, float] = {}
        first_s: dict[int, float] = {}
        found: dict[int, tuple[float, int]] = {}
        while left or engine.has_unfinished_requests():
            while left and len(begun_s) - len(found) < at_once:
                number, prompt = left.pop()
                begun_s[number] = time.perf_counter()
                engine.add_request(f"prompt-{number}", {"prompt_token_ids": list(prompt)}, sampling)
            for output in engine.step():
                number = int(output.request_id.split("-")[1])
                first_s.setdefault(number, time.perf_counter() - begun_s[number])
                if output.finished:
                    found[number] = first_s[number], output.num_cached_tokens or 0
        return [found[number] for number in range(len(prompts))]

    def serve_without(self, prompt: Sequence[int], num_answer_tokens: int) -> Served:
        """Answer the prompt like vLLM without a connector; to be called when idle.

        Before each call of a connector vLLM only checks whether there is one. Same process, same memory: two processes
        of one program differ by more than the measured cost.
        """
        from vllm.distributed.kv_transfer import kv_transfer_state

        scheduler = self._core.scheduler
        connectors = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT  # noqa: SLF001  # there is no public way
        has_kvtier = self._has_kvtier
        self._has_kvtier = False
        scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None  # noqa: SLF001
        try:
            return self.serve(prompt, num_answer_tokens)
        finally:
            scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = connectors  # noqa: SLF001
            self._has_kvtier = has_kvtier

    def settle(self) -> None:
        """Step the engine until its stores have ended and the tiers are done.

        Raises:
            RuntimeError: it does not become idle.
        """
        for _ in range(MAX_IDLE_STEPS):
            if not self._core.scheduler.has_requests():
                break
            self._core.step_fn()
        else:
            raise RuntimeError(f"the engine is not at rest after {MAX_IDLE_STEPS} steps")
        manager = self._scheduler_half.manager if self._has_kvtier else None
        if isinstance(manager, TieringOffloadingManager) and not manager.drain(DRAIN_S).has_ended:
            raise RuntimeError(f"the tiers are not done after {DRAIN_S} s")

    def stats(self) -> dict[str, float]:
        """Return kvtier's counters and gauges; empty without kvtier."""
        return self._scheduler_half.stats() if self._has_kvtier else {}

    def shutdown(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    @property
    def _scheduler_half(self) -> OffloadingConnectorScheduler:
        half = self._core.scheduler.connector._scheduler  # noqa: SLF001  # vLLM's own metrics lag by a second
        assert isinstance(half, OffloadingConnectorScheduler)
        return half

    def _loaded_tokens(self) -> dict[str, int]:
        return {
            name.removeprefix(LOADED_TOKENS): int(value)
            for name, value in self.stats().items()
            if name.startswith(LOADED_TOKENS)
        }


def run_engine(options: EngineOptions, connection: Connection) -> None:
    """Start an engine, then run each ``(method, arguments)`` from ``connection`` until None arrives.

    Effects:
        Sends None when the engine has started or ended, and what each method returned; on an error the connection
        ends, and the interpreter prints the error.
    """
    os.environ.update(ENVIRONMENT)
    with connection:
        engine = Engine(options)
        connection.send(None)
        while (command := connection.recv()) is not None:
            method, arguments = command
            connection.send(getattr(engine, method)(*arguments))
        engine.shutdown()
        connection.send(None)
