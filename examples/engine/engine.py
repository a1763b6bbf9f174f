"""An engine in one file: a toy model on plain tensors, one request at a time, with kvtier behind its device pool."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.common import ConnectorRole, OffloadingWorkerMetadata
from kvtier.connector.offloading_connector import OffloadingConnector

BLOCK_TOKENS, WIDTH, VOCABULARY = 16, 32, 256
PAGE_BYTES = BLOCK_TOKENS * WIDTH * 4


@dataclass(eq=False)
class Request:
    """What the connector reads of a request, its device blocks included."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    block_ids: list[int] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        """One hash for each full block, of its tokens and all before them."""
        chain, hashes = hashlib.sha256(), []
        for end in range(BLOCK_TOKENS, len(self.tokens) + 1, BLOCK_TOKENS):
            chain.update(bytes(self.tokens[end - BLOCK_TOKENS : end]))
            hashes.append(chain.digest())
        return hashes

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block table of the one KV group."""
        return (self.block_ids,)


class NewRequest(NamedTuple):
    """A request in its first step."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(NamedTuple):
    """Requests in later steps."""

    req_ids: tuple[str, ...] = ()
    resumed_req_ids: tuple[str, ...] = ()
    new_block_ids: tuple[tuple[list[int], ...] | None, ...] = ()
    num_computed_tokens: tuple[int, ...] = ()


class Step(NamedTuple):
    """What a step computes; by default nothing."""

    scheduled_new_reqs: tuple[NewRequest, ...] = ()
    scheduled_cached_reqs: CachedRequests = CachedRequests()
    num_scheduled_tokens: Mapping[str, int] = MappingProxyType({})
    preempted_req_ids: tuple[str, ...] = ()


class Report(NamedTuple):
    """What the workers of a step reported."""

    kv_connector_worker_meta: OffloadingWorkerMetadata | None


class ToyEngine:
    """Answers prompts of byte tokens; the last answer's ``num_loaded_tokens`` were loaded and not computed."""

    def __init__(self, num_blocks: int, extra_config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.embedding, self.head = torch.randn(VOCABULARY, WIDTH), torch.randn(WIDTH, VOCABULARY)
        self.pages = torch.zeros(num_blocks, BLOCK_TOKENS, WIDTH)  # the "KV cache": one vector a token
        self.free_blocks, self.num_requests, self.num_loaded_tokens = list(range(num_blocks)), 0, 0
        group = KVGroup(BLOCK_TOKENS, ("layer.0",), PAGE_BYTES)
        config = OffloadingConfig(
            f"toy-{uuid4().hex}", ModelIdentity("toy", revision="1"), (group,), BLOCK_TOKENS,
            kv_dtype="float32", engine_kind="toy", extra_config=extra_config,
        )  # fmt: skip
        self.connector = OffloadingConnector(config, ConnectorRole.SCHEDULER)
        self.connector_of_worker = OffloadingConnector(replace(config, rank=0), ConnectorRole.WORKER)
        scheduler, worker = self.connector.connector_scheduler, self.connector_of_worker.connector_worker
        assert scheduler is not None  # each connector has the half of its role
        assert worker is not None
        self.scheduler, self.worker = scheduler, worker
        raw = CanonicalKVCacheTensor(self.pages.view(num_blocks, -1).view(torch.int8), PAGE_BYTES)
        worker.register_kv_caches(CanonicalKVCaches([raw], [[CanonicalKVCacheRef(0, PAGE_BYTES)]]))
        self.step(Step())  # both halves compare their memory before the first load

    def run(self, prompt: bytes, num_answer_tokens: int) -> bytes:
        """Return the answer to a prompt."""
        self.num_requests += 1
        request = Request(f"request-{self.num_requests}", list(prompt), len(prompt))
        while (found := self.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
            self.step(Step())  # a tier is still looking, or a block is on its way to host memory
        num_blocks = -(-(len(prompt) + num_answer_tokens) // BLOCK_TOKENS)
        request.block_ids = [self.free_blocks.pop() for _ in range(num_blocks)]
        self.scheduler.update_state_after_alloc(request, request, found)
        computed = self.num_loaded_tokens = self.load(request, found)
        for _ in range(num_answer_tokens):
            computed = self.compute_step(request, computed)
        self.scheduler.request_finished(request)
        self.free_blocks += request.block_ids  # stores under way are finished before a block is written again
        while self.connector.has_pending_push_work():
            self.step(Step())
        return bytes(request.tokens[len(prompt) :])

    def load(self, request: Request, num_tokens: int) -> int:
        """Step until the load has ended; return how many leading tokens are there."""
        is_loaded = num_tokens == 0
        while not is_loaded:
            is_loaded = request.request_id in self.step(Step())
        failed = self.worker.take_failed_loads().get(request.request_id, [])
        return min([num_tokens, *(request.block_ids.index(block) * BLOCK_TOKENS for block in failed)])

    def compute_step(self, request: Request, computed: int) -> int:
        """Compute what is missing and one token of the answer; return how many tokens have their vector."""
        name, num_tokens = request.request_id, request.num_tokens
        if num_tokens == request.num_prompt_tokens:
            step = Step(scheduled_new_reqs=(NewRequest(name, request.get_block_ids(), computed),))
        else:
            cached = CachedRequests((name,), new_block_ids=(None,), num_computed_tokens=(computed,))
            step = Step(scheduled_cached_reqs=cached)
        step = step._replace(num_scheduled_tokens={name: num_tokens - computed})
        self.step(step, lambda: self.forward(request, computed))
        return num_tokens

    def forward(self, request: Request, computed: int) -> None:
        """Write the vectors of new tokens, read those of all, append the next token."""
        for place in range(computed, request.num_tokens):
            block, offset = request.block_ids[place // BLOCK_TOKENS], place % BLOCK_TOKENS
            self.pages[block, offset] = self.embedding[request.tokens[place]] * (1 + place % 7)
        cache = self.pages[request.block_ids].flatten(0, 1)[: request.num_tokens]
        request.tokens.append(int((torch.sin(cache).sum(0) @ self.head).argmax()))

    def step(self, step: Step, compute: Callable[[], None] = lambda: None) -> set[str]:
        """Do one step in the order of the connector's contract; return the requests whose load has ended."""
        metadata = self.scheduler.build_connector_meta(step)
        self.worker.handle_preemptions(metadata)
        self.worker.start_kv_transfers(metadata)
        compute()
        self.worker.prepare_store_kv(metadata)
        _, loaded = self.worker.get_finished(())
        self.scheduler.update_connector_output(Report(self.worker.build_connector_worker_meta()))
        return loaded

    def shutdown(self) -> None:
        """End both halves: the copies first, then the tiers."""
        self.connector_of_worker.shutdown()
        self.connector.shutdown()


if __name__ == "__main__":
    disk = {"type": "fs", "root_dir": str(Path.cwd() / "toy-blocks"), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": "4MiB", "secondary_tiers": [disk]}
    document = b"A document that is asked about more than once. " * 5
    answers = []
    for start in ("first", "second"):
        engine = ToyEngine(num_blocks=64, extra_config=settings)
        for _ in range(2):
            answers.append(engine.run(document, 8))
            print(f"{start} engine: {engine.num_loaded_tokens} of {len(document)} tokens loaded")
        engine.shutdown()
    assert len(set(answers)) == 1
