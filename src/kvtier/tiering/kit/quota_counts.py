"""What tenants keep in a place that is listed now and then, and which of their blocks leave beyond quotas.

A listing finds every block with the tenant in its name, so the sums are what is held: nothing is counted in a file or
on a server that a crash could leave wrong. Between two listings a tier adds what it has stored itself.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.config import OffloadingConfig
from kvtier.tenants import Tenants, make_tenants
from kvtier.tiering.kit.tenant_counts import BLOCKS_STAT, BYTES_STAT

T = TypeVar("T")

QUOTA_SHARE = 8
"""A listing is due when a tenant has stored this part of its quota since the last one. A smaller part lists more often;
a larger one lets each engine bring a tenant further beyond its quota meanwhile."""

RECOUNT_S = 600.0
"""Seconds after which a tier that has stored anything has the place listed again, for what other engines store."""

MAX_VICTIMS = 20_000
"""Blocks that one round may delete, some 500 bytes each in memory; a pass has any number of rounds."""


@dataclass(slots=True)
class TenantSums:
    """Blocks and bytes of each tenant, by number; mutable while a listing is read.

    Attributes:
        num_blocks: how many.
        num_bytes: what they take.
    """

    num_blocks: Counter[int] = field(default_factory=Counter)
    num_bytes: Counter[int] = field(default_factory=Counter)

    def add(self, number: int, num_blocks: int, num_bytes: int) -> None:
        """Count blocks of a tenant, or uncount them where the amounts are negative."""
        self.num_blocks[number] += num_blocks
        self.num_bytes[number] += num_bytes

    def add_found(self, key: OffloadKey | None, num_bytes: int) -> None:
        """Count a block of a listing; None: its name tells no tenant."""
        if key is not None:
            self.add(get_offload_tenant(key), 1, num_bytes)

    def mean_bytes(self) -> int:
        """Return the mean length of a block, 1 where there is none. Pure."""
        return max(1, self.num_bytes.total() // max(1, self.num_blocks.total()))


class Candidate(NamedTuple, Generic[T]):
    """A block that may leave; sorts by age.

    Attributes:
        used_s: when it was used last, or written where uses leave no trace; seconds since 1970.
        address: where it is; it orders what is of one age.
        num_bytes: what it takes.
        item: what removes it.
    """

    used_s: float
    address: str
    num_bytes: int
    item: T


class QuotaCounts:
    """The sums of the last listing, and what this tier has stored and removed since.

    Mutable are the sums, the time of the last listing and whether its pass has ended. ``_lock`` guards them.

    Args:
        tenants: the engine's tenants.
        tier: type of the tier.
        clock: seconds, monotonic.
    """

    def __init__(self, tenants: Tenants, tier: str, clock: Callable[[], float]) -> None:
        self._tenants = tenants
        self._tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        self._listed = TenantSums()
        self._since = TenantSums()
        self._listed_s: float | None = None
        self._is_unfinished = False

    def on_stored(self, keys: Iterable[OffloadKey], block_bytes: int) -> None:
        """Count blocks that this tier has written and that were not held. Thread: any."""
        with self._lock:
            for number in map(get_offload_tenant, keys):
                self._since.add(number, 1, block_bytes)

    def begin_listing(self) -> TenantSums:
        """Return empty sums for a listing that begins now. Thread: the one that lists."""
        with self._lock:
            # What is written from now on may be found too: then it counts twice until the next listing.
            self._since = TenantSums()
            self._is_unfinished = True
        return TenantSums()

    def end_listing(self, found: TenantSums) -> None:
        """Take over what a listing has found. Thread: the one that lists."""
        with self._lock:
            self._listed = found
            self._listed_s = self._clock()

    def end_pass(self) -> None:
        """Note that what the last listing has found beyond quotas was deleted. Thread: the one that lists."""
        with self._lock:
            self._is_unfinished = False

    def on_removed(self, number: int, num_blocks: int, num_bytes: int) -> None:
        """Uncount blocks that this tier has removed. Thread: any."""
        with self._lock:
            self._listed.add(number, -num_blocks, -num_bytes)

    @property
    def is_due(self) -> bool:
        """Whether what was stored since the last listing asks for another, or a pass has failed. Thread: any."""
        with self._lock:
            if self._is_unfinished:
                return True
            if not self._since.num_bytes:
                return False
            if self._listed_s is None or self._clock() - self._listed_s >= RECOUNT_S:
                return True
            stored = list(self._since.num_bytes.items())
        for number, num_bytes in stored:
            quota_bytes = self._tenants.quota_of(number, self._tier)
            if quota_bytes is not None and num_bytes > quota_bytes // QUOTA_SHARE:
                return True
        return False

    def excesses(self) -> dict[int, int]:
        """Return by how many bytes tenants are beyond their quotas by the last listing. Thread: any."""
        with self._lock:
            held = dict(self._listed.num_bytes)
        return self._tenants.excesses(held, self._tier)

    def stats(self) -> dict[str, float]:
        """Return the blocks and bytes of each label, as ``TenantCounts.stats``. Thread: any."""
        labels = self._tenants.labels()
        stats = {f"{name}{label}": 0.0 for name in (BLOCKS_STAT, BYTES_STAT) for label in labels}
        with self._lock:
            for sums in (self._listed, self._since):
                for name, counts in ((BLOCKS_STAT, sums.num_blocks), (BYTES_STAT, sums.num_bytes)):
                    for number, amount in counts.items():
                        stat = f"{name}{self._tenants.label_of(number)}"
                        stats[stat] = stats.get(stat, 0.0) + amount
        return {name: max(0.0, amount) for name, amount in stats.items()}


def make_quota_counts(config: OffloadingConfig, tier: str, clock: Callable[[], float]) -> QuotaCounts | None:
    """Return empty counts for an engine's tier; None where no tenant has a quota there."""
    tenants = make_tenants(config.settings)
    return QuotaCounts(tenants, tier, clock) if tenants is not None and tenants.has_quota(tier) else None


def plan_shares(excesses: Mapping[int, int], needed_bytes: int | None = None) -> dict[int, int]:
    """Return how many bytes of each tenant leave, of the one that is most beyond its quota first. Pure.

    Args:
        excesses: by how many bytes tenants are beyond their quotas, by number.
        needed_bytes: what is to leave together, at most; None: whatever is beyond quotas.
    """
    shares: dict[int, int] = {}
    left_bytes = sum(excesses.values()) if needed_bytes is None else needed_bytes
    for number, excess in sorted(excesses.items(), key=lambda entry: (-entry[1], entry[0])):
        share = min(excess, left_bytes)
        if share <= 0:
            break
        shares[number] = share
        left_bytes -= share
    return shares


def choose_victims(
    blocks: Iterable[tuple[int, Candidate[T]]], shares: Mapping[int, int]
) -> dict[int, list[Candidate[T]]]:
    """Return each tenant's oldest blocks that together take its share, or all that it has.

    Args:
        blocks: of tenants, by number, in any order; those of others are passed over.
        shares: how many bytes of each tenant leave.
    """
    found: dict[int, list[Candidate[T]]] = {number: [] for number in shares}
    kept_bytes = dict.fromkeys(shares, 0)
    for number, candidate in blocks:
        if number not in shares:
            continue
        found[number].append(candidate)
        kept_bytes[number] += candidate.num_bytes
        # Sorted now and then: in memory is at most twice what leaves, and one block.
        if kept_bytes[number] > 2 * shares[number] + candidate.num_bytes:
            found[number] = take_oldest(found[number], shares[number])
            kept_bytes[number] = sum(kept.num_bytes for kept in found[number])
    return {number: take_oldest(candidates, shares[number]) for number, candidates in found.items()}


def take_oldest(candidates: Iterable[Candidate[T]], num_bytes: int) -> list[Candidate[T]]:
    """Return the oldest that together take ``num_bytes``, the last of them perhaps more. Pure."""
    victims = []
    for candidate in sorted(candidates, key=lambda one: (one.used_s, one.address)):
        if num_bytes <= 0:
            break
        num_bytes -= candidate.num_bytes
        victims.append(candidate)
    return victims
