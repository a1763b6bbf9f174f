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
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from kvtier.base import OffloadingManager, OffloadKey
from kvtier.connector.common import StopReason
from kvtier.connector.features import UNDECIDED, RequestFeature, Withheld
from kvtier.connector.groups import GroupLayout
from kvtier.connector.jobs import OpenTransfer
from kvtier.connector.metrics import add_tokens
from kvtier.connector.missed_parts import divide_missed, origin_of
from kvtier.connector.prefix_search import split_by_need
from kvtier.connector.protocols import Request
from kvtier.connector.request_state import RequestState
from kvtier.departed import DepartedBlocks
from kvtier.misses import (
    DEVICE_ORIGIN,
    FORGOTTEN,
    HOST_ORIGIN,
    MISSED_TOKENS,
    NEVER_SEEN,
    Miss,
    MissCause,
    MissedRun,
    NotStored,
    RequestRecord,
    not_stored,
)
from kvtier.seen import SeenBlocks

MAX_RECORDS = 1000
"""Requests whose records are kept, some 600 bytes each. More take longer to read through a control socket."""

MAX_UNSTORED_BLOCKS = 2**18
"""Blocks remembered that were not offered to the manager, because of limits or want of room; 4 MB at most."""

MAX_BEHIND = 16
"""Blocks behind the first missing one that a manager is given; more than any of them looks at."""

OF_OWN_PAST = frozenset({MissCause.EVICTED, MissCause.EXPIRED, MissCause.NOT_STORED})
"""Causes that are about blocks which this engine has had: what no earlier request had has another cause."""

PARTIAL_BLOCK = Miss(MissCause.PARTIAL_BLOCK)
LOAD_LOST = Miss(MissCause.LOAD_FAILED, HOST_ORIGIN, MappingProxyType({"reason": "evicted before the load"}))
LOAD_RESET = Miss(MissCause.LOAD_FAILED, HOST_ORIGIN, MappingProxyType({"reason": "reset"}))
LOAD_FAILED = Miss(MissCause.LOAD_FAILED, HOST_ORIGIN, MappingProxyType({"reason": "copy to the device"}))


class BegunRequest(NamedTuple):
    """What is known of a request since the engine began it, until its load has ended.

    Attributes:
        began_s: when it began, seconds since 1970.
        num_device_tokens: tokens that the device had.
        first_token: tokens before it are on the device or loaded, unless the load fails.
        missed: why tokens from there on are computed; those behind the last of them are the partial block.
        waited_s: seconds since its first search.
        first_key: key of the first block that is missing.
    """

    began_s: float
    num_device_tokens: int
    first_token: int
    missed: tuple[MissedRun, ...]
    waited_s: float
    first_key: OffloadKey | None


class EndedRequest(NamedTuple):
    """What is known of a request since its load has ended, or since it began without one.

    Attributes:
        req_id: the request.
        num_prompt_tokens: length of its prompt.
        begun: what was known when it began.
        tokens_by_tier: tokens that its load has brought, by medium or type of their tier.
        failure: why the load has failed, so that its tokens were computed; None: it has not.
    """

    req_id: str
    num_prompt_tokens: int
    begun: BegunRequest
    tokens_by_tier: Mapping[str, int]
    failure: Miss | None


class RequestRecords(RequestFeature):
    """The records of one scheduler half. Requests come from its thread; any thread may read.

    The records and counts made so far are mutable. A lock guards them, which only readers take, and the scheduler's
    thread when nothing has read for a thousand requests. A request costs a tuple on the way of its step; records and
    counts are made of it when they are read.

    Args:
        layouts: the KV groups, by index.
        manager: where blocks are; asked for causes if it can tell.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
        why_computed: what features say of a request that they have computed (``RequestFeature.why_computed``).
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        manager: OffloadingManager,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        why_computed: Sequence[Callable[[RequestState], Withheld | None]] = (),
    ) -> None:
        self._layouts = layouts
        self._groups = split_by_need(layouts)
        self._manager = manager
        self._clock = clock
        self._wall_clock = wall_clock
        self._why_computed = why_computed
        self._loading: dict[RequestState, BegunRequest] = {}
        # Of each request that has begun and not finished; None while its load is open.
        self._begun: dict[RequestState, EndedRequest | None] = {}
        self._latest: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self._unread: deque[EndedRequest] = deque()
        self._lock = threading.Lock()
        self._tokens_by_origin: dict[str, int] = {}
        self._missed_tokens: dict[tuple[MissCause, str], int] = {}
        self._num_requests = 0
        self._seen = SeenBlocks(clock)
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

    def on_begun(self, state: RequestState, num_loaded_tokens: int) -> None:
        if state in self._begun:
            return
        withheld: list[Withheld] = []
        for why_computed in self._why_computed:
            reason = why_computed(state)
            if reason is UNDECIDED:
                return
            if reason is not None:
                withheld.append(reason)
        search, num_prompt_tokens = state.search, state.request.num_prompt_tokens
        num_local_tokens = search.num_local_tokens or 0
        last_token = num_prompt_tokens - 1 if num_prompt_tokens else 0
        first_token = min(num_local_tokens + num_loaded_tokens, last_token)
        missed: tuple[MissedRun, ...] = ()
        # A request that misses nothing pays for no cause: the partial block is added where the record is made.
        common_tokens = self._groups.common_tokens
        max_end_token = last_token if search.max_end_token is None else search.max_end_token
        loadable = min(last_token, max_end_token // common_tokens * common_tokens)
        if first_token < loadable:
            missed = self._explain(state, first_token, loadable, num_loaded_tokens, withheld)
        begun = BegunRequest(
            self._wall_clock(),
            min(num_local_tokens, first_token),
            first_token,
            missed,
            self._clock() - search.began_s,
            search.first_missing,
        )
        if num_loaded_tokens:
            self._begun[state], self._loading[state] = None, begun
        else:
            self._begun[state] = self._end(state, begun, {}, None)

    def on_load_ended(self, job: OpenTransfer) -> None:
        state = job.state
        begun = self._loading.pop(state, None)
        if begun is None:
            return  # not its first load
        failure = LOAD_RESET if job.is_void else LOAD_FAILED if job.keys else LOAD_LOST
        ended = self._end(state, begun, state.load.tokens_by_tier, failure if job.has_failed else None)
        if state in self._begun:
            self._begun[state] = ended

    def record_of(self, state: RequestState) -> RequestRecord | None:
        """Return the record of a request that has not finished; None before its load has ended."""
        ended = self._begun.get(state)
        return None if ended is None else make_record(ended)

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

    def on_finished(self, state: RequestState, stop: StopReason, is_traffic: bool) -> None:
        ended = self._begun.pop(state, None)
        if ended is not None:
            # What the device had was computed or loaded by an earlier request.
            layout = self._groups.first
            num_known = ended.begun.num_device_tokens // layout.block_tokens
            state.grow_keys(self._layouts)
            self._seen.add(state.keys[layout.idx][num_known : count_computed(state) // layout.block_tokens])
        if self._excluded:  # it may have been known before it was excluded
            self.on_dropped(state.context.req_id)
        if state.limits.max_store_tokens is not None or state.stores.batch_blocks is not None:
            self._remember_unstored(state)

    def on_dropped(self, req_id: str) -> None:
        self._excluded.pop(req_id, None)

    def stats(self) -> dict[str, float]:
        self._read()
        with self._lock:
            counts = {"connector.recorded_requests": float(self._num_requests)}
            for origin, num_tokens in self._tokens_by_origin.items():
                counts[f"connector.prompt_tokens.{origin}"] = float(num_tokens)
            for (cause, tier), num_tokens in self._missed_tokens.items():
                name = MISSED_TOKENS + cause.value
                counts[f"{name}.{tier}" if tier else name] = float(num_tokens)
            return counts

    def _remember_unstored(self, state: RequestState) -> None:
        """Remember the blocks of a request that were not offered to the manager, or that it had no room for."""
        limit, stores, num_tokens = state.limits.max_store_tokens, state.stores, count_computed(state)
        state.grow_keys(self._layouts)
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

    def _explain(
        self,
        state: RequestState,
        first_token: int,
        loadable: int,
        num_loaded_tokens: int,
        withheld: Sequence[Withheld],
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
            and (not withheld or not any(one.tokens_by_tier for one in withheld))
        ):  # nearly every miss: everything behind what is held is missing for one cause
            return tuple(self._explain_missing(state, first_token, loadable, None))
        runs: list[MissedRun] = []
        at = first_token
        for end_token, given in divide_missed(
            state, self._groups, first_token, loadable, num_loaded_tokens, withheld
        ):
            if end_token <= at:
                continue
            if given is not None and given.cause is not MissCause.GROUP_SHORT:
                runs.append(MissedRun(at, end_token - at, given))
            else:
                runs += self._explain_missing(state, at, end_token, given)
            at = end_token
        return tuple(runs)

    def _explain_missing(
        self, state: RequestState, first_token: int, end_token: int, short: Miss | None
    ) -> Iterator[MissedRun]:
        """Yield why tokens are missing: what this engine has had, then what is behind it."""
        miss = self._ask(state, first_token, end_token, short)
        seen_end = (
            self._find_seen_end(state, first_token, end_token) if miss.cause in OF_OWN_PAST else end_token
        )
        yield MissedRun(first_token, seen_end - first_token, miss)
        if seen_end < end_token:
            yield MissedRun(seen_end, end_token - seen_end, self._ask(state, seen_end, end_token, short))

    def _find_seen_end(self, state: RequestState, first_token: int, end_token: int) -> int:
        """Return up to where an earlier request had these tokens; ``end_token`` where that is not known."""
        layout = self._groups.first
        keys, block_tokens = state.keys[layout.idx], layout.block_tokens
        first, end = first_token // block_tokens, min(len(keys), -(-end_token // block_tokens))
        if first >= end or not self._seen.has(keys[first]):
            return end_token
        # Keys are chained: where one was seen, so were those before it.
        seen_end = bisect_left(range(end), 0, first + 1, key=lambda block: -self._seen.has(keys[block]))
        return min(end_token, seen_end * block_tokens)

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
        if miss is None or miss.cause is MissCause.NEVER_SEEN:
            asked = keys[block] if block < len(keys) else None
            miss = self._recall(state, first_token, asked) or self._describe_unknown(
                state, miss or NEVER_SEEN
            )
        if short is None:
            return miss
        detail = {**miss.detail, **short.detail, "cause": miss.cause.value}
        return Miss(short.cause, miss.tier, MappingProxyType(detail))

    def _recall(self, state: RequestState, first_token: int, key: OffloadKey | None) -> Miss | None:
        """Return what the connector itself knows of a block; None where no request has had it before."""
        miss = None if self._unstored is None or key is None else self._unstored.explain(key)
        return miss or (FORGOTTEN if self._was_seen(state, first_token) else None)

    def _describe_unknown(self, state: RequestState, miss: Miss) -> Miss:
        """Return the miss of a block of which nothing is known, with what sets its request apart from others.

        A salt may be a secret: its id is made with a key of this process and is of no use elsewhere.
        """
        salt = getattr(state.request, "cache_salt", None)  # only vLLM's requests have one
        detail = dict(miss.detail)
        if (known_s := self._seen.known_s) is not None:
            detail["known_s"] = round(known_s)
        if salt:
            detail["cache_salt"] = blake2b(str(salt).encode(), key=self._salt_key, digest_size=4).hexdigest()
        if state.key_salt:
            is_adapted = getattr(state.request, "lora_request", None) is not None
            names_images = not is_adapted and getattr(state.request, "mm_features", None)  # only vLLM's
            detail["client_names" if names_images else "adapter"] = "yes"
        return Miss(MissCause.NEVER_SEEN, "", MappingProxyType(detail)) if detail else NEVER_SEEN

    def _was_seen(self, state: RequestState, token: int) -> bool:
        """Return whether an earlier request had the block in which ``token`` is."""
        layout = self._groups.first
        keys, block = state.keys[layout.idx], token // layout.block_tokens
        return block < len(keys) and self._seen.has(keys[block])

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
    ) -> EndedRequest:
        ended = EndedRequest(
            state.context.req_id, state.request.num_prompt_tokens, begun, tokens_by_tier, failure
        )
        self._unread.append(ended)
        if len(self._unread) >= MAX_RECORDS:
            self._read()
        return ended

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


def count_computed(state: RequestState) -> int:
    """Return of how many tokens of an ended request there was KV. Pure."""
    request = state.request
    # The KV of the last token of an answer is never computed; without an answer the prompt may be computed in part.
    has_answer = request.num_tokens > request.num_prompt_tokens
    return request.num_tokens - 1 if has_answer else state.blocks.num_computed_tokens


def take_first(tokens: Mapping[str, int], num_tokens: int) -> dict[str, int]:
    """Return the first ``num_tokens`` of ``tokens``, in the order of their names, none of them zero. Pure."""
    taken: dict[str, int] = {}
    for name, num_named in tokens.items():
        if num := min(num_named, num_tokens):
            taken[name] = num
            num_tokens -= num
    return taken


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
            origin = origin_of(tier)
            origins[origin] = origins.get(origin, 0) + num_tokens
    return RequestRecord(
        ended.req_id, begun.began_s, ended.num_prompt_tokens, origins, missed, begun.waited_s, begun.first_key
    )


def _reason_of_limit(state: RequestState, limit: int) -> NotStored:
    params = state.request.kv_transfer_params or {}
    if limit == 0:
        return NotStored.SKIP_STORE
    return NotStored.MAX_STORE_TOKENS if params.get("max_store_tokens") == limit else NotStored.PROMPT_ONLY
