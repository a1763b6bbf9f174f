"""Law 10 through the tiering manager: each prompt token has one origin, and a cause that what happened allows.

``MissLaw`` makes the record of a request as the connector does, from what a search through the manager has found. What
happened to a block is taken from what the engine offered and what the tiers were given, not from the memories that the
manager answers from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.property.router_law import WatchedDriver, WatchedTier

from kvtier.base import OffloadKey, ReqContext, TransferJobId
from kvtier.connector.groups import GroupLayout
from kvtier.connector.jobs import JobKind, OpenTransfer
from kvtier.connector.planning import count_tokens_by_tier
from kvtier.connector.request_records import RequestRecords
from kvtier.connector.request_state import FoundPrefix, RequestState, make_request_state
from kvtier.misses import NEVER_SEEN, Miss, MissCause, NotStored, RequestRecord
from kvtier.testing.tier_suite import key_of

BLOCK_TOKENS = 4
LAYOUTS = (GroupLayout(0, BLOCK_TOKENS, 1, 1, None),)


@dataclass(eq=False)
class Prompt:
    """A request for some blocks and one token more."""

    numbers: Sequence[int]
    request_id: str
    kv_transfer_params: dict[str, Any] | None = None  # Any: what the protocol says
    block_hashes: Sequence[bytes] = ()
    num_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens = BLOCK_TOKENS * len(self.numbers) + 1


class MissLaw:
    """Makes and checks the records of one engine's requests.

    Args:
        driver: the engine.
        causes: gets every cause that was given.
    """

    def __init__(self, driver: WatchedDriver, causes: set[MissCause]) -> None:
        self.driver = driver
        self.causes = causes
        self._records = RequestRecords(LAYOUTS, driver.manager, driver.clock, driver.clock)
        self._num_requests = 0

    def arrive(self, numbers: Sequence[int]) -> RequestState:
        """Return the state of a new request; its context is what managers know it as."""
        self._num_requests += 1
        state = make_request_state(Prompt(numbers, f"served {self._num_requests}"), num_groups=1)
        state.keys[0].extend(map(key_of, numbers))
        return state

    def begin(self, state: RequestState, num_found: int, num_loaded: int) -> None:
        """Record that a request begins that has found some blocks and loads as many, or none of them."""
        num_tokens = num_loaded * BLOCK_TOKENS
        state.search.num_local_tokens = 0
        state.search.found = FoundPrefix(num_found * BLOCK_TOKENS, num_found * BLOCK_TOKENS, 0)
        promoted = self.driver.manager.promoted_for(state.context)
        self._records.on_begun(state, num_tokens)
        state.load.tokens_by_tier = count_tokens_by_tier(LAYOUTS, state.keys, promoted, 0, num_tokens)
        if num_loaded:
            keys = state.keys[0][:num_loaded]
            self._records.on_load_ended(OpenTransfer(TransferJobId(0), JobKind.LOAD, state, keys, 0, []))
        record = self._records.latest[-1]
        for run in record.missed:
            if run.miss.cause is not MissCause.PARTIAL_BLOCK:
                self.check(run.miss, state.keys[0][run.first_token // BLOCK_TOKENS], state.context)
        self._check_record(record, state, num_loaded)

    def explain(self, number: int) -> None:
        """Ask for the cause of a block, and check the answer."""
        context = ReqContext("why")
        self.check(self.driver.manager.explain(key_of(number), context), key_of(number), context)

    def check(self, miss: Miss | None, key: OffloadKey, context: ReqContext) -> None:
        """Fail when nothing that happened allows this cause."""
        self.causes.add((miss or NEVER_SEEN).cause)
        assert self._is_allowed(miss or NEVER_SEEN, key, context), f"{miss} for {key.hex()}"

    def _check_record(self, record: RequestRecord, state: RequestState, num_loaded: int) -> None:
        record.check()
        assert record.num_prompt_tokens == state.request.num_prompt_tokens
        assert sum(record.tokens_by_origin.values()) == num_loaded * BLOCK_TOKENS
        tiers = {tier.get_tier_type() for tier in self._tiers}
        assert record.tokens_by_origin.keys() <= {"host", *tiers}

    def _is_allowed(self, miss: Miss, key: OffloadKey, context: ReqContext) -> bool:
        driver, guards = self.driver, self.driver.manager._tiers
        is_in_host = driver.primary.table.get_block(key) is not None
        is_any_down = any(guard.is_out_of_service or not guard.breaker.is_closed for guard in guards)
        is_promoting = key in driver.manager._transfers.promoting
        waiter = driver.manager._waiting.by_request.get(context)
        was_stored_below = any(key in tier.stored for tier in self._tiers)
        was_loaded = any(key in tier.loaded for tier in self._tiers)
        if miss.cause is MissCause.NOT_STORED:
            return key in driver.offered and self._may_be_not_stored(miss, was_stored_below=was_stored_below)
        if miss.cause is MissCause.EVICTED:
            was_here = key in driver.reserved if miss.tier == "host" else was_stored_below
            return was_here or was_loaded
        allowed = {
            # A small memory forgets; but what is at hand, on its way or perhaps in a tier is not unknown.
            MissCause.NEVER_SEEN: not (is_in_host or is_any_down or is_promoting),
            MissCause.LOAD_FAILED: was_loaded,
            MissCause.PURGED: driver.generation > 0,
            MissCause.TIER_DOWN: is_any_down,
            MissCause.LATE: is_promoting or (waiter is not None and waiter.is_expired),
            MissCause.IN_FLIGHT: is_in_host,
            MissCause.NO_ROOM: was_stored_below,
            MissCause.LIMITED: miss.detail.get("reason") == "the engine did not load it",
        }
        return allowed.get(miss.cause, False)

    def _may_be_not_stored(self, miss: Miss, *, was_stored_below: bool) -> bool:
        wanted, is_host = [tier.settings for tier in self._tiers], miss.tier == "host"
        allowed = {
            NotStored.REUSE_FILTER: any(settings.store_threshold > 1 for settings in wanted),
            NotStored.ADMISSION: any(settings.admission is not None for settings in wanted),
            NotStored.JOB_FAILED: self.driver.num_failed_stores > 0 if is_host else was_stored_below,
            NotStored.NO_ROOM: is_host or was_stored_below,
            NotStored.DECLINED: not is_host,
        }
        return allowed.get(NotStored(miss.detail["reason"]), False)

    @property
    def _tiers(self) -> list[WatchedTier]:
        return [guard.tier for guard in self.driver.manager._tiers if isinstance(guard.tier, WatchedTier)]
