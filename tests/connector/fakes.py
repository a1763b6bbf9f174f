"""Stand-ins for an engine's objects, a spec without memory, and a manager that answers from a table."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    HandlerEntry,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferJobId,
    TransferResult,
    TransferSpec,
    TransferType,
    make_offload_key,
)
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import CachedRequests, NewRequest, StepOutput, WorkerOutput

HASH_TOKENS = 4


def hash_tokens(tokens: Sequence[int]) -> list[bytes]:
    """Return one chained hash for each full ``HASH_TOKENS`` of ``tokens``."""
    return list(_hash_tuple(tuple(tokens[: len(tokens) // HASH_TOKENS * HASH_TOKENS])))


@lru_cache(maxsize=10_000)
def _hash_tuple(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    chained = hashlib.sha256()
    hashes = []
    for end in range(HASH_TOKENS, len(tokens) + 1, HASH_TOKENS):
        chained.update(repr(tokens[end - HASH_TOKENS : end]).encode())
        hashes.append(chained.digest()[:16])
    return tuple(hashes)


@dataclass(eq=False)
class FakeRequest:
    """A request whose tokens are all confirmed; those it begins with are its prompt."""

    request_id: str
    tokens: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return hash_tokens(self.tokens)


@dataclass(frozen=True)
class FakeBlocks:
    """A block table."""

    block_ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.block_ids


def make_first_step(
    req_id: str, block_ids: tuple[list[int], ...], num_tokens: int, num_computed_tokens: int = 0
) -> StepOutput:
    """Return a step that computes tokens of a new request alone."""
    new = NewRequest(req_id, block_ids, num_computed_tokens)
    return StepOutput([new], num_scheduled_tokens={req_id: num_tokens})


def make_later_step(
    req_id: str,
    num_computed_tokens: int,
    num_tokens: int,
    block_ids: tuple[list[int], ...] | None = None,
    *,
    is_resumed: bool = False,
) -> StepOutput:
    """Return a step that goes on with one request alone."""
    resumed = {req_id} if is_resumed else ()
    cached = CachedRequests([req_id], resumed, [block_ids], [num_computed_tokens])
    return StepOutput(scheduled_cached_reqs=cached, num_scheduled_tokens={req_id: num_tokens})


def make_config(
    num_workers: int = 1,
    groups: tuple[KVGroup, ...] = (KVGroup(HASH_TOKENS, ("layer",), 64),),
    **extra_config: object,
) -> OffloadingConfig:
    """Return a configuration; by default one group of blocks of four tokens on one worker."""
    return OffloadingConfig(
        "engine",
        ModelIdentity("model"),
        groups,
        HASH_TOKENS,
        world_size=num_workers,
        extra_config=extra_config,
    )


class FakeSpec(OffloadingSpec):
    """Builds whatever manager and handlers a test gives it."""

    def __init__(
        self,
        config: OffloadingConfig,
        manager: OffloadingManager | None = None,
        entries: Sequence[HandlerEntry] = (),
    ) -> None:
        super().__init__(config)
        self._manager = manager or CPUOffloadingManager(16)
        self._entries = entries

    def get_manager(self) -> OffloadingManager:
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        yield from self._entries


class FakeRegionSpec(FakeSpec):
    """A spec whose halves share a region."""

    identity: tuple[int, int] | None = (1, 2)
    num_seals = 0

    def region_identity(self) -> tuple[int, int] | None:
        return self.identity

    def seal_region(self) -> None:
        self.num_seals += 1


class TableManager(OffloadingManager):
    """Answers lookups from a table; keys that are not in it are absent."""

    def __init__(self, answers: dict[OffloadKey, bool | None]) -> None:
        self.answers = answers
        self.asked: list[OffloadKey] = []
        self.is_idle = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.asked.append(key)
        return self.answers.get(key, False)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        raise NotImplementedError

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        return None

    def is_waiting(self, req_context: ReqContext) -> bool:
        return self.is_idle


class FakeHandler(OffloadingHandler):
    """Ends a job when it is told to, or waited for."""

    def __init__(self, transfer_type: TransferType, *, is_declining: bool = False) -> None:
        self.transfer_type = transfer_type
        self.is_declining = is_declining
        self.begun: list[TransferJobId] = []
        self.failing: set[TransferJobId] = set()
        self._ended: list[TransferResult] = []

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        if not self.is_declining:
            self.begun.append(job_id)
        return not self.is_declining

    def end(self, *job_ids: TransferJobId) -> None:
        """End jobs that have begun."""
        for job_id in job_ids:
            self.begun.remove(job_id)
            is_good = job_id not in self.failing
            self._ended.append(TransferResult(job_id, is_good, 64, 0.5, self.transfer_type))

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[TransferJobId]) -> None:
        self.end(*[job_id for job_id in self.begun if job_id in job_ids])


class FakeJoiningHandler(FakeHandler):
    """Takes each call's jobs but those that it refuses."""

    def __init__(self, transfer_type: TransferType) -> None:
        super().__init__(transfer_type)
        self.refused: set[TransferJobId] = set()
        self.calls: list[list[TransferJobId]] = []

    def transfer_joined(self, jobs: Mapping[TransferJobId, TransferSpec]) -> set[TransferJobId]:
        self.calls.append(list(jobs))
        begun = [job_id for job_id in jobs if job_id not in self.refused]
        self.begun += begun
        return set(begun)


def report_jobs(
    metadata: OffloadingConnectorMetadata, *, num_workers: int = 1, failed: Collection[TransferJobId] = ()
) -> WorkerOutput:
    """Return the output of a step in which ``num_workers`` workers ended each job of ``metadata``."""
    jobs = [*metadata.load_jobs, *metadata.store_jobs]
    return WorkerOutput(OffloadingWorkerMetadata(dict.fromkeys(jobs, num_workers), frozenset(failed)))


def block_ids_of(spec: LoadStoreSpec) -> list[int]:
    """Return the block numbers of a spec."""
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(block_id) for block_id in spec.block_ids]


def keys_of(tokens: list[int], group_idx: int = 0) -> list[OffloadKey]:
    """Return the keys of the full blocks of ``tokens`` in one group."""
    return [make_offload_key(block_hash, group_idx) for block_hash in hash_tokens(tokens)]
