"""Where each prompt token came from: one record for each request that the engine has begun.

When the engine begins a request, the prompt divides into what the device had, what is loaded, and the rest. The rest is
divided by position, and each part has one cause:

    cut off by a short group | faster computed | missing | kept by a limit | the last, partial block

What is missing has the cause that the manager gives for the first missing block. The record is complete when the load
has ended: a load that failed turns its tokens into missed ones.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from kvtier.base import OffloadingManager, OffloadKey
from kvtier.connector.common import StopReason
from kvtier.connector.groups import GroupLayout
from kvtier.connector.jobs import OpenTransfer
from kvtier.connector.prefix_search import FoundPrefix, SearchGroups, split_by_need
from kvtier.connector.protocols import Request, RequestRecorder
from kvtier.connector.request_state import NOTHING_UNWANTED, Arm, BegunRequest, EndedRequest, RequestState
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.departed import DepartedBlocks
from kvtier.misses import (
    DEVICE_ORIGIN,
    HOST_ORIGIN,
    MISSED_TOKENS,
    NEVER_SEEN,
    UNKNOWN_TENANT_REASON,
    Miss,
    MissCause,
    MissedRun,
    NotStored,
    RequestRecord,
    not_stored,
)

MAX_RECORDS = 1000
"""Requests whose records are kept, some 600 bytes each. More take longer to read through a control socket."""

MAX_UNSTORED_BLOCKS = 2**18
"""Blocks remembered that were not offered to the manager, because of limits or want of room; 4 MB at most."""

MAX_BEHIND = 16
"""Blocks behind the first missing one that a manager is given; more than any of them looks at."""

PARTIAL_BLOCK = Miss(MissCause.PARTIAL_BLOCK)
NOT_CONNECTED = Miss(MissCause.TIER_DOWN, HOST_ORIGIN, MappingProxyType({"reason": "workers not connected"}))
ENGINE_DECLINED = Miss(MissCause.LIMITED, "", MappingProxyType({"reason": "the engine did not load it"}))
UNKNOWN_TENANT = Miss(MissCause.LIMITED, "", MappingProxyType({"reason": UNKNOWN_TENANT_REASON}))
AUDITED = Miss(MissCause.AUDITED)
LOADS_STOPPED = Miss(MissCause.AUDITED, "", MappingProxyType({"reason": "loads stopped"}))
LOAD_LOST = Miss(MissCause.LOAD_FAILED, HOST_ORIGIN, MappingProxyType({"reason": "evicted before the load"}))
LOAD_RESET = Miss(MissCause.LOAD_FAILED, HOST_ORIGIN, MappingProxyType({"reason": "reset"}))
LOAD_FAILED = Miss(MissCause.LOAD_FAILED, HOST_ORIGIN, MappingProxyType({"reason": "copy to the device"}))


class Segment(NamedTuple):
    """A part of a prompt that was computed.

    Attributes:
        end_token: one past its last token; it begins where the one before it ends.
        miss: why; None: what the manager says of the first block in it.
    """

    end_token: int
    miss: Miss | None


class RequestRecords:
    """The records of one scheduler half. Requests come from its thread; any thread may read.

    The records and counts made so far are mutable. A lock guards them, which only readers take, and the scheduler's
    thread when nothing has read for a thousand requests. A request costs a tuple on the way of its step; records and
    counts are made of it when they are read.

    Args:
        layouts: the KV groups, by index.
        manager: where blocks are; asked for causes if it can tell.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        manager: OffloadingManager,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._layouts = layouts
        self._groups = split_by_need(layouts)
        self._manager = manager
        self._clock = clock
        self._wall_clock = wall_clock
        self._latest: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self._unread: deque[EndedRequest] = deque()
        self._lock = threading.Lock()
        self._tokens_by_origin: dict[str, int] = {}
        self._missed_tokens: dict[tuple[MissCause, str], int] = {}
        self._num_requests = 0
        self._unstored: DepartedBlocks | None = None
        self._kinds: dict[NotStored, int] = {}
        self._salt_key = os.urandom(16)
        self._excluded: dict[str, tuple[int, Miss]] = {}

    @property
    def latest(self) -> Sequence[RequestRecord]:
        """The records of the latest requests, oldest first; at most MAX_RECORDS."""
        self._read()
        with self._lock:
            return tuple(self._latest)

    @property
    def num_requests(self) -> int:
        """Requests recorded since the start."""
        self._read()
        return self._num_requests

    @property
    def tokens_by_origin(self) -> Mapping[str, int]:
        """Prompt tokens of all requests that were not computed, by origin."""
        self._read()
        with self._lock:
            return dict(self._tokens_by_origin)

    @property
    def missed_tokens(self) -> Mapping[tuple[MissCause, str], int]:
        """Prompt tokens of all requests that were computed, by cause and tier."""
        self._read()
        with self._lock:
            return dict(self._missed_tokens)

    def on_begun(self, state: RequestState, num_external_tokens: int) -> None:
        """Record that the engine begins a request; only the first time counts. Call it before ``prepare_load``."""
        # Of a request that is audited the search may go on while it is computed; the audit calls again.
        if state.begun is not None or (state.audit is not None and state.audit.is_open):
            return
        search, num_prompt_tokens = state.search, state.request.num_prompt_tokens
        num_local_tokens = search.num_local_tokens or 0
        last_token = num_prompt_tokens - 1 if num_prompt_tokens else 0
        first_token = min(num_local_tokens + num_external_tokens, last_token)
        missed: tuple[MissedRun, ...] = ()
        # A request that misses nothing pays for no cause: the partial block is added where the record is made.
        common_tokens = self._groups.common_tokens
        max_end_token = last_token if search.max_end_token is None else search.max_end_token
        loadable = min(last_token, max_end_token // common_tokens * common_tokens)
        if first_token < loadable:
            missed = self._explain(state, first_token, loadable, num_external_tokens)
        state.begun = BegunRequest(
            self._wall_clock(),
            min(num_local_tokens, first_token),
            first_token,
            missed,
            self._clock() - search.began_s,
            search.first_missing,
        )
        if num_external_tokens == 0:
            self._end(state, state.begun, {}, None)

    def on_load_ended(self, job: OpenTransfer) -> None:
        """Record the end of a request's first load; the tokens of one that has failed are computed after all."""
        state, failure = job.state, None
        if job.has_failed:
            failure = LOAD_RESET if job.is_void else LOAD_FAILED if job.keys else LOAD_LOST
        if state.begun is not None and state.ended is None:
            self._end(state, state.begun, state.load.tokens_by_tier, failure)

    def exclude(self, request: Request, num_local_tokens: int, miss: Miss) -> None:
        """Record that a request is not searched for, and why; ``on_begun_excluded`` follows when it begins."""
        self._excluded[request.request_id] = num_local_tokens, miss

    def on_begun_excluded(self, request: Request) -> None:
        """Record that a request begins that was excluded; others are ignored."""
        excluded = self._excluded.pop(request.request_id, None)
        if excluded is None:
            return
        num_local_tokens, miss = excluded
        num_prompt_tokens = request.num_prompt_tokens
        num_device_tokens = min(num_local_tokens, max(0, num_prompt_tokens - 1))
        missed: tuple[MissedRun, ...] = ()
        if num_device_tokens < num_prompt_tokens:
            missed = (MissedRun(num_device_tokens, num_prompt_tokens - num_device_tokens, miss),)
        begun = BegunRequest(self._wall_clock(), num_device_tokens, num_device_tokens, missed, 0.0, None)
        self._unread.append(EndedRequest(request.request_id, num_prompt_tokens, begun, {}, None))

    def on_finished(self, state: RequestState) -> None:
        """Remember the blocks of an ended request that were not offered to the manager, or that it had no room for."""
        limit, stores, request = state.limits.max_store_tokens, state.stores, state.request
        state.grow_keys(self._layouts)
        # The KV of the last token of an answer is never computed; without an answer the prompt may be computed in part.
        has_answer = request.num_tokens > request.num_prompt_tokens
        num_tokens = request.num_tokens - 1 if has_answer else state.blocks.num_computed_tokens
        for layout in self._layouts:
            idx, block_tokens = layout.idx, layout.block_tokens
            keys, end = state.keys[idx], num_tokens // block_tokens
            allowed = end if limit is None else min(end, limit // block_tokens)
            if stores.batch_blocks is not None and not state.blocks.is_stale:
                unstored = keys[stores.next_blocks[idx] : allowed]
                self._remember(unstored, NotStored.NO_ROOM)
                self._manager.on_unstored(unstored, state.context)
            if limit is not None:
                self._remember(keys[allowed:end], _reason_of_limit(state, limit))

    def forget_excluded(self, req_id: str) -> None:
        """Forget a request that was excluded and never began."""
        if self._excluded:
            self._excluded.pop(req_id, None)

    def stats(self) -> dict[str, float]:
        """Return the tokens of all requests by dotted name: where they came from and why they were computed."""
        self._read()
        with self._lock:
            counts = {"connector.recorded_requests": float(self._num_requests)}
            for origin, num_tokens in self._tokens_by_origin.items():
                counts[f"connector.prompt_tokens.{origin}"] = float(num_tokens)
            for (cause, tier), num_tokens in self._missed_tokens.items():
                name = MISSED_TOKENS + cause.value
                counts[f"{name}.{tier}" if tier else name] = float(num_tokens)
            return counts

    def _explain(
        self, state: RequestState, first_token: int, loadable: int, num_external_tokens: int
    ) -> tuple[MissedRun, ...]:
        """Return why each token from ``first_token`` to ``loadable`` is computed.

        Effects:
            ``state.search.first_missing``.
        """
        found = state.search.found
        if (
            found is not None
            and found.first_end_token <= found.end_token <= first_token
            and state.limits.max_load_tokens is None
            and state.choice.unwanted is NOTHING_UNWANTED
        ):  # nearly every miss: everything behind what is held is missing for one cause
            return (
                MissedRun(first_token, loadable - first_token, self._ask(state, first_token, loadable, None)),
            )
        runs: list[MissedRun] = []
        at = first_token
        for end_token, given in divide_missed(
            state, self._groups, first_token, loadable, num_external_tokens
        ):
            if end_token <= at:
                continue
            is_known = given is not None and given.cause is not MissCause.GROUP_SHORT
            miss = given if given is not None and is_known else self._ask(state, at, end_token, given)
            runs.append(MissedRun(at, end_token - at, miss))
            at = end_token
        return tuple(runs)

    def _ask(self, state: RequestState, first_token: int, end_token: int, short: Miss | None) -> Miss:
        """Return why the block is missing that a run lacks first; ``short`` names the group that lacks it."""
        layout = self._groups.first if short is None else self._layouts[int(short.detail["group"])]
        keys, block = state.keys[layout.idx], first_token // layout.block_tokens
        if layout.num_tail_tokens is not None:  # of a window its last block
            block = max(block, (end_token - 1) // layout.block_tokens)
        miss = None
        if block < len(keys):
            key = keys[block]
            if state.search.first_missing is None:
                state.search.first_missing = key
            miss = self._manager.explain(key, state.context, keys[block + 1 : block + MAX_BEHIND])
            if self._unstored is not None and (miss is None or miss.cause is MissCause.NEVER_SEEN):
                miss = self._unstored.explain(key)
        if miss is None or miss.cause is MissCause.NEVER_SEEN:
            miss = self._describe_unknown(state)
        if short is None:
            return miss
        detail = {**miss.detail, **short.detail, "cause": miss.cause.value}
        return Miss(short.cause, miss.tier, MappingProxyType(detail))

    def _describe_unknown(self, state: RequestState) -> Miss:
        """Return the miss of a block of which nothing is known, with what sets its request apart from others.

        A salt may be a secret: its id is made with a key of this process and is of no use elsewhere.
        """
        salt = getattr(state.request, "cache_salt", None)  # only vLLM's requests have one
        detail: dict[str, str | float] = {}
        if salt:
            detail["cache_salt"] = blake2b(str(salt).encode(), key=self._salt_key, digest_size=4).hexdigest()
        if state.key_salt:
            is_adapted = getattr(state.request, "lora_request", None) is not None
            names_images = not is_adapted and getattr(state.request, "mm_features", None)  # only vLLM's
            detail["client_names" if names_images else "adapter"] = "yes"
        return Miss(MissCause.NEVER_SEEN, "", MappingProxyType(detail)) if detail else NEVER_SEEN

    def _remember(self, keys: Sequence[OffloadKey], reason: NotStored) -> None:
        if not keys:
            return
        if self._unstored is None:
            self._unstored = DepartedBlocks(MAX_UNSTORED_BLOCKS, self._clock)
        if reason not in self._kinds:
            self._kinds[reason] = self._unstored.add_kind(not_stored(reason))
        self._unstored.add(keys, self._kinds[reason])

    def _end(
        self,
        state: RequestState,
        begun: BegunRequest,
        tokens_by_tier: Mapping[str, int],
        failure: Miss | None,
    ) -> None:
        state.ended = EndedRequest(
            state.context.req_id, state.request.num_prompt_tokens, begun, tokens_by_tier, failure
        )
        self._unread.append(state.ended)
        if len(self._unread) >= MAX_RECORDS:
            self._read()

    def _read(self) -> None:
        """Make records and counts of the requests that have ended since the last call."""
        unread = self._unread
        with self._lock:
            while unread:  # the scheduler's thread may append meanwhile
                record = make_record(unread.popleft())
                self._num_requests += 1
                self._latest.append(record)
                add_tokens(self._tokens_by_origin, record.tokens_by_origin)
                for _, num_tokens, miss in record.missed:
                    label = miss.cause, miss.tier
                    self._missed_tokens[label] = self._missed_tokens.get(label, 0) + num_tokens


def count_tokens_by_tier(
    layouts: Sequence[GroupLayout],
    keys: Sequence[Sequence[OffloadKey]],
    promoted: Mapping[OffloadKey, str],
    first_token: int,
    end_token: int,
) -> dict[str, int]:
    """Return how many tokens of a load come from each tier, none of them zero. Pure.

    Args:
        layouts: the KV groups.
        keys: for each group the keys of the request's full blocks.
        promoted: blocks that were promoted while the request waited for them, by their tier's type.
        first_token: leading tokens that device memory has.
        end_token: one past the last token of the load.
    """
    num_tokens = end_token - first_token
    tokens_by_tier: dict[str, int] = {}
    if promoted:
        layout = next((layout for layout in layouts if layout.num_tail_tokens is None), layouts[0])
        span, block_tokens = layout.span(first_token, end_token), layout.block_tokens
        for block in range(span.first_block, span.end_block):
            tier = promoted.get(keys[layout.idx][block])
            if tier is not None:
                # Without a group that needs the whole prefix, the first block of the tail brings what is before it too.
                begin = first_token if block == span.first_block else block * block_tokens
                end = min(end_token, (block + 1) * block_tokens)
                tokens_by_tier[tier] = tokens_by_tier.get(tier, 0) + end - begin
    num_held_tokens = num_tokens - sum(tokens_by_tier.values())
    return (
        {CPULoadStoreSpec.medium(): num_held_tokens, **tokens_by_tier} if num_held_tokens else tokens_by_tier
    )


def take_first(tokens: Mapping[str, int], num_tokens: int) -> dict[str, int]:
    """Return the first ``num_tokens`` of ``tokens``, in the order of their names, none of them zero. Pure."""
    taken: dict[str, int] = {}
    for name, num_named in tokens.items():
        if num := min(num_named, num_tokens):
            taken[name] = num
            num_tokens -= num
    return taken


def add_tokens(totals: dict[str, int], tokens: Mapping[str, int]) -> None:
    """Add ``tokens`` to the totals of the same names."""
    for name, num_tokens in tokens.items():
        totals[name] = totals.get(name, 0) + num_tokens


def make_record(ended: EndedRequest) -> RequestRecord:
    """Return the record of a request. Pure."""
    begun = ended.begun
    missed, first_token = begun.missed, begun.num_device_tokens
    explained_end = missed[-1].first_token + missed[-1].num_tokens if missed else begun.first_token
    if explained_end < ended.num_prompt_tokens:
        missed = (*missed, MissedRun(explained_end, ended.num_prompt_tokens - explained_end, PARTIAL_BLOCK))
    num_missed_tokens = sum(run.num_tokens for run in missed)
    num_left = ended.num_prompt_tokens - first_token - num_missed_tokens
    origins = {DEVICE_ORIGIN: first_token} if first_token else {}
    if ended.failure is not None and num_left:
        missed = (MissedRun(first_token, num_left, ended.failure), *missed)
    elif ended.failure is None:
        # A load may bring the last token too, which is computed all the same.
        for tier, num_tokens in take_first(ended.tokens_by_tier, num_left).items():
            origin = _origin_of(tier)
            origins[origin] = origins.get(origin, 0) + num_tokens
    return RequestRecord(
        ended.req_id, begun.began_s, ended.num_prompt_tokens, origins, missed, begun.waited_s, begun.first_key
    )


def record_request(recorder: RequestRecorder, state: RequestState, stop: StopReason) -> None:
    """Record a request under the blocks of its first KV group; their content is that of the others'."""
    request = state.request
    num_output_tokens = request.num_tokens - request.num_prompt_tokens
    record = None if state.ended is None else make_record(state.ended)
    recorder.on_end(
        request.request_id, request.num_prompt_tokens, num_output_tokens, state.keys[0], stop, record
    )


def divide_missed(
    state: RequestState, groups: SearchGroups, first_token: int, loadable: int, num_external_tokens: int
) -> list[Segment]:
    """Return why each loadable token from ``first_token`` on is computed, as segments in order. Pure.

    What is behind them is the partial block.

    Args:
        state: the request, whose search has its final answer.
        groups: the KV groups.
        first_token: tokens before it are on the device or loaded.
        loadable: tokens that could be loaded and are not computed all the same, as the last one is.
        num_external_tokens: tokens that the engine loads.
    """
    common = groups.common_tokens
    limit = state.limits.max_load_tokens
    allowed = loadable if limit is None else min(loadable, limit // common * common)
    found, segments = state.search.found, list[Segment]()
    if state.audit is not None and state.audit.is_computed:
        segments += _divide_audited(state, found, allowed)
    elif found is None:
        segments.append(Segment(allowed, NOT_CONNECTED))
    elif num_external_tokens == 0 and found.end_token > first_token:
        declined = Segment(min(allowed, found.end_token), ENGINE_DECLINED)
        segments += [declined, *_divide_found(state, found, allowed)]
    elif found.first_end_token > found.end_token or state.choice.unwanted is not NOTHING_UNWANTED:
        segments += _divide_found(state, found, allowed)
    else:
        segments.append(Segment(allowed, None))
    if limit is not None and allowed < loadable:
        detail = MappingProxyType({"max_load_tokens": limit})
        limited = UNKNOWN_TENANT if state.tenant is None else Miss(MissCause.LIMITED, "", detail)
        segments.append(Segment(loadable, limited))
    return segments


def _divide_audited(state: RequestState, found: FoundPrefix | None, allowed: int) -> list[Segment]:
    """Return the segments up to ``allowed`` of a request that is computed whatever is held of it. Pure."""
    if state.audit is not None and state.audit.arm is Arm.STOPPED:
        return [Segment(allowed, LOADS_STOPPED)]
    if found is None:  # it ended before its search did
        return [Segment(allowed, AUDITED)]
    return [Segment(min(allowed, found.end_token), AUDITED), *_divide_found(state, found, allowed)]


def _divide_found(state: RequestState, found: FoundPrefix, allowed: int) -> list[Segment]:
    """Return the segments up to ``allowed``, of tokens that were looked up or that would be slower to load. Pure."""
    segments = []
    if found.first_end_token > found.end_token:
        short = Miss(MissCause.GROUP_SHORT, HOST_ORIGIN, MappingProxyType({"group": found.short_group}))
        segments.append(Segment(min(allowed, found.first_end_token), short))
    wanted_end, unwanted = state.choice.wanted_end_token, state.choice.unwanted.tokens
    if unwanted:
        at = found.first_end_token if wanted_end is None else wanted_end
        segments.append(Segment(min(allowed, at), None))
        for tier, num_tokens in unwanted.items():
            at += num_tokens
            segments.append(Segment(min(allowed, at), Miss(MissCause.SLOWER, _origin_of(tier))))
    segments.append(Segment(allowed, None))
    return segments


def _origin_of(tier: str) -> str:
    return HOST_ORIGIN if tier == CPULoadStoreSpec.medium() else tier


def _reason_of_limit(state: RequestState, limit: int) -> NotStored:
    params = state.request.kv_transfer_params or {}
    if limit == 0:
        return NotStored.SKIP_STORE
    return NotStored.MAX_STORE_TOKENS if params.get("max_store_tokens") == limit else NotStored.PROMPT_ONLY
