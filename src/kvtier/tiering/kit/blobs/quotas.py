"""Which blobs leave where tenants have quotas: first those that bring a tenant beyond its own, its oldest first.

Every pass of the evictor lists all blobs, and each name tells its tenant. So the sums are what the backend holds, and
a pass that a crash has cut off is made good by the next.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.namespace import Namespace
from kvtier.tiering.kit.blobs.contract import BlobNames, Listed
from kvtier.tiering.kit.block_format import format_of
from kvtier.tiering.kit.quota_counts import (
    MAX_VICTIMS,
    Candidate,
    QuotaCounts,
    TenantSums,
    choose_victims,
    plan_shares,
    take_oldest,
)


class TenantNames:
    """Tells the tenant in a block's name. Mutable is the namespace, set on the scheduler's thread, read by others.

    Names of encrypted blocks tell it in the engine's own namespace alone.
    """

    def __init__(self) -> None:
        self._namespace: Namespace | None = None

    def on_opened(self, namespace: Namespace) -> None:
        """Read the names of this namespace from now on, where it is encrypted."""
        self._namespace = namespace

    def key_of(self, namespace_name: str, name: bytes | None) -> OffloadKey | None:
        """Return the block that is called so; None where its name does not tell."""
        own = self._namespace
        if name is None or own is None:
            return None
        own_format = format_of(own)
        if not own_format.is_encrypted:
            return OffloadKey(name)
        return own_format.key(name) if namespace_name == own.name else None


class Victims(NamedTuple):
    """What leaves in one round of a pass.

    Attributes:
        listed: the blobs.
        is_all: False where one round cannot take everything that is beyond quotas.
    """

    listed: list[Listed]
    is_all: bool


class BlobQuotas:
    """The tenants of blobs. Its evictor's thread lists and plans, any other counts.

    Args:
        counts: what tenants keep.
        blob_names: tells what a name is of.
        is_bound: whether quotas are kept however much room there is, as there is no capacity.

    Attributes:
        names: tells the tenants of blocks.
        is_bound: as given.
    """

    def __init__(self, counts: QuotaCounts, blob_names: BlobNames, *, is_bound: bool) -> None:
        self.names = TenantNames()
        self.is_bound = is_bound
        self._counts = counts
        self._blob_names = blob_names
        self._found = TenantSums()

    @property
    def is_due(self) -> bool:
        """Whether tenants have stored enough for another pass, where quotas alone ask for one."""
        return self.is_bound and self._counts.is_due

    def on_stored(self, keys: Iterable[OffloadKey], block_bytes: int) -> None:
        """Count blocks that were written and that were not there."""
        self._counts.on_stored(keys, block_bytes)

    def counted(self, listing: Iterable[Listed]) -> Iterator[Listed]:
        """Pass on our own blobs of a listing, and count each for its tenant."""
        found = self._found = self._counts.begin_listing()  # an object of its own for each listing
        for listed in listing:
            found.add_found(self._key_of(listed), listed.num_bytes)
            yield listed
        self._counts.end_listing(found)

    def plan(
        self,
        oldest: Sequence[Listed],
        over: Sequence[Listed],
        excess_bytes: int,
        list_again: Callable[[], Iterable[Listed]],
    ) -> Victims:
        """Return what leaves: what is over, then what is beyond quotas, then what is oldest.

        Args:
            oldest: of all blobs.
            over: those of them whose time to live is over.
            excess_bytes: what must leave for the capacity.
            list_again: lists all blobs.
        """
        chosen = {listed.name: listed for listed in over}
        needed_bytes = excess_bytes - sum(listed.num_bytes for listed in over)
        excesses = self._excesses_without(over)
        wanted_bytes = sum(excesses.values()) if self.is_bound else min(needed_bytes, sum(excesses.values()))
        round_bytes = min(wanted_bytes, MAX_VICTIMS * self._found.mean_bytes())
        for victim in self._choose(chosen, plan_shares(excesses, round_bytes), list_again):
            chosen[victim.name] = victim
            needed_bytes -= victim.num_bytes
        if round_bytes < wanted_bytes:
            return Victims(list(chosen.values()), is_all=False)
        for listed in oldest:
            if needed_bytes <= 0:
                break
            if listed.name not in chosen:
                chosen[listed.name] = listed
                needed_bytes -= listed.num_bytes
        return Victims(list(chosen.values()), is_all=len(chosen) < MAX_VICTIMS)

    def on_removed(self, removed: Iterable[Listed]) -> None:
        """Uncount blobs that were removed."""
        for listed in removed:
            number = self._number_of(listed)
            if number is not None:
                self._counts.on_removed(number, 1, listed.num_bytes)

    def end_pass(self) -> None:
        """Note that a pass has ended well."""
        self._counts.end_pass()

    def stats(self) -> dict[str, float]:
        """Return what tenants keep, by label."""
        return self._counts.stats()

    def _excesses_without(self, over: Iterable[Listed]) -> dict[int, int]:
        """Return by how much tenants are beyond their quotas when what is over has left."""
        excesses = self._counts.excesses()
        for listed in over:
            number = self._number_of(listed)
            if number in excesses:
                excesses[number] -= listed.num_bytes
        return excesses

    def _choose(
        self,
        chosen: Mapping[str, Listed],
        shares: Mapping[int, int],
        list_again: Callable[[], Iterable[Listed]],
    ) -> Iterator[Listed]:
        if not shares:
            return
        seen = TenantSums()

        def list_candidates() -> Iterator[tuple[int, Candidate[Listed]]]:
            for listed in list_again():
                number = self._number_of(listed)
                if number is not None:
                    seen.add(number, 1, listed.num_bytes)
                    if listed.name not in chosen:
                        yield number, Candidate(listed.used_s, listed.name, listed.num_bytes, listed)

        for number, victims in choose_victims(list_candidates(), shares).items():
            # Another engine may have removed some since the shares were computed.
            gone_bytes = self._found.num_bytes[number] - seen.num_bytes[number]
            left = take_oldest(victims, shares[number] - max(0, gone_bytes))
            yield from (victim.item for victim in left)

    def _number_of(self, listed: Listed) -> int | None:
        key = self._key_of(listed)
        return None if key is None else get_offload_tenant(key)

    def _key_of(self, listed: Listed) -> OffloadKey | None:
        parsed = self._blob_names.parse(listed.name)
        return self.names.key_of(parsed.namespace, parsed.block) if parsed and parsed.block else None
