"""What must hold once everything is repaired: all ends, nothing is pinned, what tiers hold is found, and only that.

It runs at the end of each episode and now and then within it.
"""

from collections.abc import Collection, Sequence

from tests.checked_engine.laws import block_of
from tests.connector.fakes import HASH_TOKENS, hash_tokens
from tests.storm.laws import BrokenLawError, WatchedTier, require_at_rest
from tests.storm.tenancy import UNLIMITED
from tests.storm.world import World

from kvtier.base import OffloadKey, ReqContext, get_offload_tenant, make_offload_key
from kvtier.misses import MissCause

RECOVERY_S = 120.0
"""Longer than any pause of a breaker, of a key whose load failed, or of a server that was away."""

FORGET_S = 3.0
"""Longer than "not held" is believed: a lookup that hung when time went on was answered so."""

PROBED_BLOCKS = 30
"""Blocks of each tier that are looked for before and after a purge, or after the end of their time."""


class Settling:
    """Checks a world in which no fault is left.

    Args:
        world: its faults are taken back.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def run(self) -> None:
        """Fail unless every request ends, every job is reported, every slot is free, and tiers work again."""
        world = self._world
        world.repair_all()
        world.run_out()
        world.clock.advance(RECOVERY_S)
        world.run_out()
        for request in world.engine.scheduler.records.latest:
            request.check()
        for tier in world.tiers:
            if tier.open_jobs:
                raise BrokenLawError(
                    f"{len(tier.open_jobs)} jobs of {tier.get_tier_type()} were never reported"
                )
        require_at_rest(world.engine.scheduler.stats())
        over = world.host_watch.list_over()
        world.calm_step()
        world.host_watch.check_rest(over)
        self._check_events()
        self._check_everything_is_free()
        self._check_tiers_serve()
        if world.tenancy.setting is not None and world.rng.random() < 0.5:
            self._check_tenant_purge()
        if world.rng.random() < 0.5:
            self._check_expiry()

    def _check_events(self) -> None:
        """A block that was announced and not withdrawn is there, unless it was lost behind the tier's back."""
        world = self._world
        for tier, name in zip(world.tiers, world.event_names, strict=True):
            place = tier.place
            believed = sorted(world.router.believed.get(name, ())) if place.is_honest else ()
            for group, block_hash in believed:
                is_held = self._lookup(tier, world.key_of(group, block_hash))
                if is_held is False:
                    world.clock.advance(FORGET_S)
                    is_held = self._lookup(tier, world.key_of(group, block_hash))
                is_over = place.ttl_s is not None  # it may be, and the tier learns of it when it looks
                if (
                    is_held is False and place.is_honest and not is_over
                ):  # a server sees what has expired only now
                    raise BrokenLawError(f"{name} is believed to hold a block that it does not hold")

            for group, block_hash in believed[:3] if place.is_honest else ():
                self._check_loadable(tier, name, world.key_of(group, block_hash))
        world.run_out()

    def _check_loadable(self, tier: WatchedTier, name: str, key: OffloadKey) -> None:
        """A block that is announced can be loaded, and not only found."""
        world = self._world
        world.manager.purge(["host"])
        request = ReqContext("loadable")
        answer = None
        for _ in range(40):
            answer = world.manager.lookup(key, request)
            world.manager.end_step()
            if answer is not None:
                break
            world.threads.run_until_idle()
            world.clock.advance(0.01)
        world.manager.request_finished(request)
        world.router.read(world.engine.scheduler.take_events())
        is_believed = block_of(key) in world.router.believed.get(name, ())
        if answer is not True and is_believed and tier.place.ttl_s is None:
            raise BrokenLawError(f"{name} is believed to hold a block that cannot be loaded")

    def _check_everything_is_free(self) -> None:
        """Nothing is pinned when nothing is under way: as many new blocks as there are slots find room."""
        world = self._world
        number = world.tenancy.find(UNLIMITED).number
        keys = [make_offload_key(b"filler %9d" % slot, 0, number) for slot in range(world.num_slots)]
        request = ReqContext("filler")
        output = world.manager.prepare_store(keys, request)
        if output is None or len(output.keys_to_store) < len(keys):
            raise BrokenLawError("slots stay pinned when nothing is under way")
        world.manager.complete_store(keys, request, success=False)
        world.manager.request_finished(request)

    def _check_tiers_serve(self) -> None:
        """What some tier holds is served, now that all of them work."""
        world = self._world
        prompt = world.make_tokens(3 * HASH_TOKENS)
        self._serve(prompt)
        world.clock.advance(RECOVERY_S)
        world.run_out()
        world.forget_host()
        tenant = world.tenancy.find(UNLIMITED)
        keys = [
            make_offload_key(tenant.own_hash(block_hash), group, tenant.number)
            for block_hash in hash_tokens(prompt)[world.shape.factor - 1 :: world.shape.factor]
            for group in range(len(world.engine.scheduler.layouts))
        ]
        are_held = all(any(self._lookup(tier, key) for tier in world.tiers) for key in keys)
        if are_held and keys:
            world.seen["asked again"] += 1
            num_before = world.engine.seen["load good"]
            self._serve(prompt)
            if len(keys) <= world.num_slots and world.engine.seen["load good"] == num_before:
                raise BrokenLawError("a tier holds the blocks of a prompt, and all of it is computed")

    def _check_tenant_purge(self) -> None:
        """After the purge of a tenant nothing of it is found, and of others everything that was."""
        world = self._world
        number = world.rng.choice(world.tenancy.numbers())
        found = [self._list_found(tier) for tier in world.tiers]
        are_safe = [self._keeps_others(tier) for tier in world.tiers]
        purge = world.manager.purge(None, number)
        for _ in range(PROBED_BLOCKS):
            if purge.result is not None:
                break
            world.calm_step()
        if purge.result is None:
            raise BrokenLawError("a purge does not end")
        world.seen["tenant purged"] += 1
        if world.manager.primary_tier.count_held(number):
            raise BrokenLawError("a purge has left blocks of its tenant in host memory")
        for tier, name, keys, is_safe in zip(world.tiers, world.event_names, found, are_safe, strict=True):
            if tier.get_tier_type() in purge.result.unable:  # two tiers of one type share the name
                continue
            world.seen["tenant purged in a tier"] += 1
            others = {key for key in keys if is_safe and get_offload_tenant(key) != number}
            self._check_purged(tier, name, keys, number, others)

    def _keeps_others(self, tier: WatchedTier) -> bool:
        """Return whether nothing but the purge itself can take a block from a tier now."""
        tenants, place = self._world.tenancy.tenants, tier.place
        is_listed = place.quota_tier in {"obj", "valkey"}  # its quotas are kept at any time
        has_quota = is_listed and tenants is not None and tenants.has_quota(place.quota_tier)
        return place.is_honest and place.ttl_s is None and not has_quota

    def _check_purged(
        self,
        tier: WatchedTier,
        name: str,
        keys: Sequence[OffloadKey],
        number: int,
        others: Collection[OffloadKey],
    ) -> None:
        """Fail when a block is found that was purged, or one of ``others`` is not."""
        for key in keys:
            is_held = self._lookup(tier, key)
            if is_held and get_offload_tenant(key) == number:
                raise BrokenLawError(f"{name} still finds a block of a tenant that was purged")
            if is_held is False and key in others:
                raise BrokenLawError(f"the purge of a tenant took a block of another one from {name}")

    def _check_expiry(self) -> None:
        """After its time to live no block is found, and its tier says why."""
        world = self._world
        for tier, name in zip(world.tiers, world.event_names, strict=True):
            ttl_s = tier.place.ttl_s
            if ttl_s is None or not tier.place.is_honest:
                continue
            keys = self._list_found(tier)
            world.clock.advance(ttl_s + RECOVERY_S)
            world.run_out()
            for key in keys:
                if self._lookup(tier, key):
                    raise BrokenLawError(f"{name} finds a block beyond its time to live")
                why = tier.explain(key, ReqContext("expired"))
                world.seen[f"expired, {name} says {why and why.cause.value}"] += 1
                if why is not None and why.cause is not MissCause.EXPIRED:
                    raise BrokenLawError(f"{name} says {why.cause.value} of a block whose time is over")

    def _list_found(self, tier: WatchedTier) -> list[OffloadKey]:
        """Return some blocks that a tier finds now."""
        known = sorted(tier.place.stored_s)[-PROBED_BLOCKS:]
        return [key for key in known if self._lookup(tier, key)]

    def _serve(self, prompt: list[int]) -> None:
        world = self._world
        name = None if world.tenancy.setting is None else UNLIMITED
        world.add_request(list(prompt), len(prompt) + 1, name)
        world.run_out()

    def _lookup(self, tier: WatchedTier, key: OffloadKey) -> bool | None:
        request = ReqContext("probe")
        for _ in range(20):
            answer = tier.lookup(key, request)
            if answer is not None:
                return answer
            tier.end_step()
            self._world.threads.run_until_idle()
        return None
