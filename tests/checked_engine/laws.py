"""What must hold of everything the connector tells the workers, whatever bytes move.

A store reads device blocks that its request holds now and that are full of confirmed tokens, within its limits; a
load writes blocks that its request holds, within its limits, and never those that device memory already has. What a
router believes of host memory is what it holds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.checked_engine.blocks import CheckedGroup
from tests.checked_engine.memory import NULL_BLOCK
from tests.checked_engine.requests import CheckedRequest

from kvtier.base import GPULoadStoreSpec, OffloadKey, get_offload_block_hash, get_offload_group_idx
from kvtier.config import GroupKind, OffloadingConfig
from kvtier.connector.common import (
    BlockRemoved,
    BlockStored,
    LostLoadStoreSpec,
    OffloadingConnectorMetadata,
    TransferJob,
)
from kvtier.cpu.block_table import BlockTable
from kvtier.misses import MissCause, RequestRecord

Block = tuple[int, bytes]
"""KV group and content hash."""


def check_metadata(
    metadata: OffloadingConnectorMetadata,
    requests: Mapping[str, CheckedRequest],
    groups: Sequence[CheckedGroup],
    config: OffloadingConfig,
) -> None:
    """Check the jobs of one step against the requests as they are when it is planned."""
    for job in metadata.store_jobs.values():
        request = requests[job.req_id]
        assert not request.is_mixed, f"{job.req_id}: blocks of before a reset are stored after it"
        limit = min(request.limit("store"), request.num_tokens)
        if config.settings.offload_prompt_only:
            limit = min(limit, request.num_prompt_tokens)
        for _, end in _spans(job, job.transfer_spec.source, request, groups, config.block_size_factor):
            assert end <= limit, f"{job.req_id}: a block that ends at {end} is stored, {limit} are allowed"
    for job in metadata.load_jobs.values():
        request = requests[job.req_id]
        limit = min(request.limit("load"), request.num_tokens - (not config.computes_last_token))
        num_local = request.num_computed - request.num_external
        for first, end in _spans(job, job.transfer_spec.destination, request, groups, 1):
            assert end <= limit, f"{job.req_id}: a block that ends at {end} is loaded, {limit} are allowed"
            assert first >= num_local, f"{job.req_id}: a block is loaded that device memory has"
        assert is_lost(job) or request.num_computed <= limit


def check_found_prefix(
    groups: Sequence[CheckedGroup],
    request: CheckedRequest,
    num_local: int,
    num_found: int,
    config: OffloadingConfig,
    table: BlockTable,
) -> None:
    """Check that host memory holds all that a request needs to go on after what was found, which is whole blocks.

    Of full attention these are all blocks behind those on the device, of a window those that the next token reads,
    of a state the one block that ends there.
    """
    end = num_local + num_found
    assert not num_found or end <= request.limit("load"), f"{request.request_id}: {end} tokens are found"
    for idx, group in enumerate(groups if num_found else ()):
        span = group.block_tokens * config.block_size_factor
        assert end % span == 0, f"{request.request_id}: {end} tokens end within a block of group {idx}"
        first = num_local // span
        if group.kind is GroupKind.WINDOW:
            first = max(first, group.num_dead(end) // config.block_size_factor)
        if group.kind is GroupKind.STATE:
            first = end // span - 1
        for block in range(first, end // span):
            held = table.get_block(request.key_of(idx, (block + 1) * span))
            assert held is not None and held.is_ready, (  # noqa: PT018  # one law
                f"{request.request_id}: group {idx} lacks block {block} of {end} tokens found"
            )


def check_records(records: Sequence[RequestRecord], requests: Sequence[CheckedRequest]) -> None:
    """Check that every prompt token of each request that has begun has one origin, or one cause.

    Args:
        records: of the latest requests.
        requests: all of the engine's, none of which has a load under way.
    """
    begun = [request for request in requests if request.first_begin is not None]
    assert Counter((record.req_id, record.num_prompt_tokens) for record in records) == Counter(
        (request.request_id, request.num_prompt_tokens) for request in begun
    )
    for record in records:
        record.check()
        same = [
            request
            for request in begun
            if (request.request_id, request.num_prompt_tokens) == (record.req_id, record.num_prompt_tokens)
        ]
        assert any(_is_record_of(record, request) for request in same), record


def _is_record_of(record: RequestRecord, request: CheckedRequest) -> bool:
    """Return whether a record has what the engine knows: a load brings all of its tokens, or none.

    The last token of a prompt is computed, even if a load has brought it.
    """
    num_local, num_loaded = request.first_begin or (0, 0)
    num_external = min(num_loaded, record.num_prompt_tokens - 1 - num_local)
    origins = dict(record.tokens_by_origin)
    num_device_tokens = origins.pop("device", 0)
    has_failed = any(run.miss.cause is MissCause.LOAD_FAILED for run in record.missed)
    return num_device_tokens == num_local and sum(origins.values()) == (0 if has_failed else num_external)


def is_lost(job: TransferJob) -> bool:
    """Return whether a load can only fail."""
    return isinstance(job.transfer_spec.source, LostLoadStoreSpec)


class Router:
    """Believes the events of one engine.

    Attributes:
        believed: the blocks that each tier is believed to hold, host memory under None.
    """

    def __init__(self) -> None:
        self.believed: dict[str | None, set[Block]] = {None: set()}

    def read(self, events: Iterable[BlockStored | BlockRemoved]) -> None:
        """Believe ``events``."""
        for event in events:
            believed = self.believed.setdefault(event.tier, set())
            blocks = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            if isinstance(event, BlockRemoved):
                believed -= blocks
            else:
                believed |= blocks

    def check_host(self, table: BlockTable) -> None:
        """Fail when host memory holds something else than is believed."""
        held = table.slots.held_blocks(table.get_block)
        ready = {block_of(key) for key, block in held.items() if block.ref_cnt >= 0}
        wrong = self.believed[None] ^ ready
        assert not wrong, f"events and host memory differ in {len(wrong)} blocks"


def block_of(key: OffloadKey) -> Block:
    """Return what events call a block. Pure."""
    return get_offload_group_idx(key), get_offload_block_hash(key)


def _spans(
    job: TransferJob, spec: object, request: CheckedRequest, groups: Sequence[CheckedGroup], factor: int
) -> Iterator[tuple[int, int]]:
    """Yield first and end token of each block of a job: the offloaded one that a device block is part of."""
    assert isinstance(spec, GPULoadStoreSpec)
    block_ids = spec.block_ids.tolist()
    for idx, (size, group) in enumerate(zip(spec.group_sizes, groups, strict=True)):
        table = request.tables[idx]
        for block_id in block_ids[:size]:
            assert block_id != NULL_BLOCK, f"{job.req_id}: the null block is read or written"
            assert block_id in table, f"{job.req_id}, group {idx}: device block {block_id} is not its own"
            block = table.index(block_id) // factor
            span_tokens = group.block_tokens * factor
            yield block * span_tokens, (block + 1) * span_tokens
        block_ids = block_ids[size:]
