"""vLLM's real tiering manager with kvtier's tiers behind it, driven as vLLM's scheduler would, on real memory.

There is no model and no worker: the stock connector refuses hosts without a GPU when it builds one. The bytes that a
worker would copy are written into the rows here, and compared here when they come back.
"""

import hashlib
import random
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from vllm.v1.kv_offload import base as stock_base
from vllm.v1.kv_offload import config as stock_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.base import OffloadKey
from kvtier.base import ReqContext as OwnReqContext
from kvtier.config import OffloadingConfig
from kvtier.engines.vllm.tiers import KVTierSecondaryTier
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.tiering.base import SecondaryTierManager, TierSettings, parse_tier_settings
from kvtier.tiering.example import ExampleSecondaryTier

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM puts the rows

BLOCK_BYTES = 8192
HANG_GUARD_S = 60.0
"""Only a guard against hanging for ever; files of this size are read in milliseconds."""

HAS_DOOR = "kv_cache_layout" in {field.name for field in fields(stock_config.OffloadingConfig)}
NO_DOOR = "this vLLM does not tell a tier how pages are laid out (it does from 0.29 on)"


class KVTierExample(KVTierSecondaryTier):
    """The example tier: what a further tier takes."""

    kvtier_type = "example"


class KVTierFaulty(KVTierSecondaryTier):
    """The example tier, failing as its ``faults`` say."""

    kvtier_type = "example"

    @classmethod
    def build_tier(
        cls, settings: Mapping[str, object], primary_kv_view: memoryview, config: OffloadingConfig
    ) -> SecondaryTierManager:
        inner = ExampleSecondaryTier(config, primary_kv_view, settings=parse_tier_settings(settings))
        return FaultyTier(inner, Faults(), random.Random(str(settings.get("seed"))))


class AskingTier(ExampleSecondaryTier):
    """The example tier behind something that is asked once a step, on behalf of a request.

    Attributes:
        answered: the keys whose holding is known, by request.
    """

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview, settings: TierSettings) -> None:
        super().__init__(config, primary_kv_view, settings=settings)
        self.answered: dict[OwnReqContext, set[OffloadKey]] = {}
        self._asked: list[tuple[OwnReqContext, OffloadKey]] = []

    def lookup(self, key: OffloadKey, req_context: OwnReqContext) -> bool | None:
        if key in self.answered.get(req_context, ()):
            return super().lookup(key, req_context)
        self._asked.append((req_context, key))
        return None

    def end_step(self) -> None:
        asked, self._asked = self._asked, []
        for context, key in asked:
            self.answered.setdefault(context, set()).add(key)

    def request_finished(self, req_context: OwnReqContext) -> None:
        self.answered.pop(req_context, None)


class KVTierAsking(KVTierSecondaryTier):
    """A tier that answers in the step after the question."""

    kvtier_type = "example"

    @classmethod
    def build_tier(
        cls, settings: Mapping[str, object], primary_kv_view: memoryview, config: OffloadingConfig
    ) -> SecondaryTierManager:
        return AskingTier(config, primary_kv_view, parse_tier_settings(settings))


class UnregisteredTier(ExampleSecondaryTier):
    """A tier of somebody else's, under no name."""


class KVTierUnregistered(KVTierSecondaryTier):
    """The same for vLLM."""

    kvtier_type = f"{__name__}:UnregisteredTier"


class StockEngine:
    """One engine's scheduler side.

    Args:
        tiers: the configuration's ``secondary_tiers``.
        num_blocks: slots of the primary tier.
        extra_config: further settings of the connector.
        facts: what vLLM says of the engine, where it is not the usual.
    """

    def __init__(
        self,
        tiers: Sequence[Mapping[str, object]] = (),
        num_blocks: int = 8,
        extra_config: Mapping[str, object] | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        settings = {
            "cpu_bytes_to_use": num_blocks * BLOCK_BYTES,
            "secondary_tiers": [dict(tier) for tier in tiers],
            **(extra_config or {}),
        }
        self.spec = TieringOffloadingSpec(make_stock_facts(extra_config=settings, **(facts or {})))
        self.manager = self.spec.get_manager()
        self._num_requests = 0
        self._keys: set[OffloadKey] = set()
        self._is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_ended:
            self.end()

    @property
    def adapter(self) -> KVTierSecondaryTier:
        """The first tier as vLLM has it."""
        adapter = self.manager.secondary_tiers[0]
        assert isinstance(adapter, KVTierSecondaryTier)
        return adapter

    @property
    def tier(self) -> SecondaryTierManager:
        """What is behind the first adapter."""
        return self.adapter._guard.tier

    @property
    def example(self) -> ExampleSecondaryTier:
        """The same, which keeps blocks in a dictionary."""
        assert isinstance(self.tier, ExampleSecondaryTier)
        return self.tier

    @property
    def faulty(self) -> FaultyTier:
        """The same, which fails on purpose."""
        assert isinstance(self.tier, FaultyTier)
        return self.tier

    def end(self) -> None:
        """Shut the manager down as vLLM does."""
        self._is_ended = True
        self.manager.shutdown()

    def new_request(self, req_id: str = "") -> ReqContext:
        """Begin a request, by default under a name of its own."""
        self._num_requests += 1
        context = ReqContext(req_id or f"request-{self._num_requests}")
        self.manager.on_new_request(context)
        return context

    def step(self, scheduled: Iterable[str] = ()) -> None:
        """End one step of the scheduler, which has scheduled these requests for the first time."""
        self.manager.on_schedule_end(ScheduleEndContext(tuple(scheduled), ()))

    def settle(self) -> None:
        """Run empty steps until nothing is in flight."""
        end_s = time.monotonic() + HANG_GUARD_S
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s, "a job was never reported"
            self.step()

    def store(self, numbers: Iterable[int]) -> bool:
        """Write blocks from the device through to the tiers; False when the primary has no room."""
        context = self.new_request()
        keys = [key_of(number) for number in numbers]
        self._keys.update(keys)
        number_of = dict(zip(keys, numbers, strict=True))
        output = self.manager.prepare_store(keys, context)
        if output is not None and output.keys_to_store:
            for key, slot in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
                self.write_row(int(slot), content_of(number_of[key]))
            self.manager.complete_store(output.keys_to_store, context)
        self.step()
        self.manager.on_request_finished(context)
        return output is not None

    def region_path(self) -> Path:
        """Return where the rows have a name."""
        return SHARED_MEMORY / f"vllm_offload_{self.spec.config.engine_id}.mmap"

    def reset(self) -> None:
        """Reset the manager as vLLM's scheduler does; from 0.33 on it also reports when workers are done."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def push_out(self, num_blocks: int = 8) -> None:
        """Fill the primary tier with other blocks, whose cascades end."""
        first = 1_000_000 + 1000 * self._num_requests
        self.settle()
        assert self.store(range(first, first + num_blocks))
        self.settle()

    def search(self, numbers: Iterable[int], context: ReqContext) -> int | None:
        """Return how many leading blocks are ready; None when the scheduler has to ask again."""
        num_hits = 0
        has_to_wait = False
        for key in map(key_of, numbers):
            self._keys.add(key)
            answer = self.manager.lookup(key, context)
            if answer is LookupResult.MISS:
                break
            has_to_wait |= answer is not LookupResult.HIT
            num_hits += 1
        return None if has_to_wait else num_hits

    def load(self, numbers: Sequence[int]) -> int:
        """Wait for the leading blocks that are held anywhere, compare their bytes, and return how many they are."""
        context = self.new_request()
        end_s = time.monotonic() + HANG_GUARD_S
        num_hits = self.search(numbers, context)
        while num_hits is None:
            assert time.monotonic() < end_s, "a lookup was never answered"
            self.step()
            num_hits = self.search(numbers, context)
        self.read(numbers[:num_hits], context)
        self.step([context.req_id])
        self.manager.on_request_finished(context)
        self.step()
        return num_hits

    def read(self, numbers: Sequence[int], context: ReqContext) -> None:
        """Load ready blocks to the device and compare their bytes."""
        keys = [key_of(number) for number in numbers]
        slots = self.manager.prepare_load(keys, context).block_ids
        for number, slot in zip(numbers, slots, strict=True):
            assert self.read_row(int(slot)) == content_of(number), f"wrong bytes for block {number}"
        self.manager.complete_load(keys, context)

    def write_row(self, slot: int, content: bytes) -> None:
        """Do what a worker does at a store."""
        with self._flat() as flat:
            flat[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = content

    def read_row(self, slot: int) -> bytes:
        """Do what a worker does at a load."""
        with self._flat() as flat:
            return bytes(flat[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def pins(self) -> dict[bytes, int]:
        """Return the blocks that vLLM's primary tier keeps in place, and how often or -1 for a write."""
        policy = self.manager.primary_tier._policy
        held = {key: chunk for key in self._keys if (chunk := policy.get(key)) is not None}
        return {key: chunk.ref_cnt for key, chunk in held.items() if chunk.ref_cnt}

    def _flat(self) -> memoryview:
        view: memoryview = self.manager.primary_tier.get_kv_memoryview()
        return view.cast("B")


def make_stock_facts(**facts: object) -> stock_config.OffloadingConfig:
    """Return what vLLM says of a small engine, but for ``facts``; ``tp_size`` and its like belong to a part of it."""
    usual: dict[str, object] = {
        "groups": (make_stock_group(),),
        "worker_kv_bytes_per_block": BLOCK_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": f"kvtier-test-{uuid.uuid4().hex}",
        "model": part(stock_config.OffloadingModelConfig, facts, name="org/model", dtype="bfloat16"),
        "cache": part(stock_config.OffloadingCacheConfig, facts, tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": part(
            stock_config.OffloadingParallelConfig,
            facts,
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        "kv_cache_layout": "NHD",
    }
    return part(stock_config.OffloadingConfig, facts, **usual)


def make_stock_group(
    layer_name: str = "layer.0", tokens_per_block: int = 16
) -> stock_config.OffloadingGroupConfig:
    """Return a KV group of one layer."""
    usual = {"tokens_per_block": tokens_per_block, "layer_names": (layer_name,), "group_id": 0}
    return part(stock_config.OffloadingGroupConfig, {}, **usual)


def part(kind: type[T], facts: Mapping[str, object], **usual: object) -> T:
    """Build one of vLLM's dataclasses from ``usual`` and those of ``facts`` that it has a field for."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # each kind is a dataclass
    values = usual | {name: value for name, value in facts.items() if name in names}
    return kind(**{name: value for name, value in values.items() if name in names})


def key_of(number: int, group_idx: int = 0) -> OffloadKey:
    """Return the key that vLLM gives to block ``number``."""
    key: OffloadKey = stock_base.make_offload_key(hashlib.sha256(str(number).encode()).digest(), group_idx)
    return key


def content_of(number: int) -> bytes:
    """Return the bytes that block ``number`` must have, different for each block."""
    return np.random.default_rng(number).bytes(BLOCK_BYTES)
