"""A real vLLM engine in this process, and what tests do with it; runs in a child of the test.

The engine core lives in the same process, so that a test can step it and check its state. Nothing here asserts.
"""

import importlib
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.e2e.vllm.answers import Answer
from tests.e2e.vllm.faulty_spec import FAULTS, CopyFaults
from tests.e2e.vllm.settings import make_transfers

from kvtier.base import ReqContext, make_offload_key

ENGINE_IMPORTS = "tests.e2e.vllm.engine_imports"
"""Module that an engine's process imports first."""

MAX_IDLE_STEPS = 20_000
"""Steps after which an engine that does not come to rest is taken for hung."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to start an engine; equal options make engines that tests may take for one another.

    Attributes:
        model: folder of the checkpoint.
        settings: kvtier's settings; None starts vLLM without kvtier.
        is_stock: give the settings to vLLM's own connector, with a worker that copies on CPUs; methods that look into
            kvtier's halves do not work then.
        num_device_blocks: size of the device pool.
        max_num_seqs: requests that run at a time.
        engine_arguments: more arguments of vLLM's ``LLM``.
        environment: variables of the engine's processes.
        is_asynchronous: plan each step while the one before it is computed, as vLLM does on GPUs by default.
        keeps_prefix_caching: keep prefixes of latents (MLA), which vLLM does not on CPUs without AMX tiles.
        has_state_kernels: put stand-ins for the kernels with which vLLM drafts beside recurrent states.
    """

    model: str
    settings: dict[str, Any] | None = None  # Any: a user's JSON
    num_device_blocks: int = 72
    max_num_seqs: int = 8
    engine_arguments: dict[str, Any] = field(default_factory=dict)  # Any: vLLM's own
    environment: dict[str, str] = field(default_factory=dict)
    is_asynchronous: bool = False
    keeps_prefix_caching: bool = False
    has_state_kernels: bool = False
    is_stock: bool = False

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def name(self) -> str:
        """Everything in one line."""
        return json.dumps(asdict(self), sort_keys=True)


BLOCK_TOKENS = 32
"""Tokens of a device block: small, so that short prompts have many."""

MAX_MODEL_TOKENS = 2048
CHUNK_TOKENS = 512
"""Most tokens of a step: prompts are computed in several chunks."""

PREEMPTIONS = "vllm:num_preemptions"

LEVELS = ("primary.capacity_blocks", "primary.free_blocks")
"""Numbers of kvtier that are not 0 in an engine at rest and count nothing."""

WHOLE_PROMPTS = {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_TOKENS}
"""Arguments for sampling with a seed: vLLM 0.32's CPU backend dies when a seeded request's prompt comes in chunks
("CPU Generator does not use offset")."""


def run_engine(options: EngineOptions, connection: Connection) -> None:
    """Start an engine, then carry out ``(method, arguments)`` from ``connection`` until None comes."""
    importlib.import_module(ENGINE_IMPORTS)
    os.environ.update(options.environment)
    FAULTS.plan(CopyFaults.of_environment())
    try:
        host = EngineHost(options)
    except BaseException as error:  # noqa: BLE001  # thread top: whatever it is, the test must see it
        connection.send((False, describe(error)))
        return
    connection.send((True, None))
    while (command := connection.recv()) is not None:
        method, arguments = command
        try:
            connection.send((True, getattr(host, method)(*arguments)))
        except BaseException as error:  # noqa: BLE001  # thread top: whatever it is, the test must see it
            connection.send((False, describe(error)))
    host.shutdown()
    connection.send((True, None))


def schedule_asynchronously() -> None:
    """Let engines of this process schedule asynchronously: vLLM switches that off on CPUs, whatever a user asks for.

    Nothing of it needs a device: with two steps under way the next one is planned before the last one's tokens and
    reports are known.
    """
    from vllm.config import VllmConfig

    stock = VllmConfig.__post_init__

    def switch_on(self: VllmConfig) -> None:
        stock(self)
        self.scheduler_config.async_scheduling = True

    VllmConfig.__post_init__ = switch_on


def keep_prefix_caching() -> None:
    """Let engines of this process keep prefixes of latents, which vLLM switches off on CPUs without AMX tiles.

    Its reference attention cannot compute several tokens of a prompt behind others that are held. A single one it
    computes with the kernel for answers, which reads the whole cache: so what is behind a hit must be one token.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def keep(vllm_config: Any) -> None:  # Any: vLLM's own
        stock(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = staticmethod(keep)


def fork_workers() -> None:
    """Let engines of this process fork their workers, as vLLM does where nothing speaks against it.

    On CPUs it starts Python anew for each, whatever a user asks for, and each spends ten seconds to import vLLM.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def fork(vllm_config: Any) -> None:  # Any: vLLM's own
        stock(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(fork)


def describe(error: BaseException) -> str:
    """Return the error with its causes and where it came from."""
    return "".join(traceback.format_exception(error))


class EngineHost:
    """One ``LLM`` whose engine core can be stepped by hand."""

    def __init__(self, options: EngineOptions) -> None:
        from tests.e2e.vllm import failing_tier, state_kernels, throttled_tier
        from vllm import LLM

        failing_tier.register()
        throttled_tier.register()
        if options.is_asynchronous:
            schedule_asynchronously()
        if options.keeps_prefix_caching:
            keep_prefix_caching()
        if options.has_state_kernels:
            state_kernels.register()
        fork_workers()
        self._has_kvtier = options.settings is not None and not options.is_stock
        self._has_connector = options.settings is not None
        self._counted: Mapping[str, float] = {}
        transfer_config = make_transfers(options.settings, is_stock=options.is_stock)
        arguments: dict[str, Any] = {  # Any: vLLM's own
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_TOKENS,
            "max_num_batched_tokens": CHUNK_TOKENS,
            "block_size": BLOCK_TOKENS,
            "disable_log_stats": False,
            **options.engine_arguments,
        }
        self._llm = LLM(
            options.model,
            num_gpu_blocks_override=options.num_device_blocks,
            max_num_seqs=options.max_num_seqs,
            kv_transfer_config=transfer_config,
            **arguments,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core

    def start_over(self) -> None:
        """Forget all blocks and counts, so that the next test finds an engine that is as good as new."""
        FAULTS.plan(CopyFaults())
        if self._has_connector:
            self.settle()
            if self._has_kvtier:
                self.check()
            assert self.reset()
        else:
            assert self.forget_device()
        assert not self.num_known_requests()
        self._counted = self._totals()

    def _totals(self) -> Mapping[str, float]:
        """Return what has been counted since the engine started."""
        metrics = {
            metric.name: float(metric.value) for metric in self._llm.get_metrics() if hasattr(metric, "value")
        }
        return {**metrics, **(self._scheduler_half.stats() if self._has_kvtier else {})}

    def plan_faults(self, faults: CopyFaults) -> None:
        """Let copies fail from now on; workers in processes of their own are told by their environment alone."""
        FAULTS.plan(faults)

    @property
    def _scheduler_half(self) -> Any:  # Any: reached through vLLM's objects
        return self._core.scheduler.connector._scheduler

    def generate(self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Answer]:
        """Answer the prompts together, as many at a time as the engine runs."""
        return [self._answer(output) for output in self._generate(prompts, sampling)]

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]
    ) -> Any:  # Any: vLLM's outputs
        from vllm import SamplingParams

        parameters = SamplingParams(**{"logprobs": 1, "ignore_eos": True, **sampling})
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._llm.generate(requests, parameters, use_tqdm=False)

    def generate_requests(
        self,
        requests: Sequence[Mapping[str, Any]],
        sampling: dict[str, Any],
        adapter: str = "",  # Any: as above
    ) -> list[Answer]:
        """Answer requests that say more than tokens, one after the other, with an adapter in a folder if given."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        parameters = SamplingParams(**{"logprobs": 1, "ignore_eos": True, **sampling})
        more = {"lora_request": LoRARequest(adapter, 1, adapter)} if adapter else {}
        return [
            self._answer(output)
            for request in requests
            for output in self._llm.generate([dict(request)], parameters, use_tqdm=False, **more)
        ]

    def sleep_and_wake(self, level: int) -> None:
        """Sleep, and wake up again."""
        self._llm.sleep(level=level)
        self._llm.wake_up()

    def hit_sources(self) -> dict[str, int]:
        """Return vLLM's own count of prompt tokens that were found, by the place that held them."""
        name = "vllm:prompt_tokens_cached_by_source"
        found = [metric for metric in self._llm.get_metrics() if metric.name == name]
        return {str(metric.labels.get("source")): int(metric.value) for metric in found}

    def generate_in_turn(self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Answer]:
        """Answer one prompt after the other."""
        return [answer for prompt in prompts for answer in self.generate([prompt], sampling)]

    def time_alone(self, prompt: Sequence[int], sampling: dict[str, Any]) -> tuple[float, Answer]:
        """Answer one prompt of which the device holds nothing; return the seconds that took, and the answer."""
        assert self.forget_device()
        began_s = time.monotonic()
        (answer,) = self.generate([prompt], sampling)
        took_s = time.monotonic() - began_s
        self.settle()
        return took_s, answer

    def first_token(
        self, prompt: Sequence[int], sampling: dict[str, Any], forgets_device: bool
    ) -> tuple[float, Answer, dict[str, int]]:
        """Answer one prompt; return the seconds to its first token, the answer, and the tokens found by origin."""
        if forgets_device:
            assert self.forget_device()
        prefix = "connector.loaded_tokens."
        before = self.stats()
        (output,) = self._generate([prompt], sampling)
        assert output.metrics is not None
        answer = self._answer(output)
        self.settle()
        sources = {
            name.removeprefix(prefix): int(value - before.get(name, 0.0))
            for name, value in self.stats().items()
            if name.startswith(prefix) and value != before.get(name, 0.0)
        }
        if num_device := answer.num_cached_tokens - sum(sources.values()):
            sources["device"] = num_device
        return output.metrics.first_token_latency, answer, sources

    def kv_groups(self) -> list[tuple[int, int, bool]]:
        """Return of each KV group the tokens of a block, its bytes, and whether it is a recurrent state."""
        groups = self._core.scheduler.connector._connector.spec.config.groups
        layouts = self._scheduler_half.layouts
        return [
            (layout.block_tokens, group.page_size_bytes, layout.is_state)
            for layout, group in zip(layouts, groups, strict=True)
        ]

    def set_disk_rate(self, bytes_per_s: float) -> None:
        """Let the disk of throttled tiers deliver at another rate from now on."""
        from tests.e2e.vllm.throttled_tier import DISK

        DISK.set_rate(bytes_per_s)

    def settle(self) -> None:
        """Step an engine without requests until its stores have ended and the tiers are done."""
        for _ in range(MAX_IDLE_STEPS):
            if not self._core.scheduler.has_requests():
                break
            self._core.step_fn()
        else:
            raise AssertionError("the engine does not come to rest")
        if not self._has_kvtier:
            return
        manager = self._scheduler_half.manager
        if hasattr(manager, "drain"):
            assert manager.drain(60.0).has_ended

    def stats(self) -> dict[str, float]:
        """Return kvtier's gauges, and what it has counted since the engine was as good as new."""
        stats: dict[str, float] = self._scheduler_half.stats()
        return {
            name: value if name in LEVELS else value - self._counted.get(name, 0.0)
            for name, value in stats.items()
        }

    def scheduler(self) -> tuple[str, int]:
        """Return the class of vLLM's scheduler, and how many steps it has under way at most."""
        return type(self._core.scheduler).__name__, int(self._core.batch_queue_size)

    def speculation(self) -> dict[str, int]:
        """Return vLLM's counters of drafts, by name."""
        start = "vllm:spec_decode_num_"
        return {
            name.removeprefix(start): int(value - self._counted.get(name, 0.0))
            for name, value in self._totals().items()
            if name.startswith(start)
        }

    def check(self) -> None:
        """Let the manager check its own invariants."""
        self._scheduler_half.manager.check()

    def reset(self) -> bool:
        """Forget every block, on the device and in kvtier."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def forget_device(self) -> bool:
        """Empty the device's prefix cache: what is found afterwards comes from kvtier."""
        return bool(self._llm.reset_prefix_cache())

    def zero_slot(self, slot: int) -> None:
        """Zero what host memory holds of one block."""
        self._rows[slot] = 0

    def zero_held_block(self, prompt: Sequence[int], group: int, token: int) -> None:
        """Zero what host memory holds of the block of one KV group that covers a token of a prompt."""
        self._rows[self._slot_of(prompt, group, token)] = 0

    def swap_held_blocks(self, prompt: Sequence[int], other: Sequence[int], group: int, token: int) -> None:
        """Swap what host memory holds of the blocks of one KV group that cover a token of two prompts."""
        self.swap_slots(self._slot_of(prompt, group, token), self._slot_of(other, group, token))

    def flip_held_byte(self, prompt: Sequence[int], group: int, token: int, byte: int) -> None:
        """Flip a bit of one byte of what host memory holds of the block that covers a token of a prompt."""
        self._rows[self._slot_of(prompt, group, token), byte] ^= 0x40

    def held_bytes(self, prompt: Sequence[int], token: int, group: int = 0) -> bytes:
        """Return what host memory holds of the block of one KV group that covers a token of a prompt."""
        return bytes(self._rows[self._slot_of(prompt, group, token)].numpy().tobytes())

    def plant_bytes(self, prompt: Sequence[int], token: int, row: bytes, group: int = 0) -> None:
        """Replace what host memory holds of such a block."""
        import torch

        planted = torch.frombuffer(bytearray(row), dtype=torch.int8)
        self._rows[self._slot_of(prompt, group, token)] = planted

    def key_of(self, prompt: Sequence[int], group: int, token: int) -> bytes:
        """Return the key of the block of one KV group that covers a token of a prompt."""
        # A request that is never scheduled: its hashes name the keys.
        request = self._request_of(prompt)
        layout = self._scheduler_half.layouts[group]
        last_hash = (token // layout.block_tokens + 1) * layout.hashes_per_block - 1
        return make_offload_key(request.block_hashes[last_hash], group)

    def state_groups(self) -> dict[int, int]:
        """Return the KV groups that keep a recurrent state, with the tokens of their blocks."""
        return {one.idx: one.block_tokens for one in self._scheduler_half.layouts if one.is_state}

    def _slot_of(self, prompt: Sequence[int], group: int, token: int) -> int:
        key, context = self.key_of(prompt, group, token), ReqContext("test")
        slots = self._scheduler_half.manager.prepare_load([key], context)
        self._scheduler_half.manager.complete_load([key], context)
        return int(slots.block_ids[0])

    def host_rows(self) -> tuple[int, int]:
        """Return the number of rows in host memory, and the bytes of each."""
        spec = self._core.scheduler.connector._connector.spec
        return int(spec.num_blocks), int(spec.row_stride)

    def row_parts(self) -> tuple[list[bool], int]:
        """Return which groups every worker holds alike, and the parts of a row."""
        spec = self._core.scheduler.connector._connector.spec
        return [group.is_replicated for group in spec.config.groups], int(spec.num_row_parts)

    def num_preemptions(self) -> int:
        """Return how often vLLM took the device blocks of a running request."""
        return int(self._totals()[PREEMPTIONS] - self._counted.get(PREEMPTIONS, 0.0))

    def _request_of(self, prompt: Sequence[int]) -> Any:  # Any: vLLM's Request
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id="test",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )

    def swap_slots(self, slot: int, other: int) -> None:
        """Swap what host memory holds of two blocks."""
        self._rows[[slot, other]] = self._rows[[other, slot]]

    @property
    def _rows(self) -> Any:  # Any: reached through vLLM's objects
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker._spec._handlers.rows

    def abort_while_loading(self, prompt: Sequence[int]) -> bool:
        """Add a request, abort it as soon as its load is under way, and step until the engine rests.

        Returns:
            Whether a load was under way.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": list(prompt)}, SamplingParams(max_tokens=4))
        is_loading = False
        for _ in range(MAX_IDLE_STEPS):
            is_loading = any(
                request.status.name == "WAITING_FOR_REMOTE_KVS"
                for request in self._core.scheduler.requests.values()
            )
            if is_loading:
                break
            engine.step()
        engine.abort_request(["aborted"])
        for _ in range(MAX_IDLE_STEPS):
            if not engine.has_unfinished_requests() and not self._core.scheduler.requests:
                return is_loading
            engine.step()
            self._core.step_fn()
        raise AssertionError("the aborted request is never let go")

    def abort_while_computing(self, prompt: Sequence[int]) -> None:
        """Add a request and abort it while its first step is carried out, then step until the engine rests."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": list(prompt)}, SamplingParams(max_tokens=4))
        self._core.aborts_queue.put_nowait(list(self._core.scheduler.requests))
        self._core.step_fn()
        engine.abort_request(["aborted"])
        self.settle()

    def num_known_requests(self) -> int:
        """Return how many requests the scheduler still knows."""
        return len(self._core.scheduler.requests)

    def shutdown(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    @staticmethod
    def _answer(output: Any) -> Answer:  # Any: vLLM's RequestOutput
        (completion,) = output.outputs
        assert completion.finish_reason == "length", completion.finish_reason
        tokens = tuple(completion.token_ids)
        logprobs = tuple(
            options[token].logprob for options, token in zip(completion.logprobs, tokens, strict=True)
        )
        return Answer(tokens, logprobs, output.num_cached_tokens or 0)
