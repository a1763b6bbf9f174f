"""Tenants of requests, quotas and times to live in a storm: drawn for each life, and their laws for host memory.

What a request of a tenant computes has other bytes than what another tenant's computes of the same tokens, so each
load proves that no tenant finds blocks of another one. The laws are written down here once more, without the
production code's plans: who pays for a store, and how old a block may be.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.storm.laws import BrokenLawError

from kvtier.base import OffloadKey, ReqContext, get_offload_tenant
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.departed import HostDeparture
from kvtier.tenants import HOST, NO_TENANT, OTHERS, Tenant, Tenants, parse_tenants

UNLIMITED = "dora"
"""The tenant that is always listed and never has a quota."""

SALT = "a storm's salt"


@dataclass(frozen=True)
class Tenancy:
    """What the settings of one life say of tenants.

    Attributes:
        setting: the engine's ``tenants``; None: requests have none.
        salt: the engine's ``tenant_salt``.
        tenants: the same as the production code reads it.
    """

    setting: Mapping[str, Any] | None = None  # Any: a user's JSON
    salt: str = ""
    tenants: Tenants | None = field(default=None, compare=False)

    def is_served(self, name: object) -> bool:
        """Return whether requests that give ``name`` as their tenant are served. Pure."""
        if self.setting is None or name in self.setting:
            return name != OTHERS
        return OTHERS in self.setting and (name is None or (isinstance(name, str) and name != ""))

    def draw_name(self, rng: random.Random) -> object:
        """Return what a request gives as its tenant; None for nothing."""
        if self.setting is None:
            return rng.choice([None] * 9 + ["alice"])
        return rng.choice([None, "alice", "alice", "bob", "bob", UNLIMITED, "eve", 7, ""])

    def find(self, name: object) -> Tenant:
        """Return the tenant that a served request's ``name`` stands for."""
        if self.tenants is None or not isinstance(name, str):
            return NO_TENANT
        return self.tenants.make(name)

    def numbers(self) -> list[int]:
        """Return the numbers of all tenants that requests may have."""
        return [self.find(name).number for name in (None, "alice", "bob", UNLIMITED, "eve")]


def draw_tenancy(rng: random.Random, block_bytes: Mapping[str, int]) -> Tenancy:
    """Draw whether there are tenants, which are listed, and what they may keep.

    Args:
        rng: where chance comes from.
        block_bytes: what a block takes in each place that keeps quotas.
    """
    salt = SALT if rng.random() < 0.2 else ""
    if rng.random() < 0.4:
        return Tenancy(salt=salt)

    def draw_entry() -> dict[str, Any]:  # Any: a user's JSON
        quotas = {
            place: f"{num_bytes * rng.choice([1, 2, 4, 8]) + rng.randrange(2)}B"
            for place, num_bytes in block_bytes.items()
            if rng.random() < 0.5
        }
        return {"quota_bytes": quotas} if quotas else {}

    setting: dict[str, Any] = {"alice": draw_entry(), "bob": draw_entry(), UNLIMITED: {}}
    if rng.random() < 0.6:
        setting[OTHERS] = draw_entry()
    return Tenancy(setting, salt, parse_tenants(setting, salt, frozenset(block_bytes)))


class HostWatch:
    """Sits on a manager of host memory, and checks who is evicted for whom, and how old blocks are.

    Args:
        manager: three of its methods are replaced.
        tenants: of the engine.
        row_bytes: of a slot.
        ttl_s: seconds that a block may live; None: for ever.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        manager: CPUOffloadingManager,
        tenants: Tenants | None,
        row_bytes: int,
        ttl_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._tenants = tenants
        self._row_bytes = row_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored_s: dict[OffloadKey, float] = {}
        self._evict = manager.evict
        self._finish_writes = manager.finish_writes
        if tenants is not None and tenants.has_quota(HOST):
            manager.evict = self._watch_evict  # type: ignore[method-assign]  # what every store passes
        self._lookup = manager.lookup
        if ttl_s is not None:
            manager.finish_writes = self._watch_finish  # type: ignore[method-assign]  # the same
            manager.lookup = self._watch_lookup  # type: ignore[method-assign]  # what every search passes

    def list_over(self) -> set[OffloadKey]:
        """Return the idle blocks that have lived for longer than they may."""
        if self._ttl_s is None:
            return set()
        table, limit_s = self._manager.table, self._clock() - self._ttl_s
        held = table.slots.held_blocks(table.get_block)
        return {key for key, block in held.items() if block.ref_cnt == 0 and self._stored_s[key] <= limit_s}

    def check_rest(self, over: set[OffloadKey]) -> None:
        """Fail when a block that was over before a step is there after it, although nothing is under way."""
        if over & self.list_over():
            raise BrokenLawError("host memory keeps a block beyond its time to live")

    def check_sums(self, stats: Mapping[str, float]) -> None:
        """Fail when the tenants' blocks are not all blocks, or not those that are held."""
        if self._tenants is None:
            return
        table = self._manager.table
        held = Counter(map(get_offload_tenant, table.slots.held_blocks(table.get_block)))
        told: Counter[str] = Counter()
        for number, num in held.items():
            told[self._tenants.label_of(number)] += num
        for label in self._tenants.labels():
            if stats[f"primary.tenant_blocks.{label}"] != told[label]:
                raise BrokenLawError(
                    f"tenant {label} has {told[label]} blocks in host memory, not as the statistics say"
                )

    def _watch_finish(
        self, keys: Collection[OffloadKey], *, success: bool, is_promotion: bool = False
    ) -> list[OffloadKey]:
        finished = self._finish_writes(keys, success=success, is_promotion=is_promotion)
        if success:
            self._stored_s.update(dict.fromkeys(finished, self._clock()))
        return finished

    def _watch_lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = self._lookup(key, req_context)
        if answer and self._ttl_s is not None and self._stored_s[key] <= self._clock() - self._ttl_s:
            raise BrokenLawError("host memory serves a block beyond its time to live")
        return answer

    def _watch_evict(
        self,
        num: int,
        named: Collection[OffloadKey],
        protected: Collection[OffloadKey],
        why: HostDeparture = HostDeparture.EVICTED,
        new: Sequence[OffloadKey] = (),
    ) -> list[OffloadKey] | None:
        table = self._manager.table
        held = table.slots.held_blocks(table.get_block)
        idle = [key for key, block in held.items() if block.ref_cnt == 0]
        evicted = self._evict(num, named, protected, why, new)
        if evicted is not None and new:
            left = {key for key in idle if key not in named and key not in protected}.difference(evicted)
            self._require_fair(Counter(map(get_offload_tenant, held)), new, evicted, left)
        return evicted

    def _require_fair(
        self,
        held: Counter[int],
        new: Sequence[OffloadKey],
        evicted: Sequence[OffloadKey],
        left: set[OffloadKey],
    ) -> None:
        """Fail when a tenant within its quota has paid for one beyond it.

        Args:
            held: blocks of each tenant before the eviction.
            new: blocks that the store brings.
            evicted: blocks that left for it.
            left: blocks that could have.
        """
        storer = get_offload_tenant(new[0])
        lost = Counter(map(get_offload_tenant, evicted))
        beyond = min(len(evicted), self._excess(storer, held[storer] + len(new)))
        paid = sum(
            max(0, num - self._excess(number, held[number]))
            for number, num in lost.items()
            if number != storer
        )
        if paid > len(evicted) - beyond:
            raise BrokenLawError("a tenant within its quota has paid for one beyond it")
        could_pay = Counter(map(get_offload_tenant, left))
        if lost[storer] < beyond and could_pay[storer] and paid:
            raise BrokenLawError("a tenant beyond its quota keeps idle blocks while others pay")
        for number in could_pay:
            if paid and number != storer and self._excess(number, held[number] - lost[number]):
                raise BrokenLawError("a tenant within its quota pays while one beyond it has idle blocks")

    def _excess(self, number: int, num_blocks: int) -> int:
        assert self._tenants is not None, "without tenants nothing is watched"
        quota_bytes = self._tenants.quota_of(number, HOST)
        return 0 if quota_bytes is None else max(0, num_blocks - quota_bytes // self._row_bytes)
