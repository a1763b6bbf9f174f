"""Both halves of the connector over real host memory, with a made-up model whose bytes depend on what real ones do.

A block's keys and values follow from the weights, the tokens up to its end, the positions and the adapter. Each
computation adds noise as large as another batch does, so that equal blocks are rarely equal in bytes.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.connector.fakes import (
    HASH_TOKENS,
    FakeBlocks,
    FakeRequest,
    hash_tokens,
    make_first_step,
    make_later_step,
)

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, OffloadKey
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engines.common.step import StepOutput, WorkerOutput, begin_step, end_step
from kvtier.testing.clock import ManualClock
from kvtier.tiering.spec import TieringOffloadingSpec

SHAPE = (2, 2, 2, HASH_TOKENS, 16)
"""Layers, keys and values, heads, tokens, numbers of a head."""

PAGE_BYTES = int(np.prod(SHAPE)) * 2
NOISE = 0.004
"""Relative error of a number: what rounding to bfloat16 is."""

Numbers = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating[Any]]  # Any: single or double, as it comes
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Model:
    """What a block's bytes depend on besides its tokens.

    Attributes:
        weights: seed of the weights.
        drift: how much of other weights is mixed in, as after more training.
        adapter: seed of an adapter; 0: none.
        theta: base of the rotary embedding.
        scale: factor of positions.
        shift: tokens by which positions are off.
        magnitude: factor of rotated keys.
    """

    weights: int = 1
    drift: float = 0.0
    adapter: int = 0
    theta: float = 10_000.0
    scale: float = 1.0
    shift: int = 0
    magnitude: float = 1.0

    def compute(self, tokens: Sequence[int], block: int) -> Numbers:
        """Return keys and values of a block of a prompt, shape SHAPE."""
        name = hash_tokens(tokens)[block]
        numbers = _draw(self.weights, name)
        if self.drift:
            numbers = (1 - self.drift) * numbers + self.drift * _draw(self.weights + 1000, name)
        if self.adapter:
            numbers = numbers + 0.3 * _draw(self.adapter + 2000, name)
        positions = np.arange(block * HASH_TOKENS, (block + 1) * HASH_TOKENS) + self.shift
        numbers[:, 0] = self.magnitude * rotate(numbers[:, 0], positions * self.scale, self.theta)
        return numbers.astype(np.float32)


def rotate(keys: Floats, positions: Floats, theta: float) -> Floats:
    """Return keys of shape (..., tokens, numbers) rotated by their positions, the halves of a head as pairs."""
    half = keys.shape[-1] // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    first, second = keys[..., :half], keys[..., half:]
    rotated = [
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    ]
    return np.concatenate(rotated, axis=-1)


def to_bytes(numbers: Numbers) -> Bytes:
    """Return numbers as bfloat16, rounded to nearest."""
    bits = np.ascontiguousarray(numbers, np.float32).reshape(-1).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).view(np.uint8)


def to_numbers(page: Bytes) -> Numbers:
    """Return a page of bfloat16 as numbers, shape SHAPE."""
    bits = np.ascontiguousarray(page).view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(SHAPE)


def _draw(seed: int, name: bytes) -> npt.NDArray[np.float64]:
    return np.random.default_rng([seed, *name]).standard_normal(SHAPE)


class AuditedEngine:
    """Serves one prompt after another; nothing stays on its device.

    Args:
        settings: of kvtier.
        model: what it computes with.
        num_slots: blocks of host memory.
        audits_first_hits: whether some of the first hits are audited whatever the ratio.

    Attributes:
        clock: the time.
        compute_s: seconds that computing a prompt takes, given its uncached tokens.
        wait_s: seconds between two steps while a request waits for a tier.
        half: the scheduler half.
        held: what is held, by key: the prompt and the block's number.
        num_hits: requests of which something was found.
    """

    def __init__(
        self,
        model: Model = Model(),
        num_slots: int = 64,
        *,
        audits_first_hits: bool = False,
        **settings: object,
    ) -> None:
        self.clock = ManualClock()
        self.model = model
        self.compute_s: Callable[[int], float] = lambda num_tokens: 0.0
        self.wait_s = 0.0
        row_bytes = 4096 if "secondary_tiers" in settings else PAGE_BYTES
        config = OffloadingConfig(
            f"audited-{uuid.uuid4()}",
            ModelIdentity("model"),
            (KVGroup(HASH_TOKENS, ("layer",), PAGE_BYTES),),
            HASH_TOKENS,
            kv_dtype="torch.bfloat16",
            audits_first_hits=audits_first_hits,
            extra_config={"cpu_bytes_to_use": num_slots * row_bytes, **settings},
        )
        make_spec = TieringOffloadingSpec if "secondary_tiers" in settings else CPUOffloadingSpec
        self.spec = make_spec(config)
        self.half = OffloadingConnectorScheduler(self.spec, clock=self.clock, wall_clock=self.clock)
        self._worker_spec = make_spec(replace(config, rank=0))
        self.worker = OffloadingConnectorWorker(self._worker_spec, pause=lambda _: None)
        self._device = torch.zeros((64, PAGE_BYTES), dtype=torch.int8)
        tensor = CanonicalKVCacheTensor(self._device, PAGE_BYTES)
        self.worker.register_kv_caches(CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, PAGE_BYTES)]]))
        self._noise = np.random.default_rng(0)
        self._num_requests = 0
        self.num_hits = 0
        self.held: dict[OffloadKey, tuple[list[int], int]] = {}
        self._step(StepOutput())  # both halves compare their regions

    @property
    def rows(self) -> Bytes:
        """Host memory, shape (slots, PAGE_BYTES)."""
        handlers = self._worker_spec._handlers
        assert handlers is not None
        return handlers.rows.numpy().view(np.uint8)

    def row_of(self, key: OffloadKey) -> Bytes | None:
        """Return the bytes that are held under a key."""
        manager: Any = getattr(self.half.manager, "primary_tier", self.half.manager)  # Any: of two kinds
        block = manager.table.get_block(key)
        return None if block is None else self.rows[block.block_id]

    def serve(self, tokens: list[int], num_new_tokens: int = 1) -> int:
        """Serve a prompt to its end; return the tokens that were loaded."""
        self._num_requests += 1
        request = FakeRequest(f"r{self._num_requests}", list(tokens))
        table = list(range(-(-len(tokens) // HASH_TOKENS)))
        while (num_loaded := self.half.get_num_new_matched_tokens(request, 0)[0]) is None:
            self._step(StepOutput())
            self.clock.advance(self.wait_s)
        state = self.half._requests[request.request_id]
        self.num_hits += state.search.found is not None and state.search.found.end_token > 0
        self.half.update_state_after_alloc(request, FakeBlocks((table,)), num_loaded)
        if num_loaded:
            while request.request_id not in self._step(StepOutput()):
                self.worker.wait_for_loads()
        self._compute(tokens, num_loaded // HASH_TOKENS)
        step = make_first_step(request.request_id, (table,), len(tokens) - num_loaded, num_loaded)
        self._step(step)
        self.clock.advance(self.compute_s(len(tokens) - num_loaded))
        keys = list(state.keys[0])
        for _ in range(num_new_tokens):
            request.tokens.append(7)
            decode = make_later_step(request.request_id, len(request.tokens) - 1, 1)
            self._step(decode)
            self.clock.advance(self.wait_s)
        self.half.request_finished(request)
        self.settle()
        self.held |= {key: (tokens, number) for number, key in enumerate(keys)}
        return num_loaded

    def settle(self) -> None:
        """Step until every store and comparison has ended."""
        self._step(StepOutput())
        while self.half.has_open_stores():
            self.worker.worker.wait(set(self.half.jobs.by_id))
            self._step(StepOutput())

    def stat(self, name: str) -> float:
        """Return a number of the audit."""
        return self.half.stats()[f"audit.{name}"]

    def close(self) -> None:
        """Shut everything down."""
        self.worker.shutdown()
        self.half.shutdown()
        self._worker_spec.shutdown()
        self.spec.shutdown()

    def _compute(self, tokens: list[int], first_block: int) -> None:
        for block in range(first_block, len(tokens) // HASH_TOKENS):
            numbers = self.model.compute(tokens, block)
            noisy = numbers * (1 + NOISE * self._noise.standard_normal(SHAPE))
            self._device[block] = torch.from_numpy(to_bytes(noisy.astype(np.float32)).view(np.int8).copy())

    def _step(self, step: StepOutput) -> set[str]:
        metadata = self.half.build_connector_meta(step)
        begin_step(self.worker, metadata)
        ended = end_step(self.worker, metadata)
        self.half.update_connector_output(WorkerOutput(ended.report))
        return set(ended.loads)


def make_prompts(num: int = 4, num_tokens: int = 33) -> list[list[int]]:
    """Return prompts of random tokens, always the same."""
    rng = random.Random(5)
    return [[rng.randrange(100) for _ in range(num_tokens)] for _ in range(num)]
