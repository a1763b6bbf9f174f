"""Both halves of KVTierConnector in one process, driven with vLLM's own requests, block tables and step outputs.

There is no model and no scheduler: a test says which device blocks a request has, and fills them itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tests.engines.vllm.configs import BLOCK_TOKENS
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.engines.vllm import KVTierConnector
from kvtier.engines.vllm.compat import HAS_FAILED_RECVING

MAX_STEPS = 20_000
"""Steps without tokens after which a transfer that has not ended is taken for lost."""

BlockTables = Sequence[Sequence[int]]


@dataclass(slots=True)
class Answers:
    """What the worker has told vLLM over some steps.

    Attributes:
        finished: requests whose load ended, in the order of the answers.
        failed: requests to compute from the first token.
        invalid_blocks: device blocks that did not get their bytes.
        together: whether a load's failure always came in the answer that ended it.
    """

    finished: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    together: bool = True


class MiniEngine:
    """A scheduler's process and one worker's.

    Args:
        vllm_config: the engine's configuration, with kvtier in it.
        kv_cache_config: its KV groups.
        kv_caches: each layer's KV cache.

    Attributes:
        scheduler: the scheduler's connector.
        worker: the worker's.
        kv_caches: each layer's KV cache.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        init_none_hash(sha256)
        self.hash_block = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.worker = KVTierConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self.scheduler = KVTierConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
        self.kv_caches = dict(kv_caches)
        self.worker.register_kv_caches(self.kv_caches)
        self.step()  # tells the scheduler's half that both have mapped one region

    def request(
        self, name: str, token_ids: Sequence[int], params: SamplingParams | None = None, **fields: object
    ) -> Request:
        """Return a request as vLLM's scheduler has it; ``fields`` are set on it."""
        request = Request(
            request_id=name,
            prompt_token_ids=list(token_ids),
            sampling_params=params or SamplingParams(max_tokens=4),
            pooling_params=None,
            block_hasher=self.hash_block,
        )
        for key, value in fields.items():
            setattr(request, key, value)
        return request

    def compute(self, request: Request, tables: BlockTables, num_tokens: int) -> Answers:
        """Schedule ``num_tokens`` of a new request at once, then step until its blocks are stored."""
        self.scheduler.get_num_new_matched_tokens(request, request.num_computed_tokens)
        self.allocate(request, tables, 0)
        answers = self.step(self.schedule(request, tables, num_tokens))
        self.rest(answers)
        return answers

    def schedule(self, request: Request, tables: BlockTables, num_tokens: int) -> SchedulerOutput:
        """Return a step that computes ``num_tokens`` of a new request."""
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [NewRequestData.from_request(request, tuple(list(ids) for ids in tables))]
        output.num_scheduled_tokens = {request.request_id: num_tokens}
        output.total_num_scheduled_tokens = num_tokens
        return output

    def allocate(self, request: Request, tables: BlockTables, num_external_tokens: int) -> None:
        """Give a request device blocks, so many of its tokens to be loaded."""
        self.scheduler.update_state_after_alloc(request, blocks_of(tables), num_external_tokens)

    def begin_load(self, request: Request, tables: BlockTables) -> int:
        """Search for a request and allocate ``tables`` for what was found; return the tokens of its load."""
        num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert num_tokens is not None
        assert is_async == (num_tokens > 0)
        self.allocate(request, tables, num_tokens)
        return int(num_tokens)

    def load(self, request: Request, tables: BlockTables) -> tuple[int, Answers]:
        """Load what is found of a request; return the tokens and what the worker said until it was at rest."""
        num_tokens = self.begin_load(request, tables)
        return num_tokens, self.finish_loads(1 if num_tokens else 0)

    def finish_loads(self, num_loads: int) -> Answers:
        """Step until so many loads were reported, and a few times more."""
        answers = Answers()
        for _ in range(MAX_STEPS):
            if len(answers.finished) >= num_loads:
                break
            self.step(into=answers)
        for _ in range(3):
            self.step(into=answers)
        return answers

    def rest(self, answers: Answers | None = None) -> None:
        """Step as vLLM does while nothing is scheduled, until the connector lets it rest."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_pending_push_work():
                return
            self.step(into=answers)
        raise AssertionError("the connector never lets the engine rest")

    def step(self, output: SchedulerOutput | None = None, into: Answers | None = None) -> Answers:
        """Do one step; return, or add to ``into``, what the worker said."""
        answers = into or Answers()
        metadata = self.scheduler.build_connector_meta(output or SchedulerOutput.make_empty())
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        finished, failed = self._take_results()
        invalid_blocks = self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        answers.finished.extend(sorted(finished))
        answers.failed |= failed
        answers.invalid_blocks |= invalid_blocks
        answers.together &= bool(finished) or not (failed or invalid_blocks)
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        return answers

    def shutdown(self) -> None:
        """End both."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _take_results(self) -> tuple[set[str], set[str]]:
        """Ask as the installed release does."""
        if HAS_FAILED_RECVING:
            results = self.worker.get_transfer_results(set())
            assert not results.finished_sending
            return results.finished_recving, results.failed_recving
        finished_sending, finished_recving = self.worker.get_finished(set())
        assert not finished_sending
        return finished_recving, set()


def blocks_of(tables: BlockTables) -> KVCacheBlocks:
    """Return block tables as vLLM hands them over."""
    return KVCacheBlocks(tuple([KVCacheBlock(block_id) for block_id in ids] for ids in tables))
