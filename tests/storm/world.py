"""One engine over its tiers, what may happen to it, and what must hold after each thing that has.

The places outlive the engine: it is killed and started again over what they hold, with other settings. Blocks of other
weights have other bytes, so each load proves that nothing old is served.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tests.checked_engine.engine import CheckedEngine
from tests.checked_engine.laws import Router
from tests.checked_engine.memory import PAGE_BYTES, HostRows, continue_tokens
from tests.checked_engine.requests import CheckedRequest, Phase
from tests.checked_engine.rules import ResetKind, draw_rules
from tests.connector.fakes import HASH_TOKENS, hash_tokens
from tests.storm.laws import BrokenLawError, ThreadErrors, WatchedTier, require_bounded
from tests.storm.place import StormPlace, Weather
from tests.storm.secrecy import StormRing
from tests.storm.tenancy import HostWatch, Tenancy, draw_tenancy
from tests.storm.threads import WALL_START_S, SimThreads

from kvtier.base import OffloadKey, make_offload_key
from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, ControlError, TierError
from kvtier.tenants import HOST, NO_TENANT, tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.tiering.base import CascadeMode, TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

POLICIES = ("lru", "lru", "arc", "hazard")
MAX_REQUESTS = 6
MAX_PROMPT_BLOCKS = 8
NUM_STREAMS = 4
MAX_SETTLE_STEPS = 600
SETTLE_TICK_S = 0.5
PATIENCE_STEPS = 300
"""Steps without a fault, half a second each, within which every request must have ended."""

FIRST_OWN_TOKEN = FIRST_WEIGHTS = 1_000_000
"""Tokens of which a request alone has a hundred, and weights after resets, are numbered from here; others far below."""

Params: TypeAlias = dict[str, Any] | None  # Any: a client's JSON
"""The hints of a request."""

PlaceMaker = Callable[[Weather], StormPlace]


@dataclass(frozen=True)
class Shape:
    """What stays for all lives of an engine.

    Attributes:
        places: makers of the tiers' places, in the order in which they are made.
        window_tokens: of a second KV group; None for one group.
        num_workers: workers.
        factor: device blocks in an offloaded block.
        has_ring: whether its lives may encrypt.
    """

    places: tuple[PlaceMaker, ...]
    window_tokens: int | None
    num_workers: int
    factor: int
    has_ring: bool


class World:
    """The engine, its tiers and their places.

    Args:
        rng: where all chance comes from.
        shape: what stays for all lives.

    Attributes:
        shape: what stays for all lives.
        places: where the tiers' blocks are.
        engine: the present engine.
        ring: its key ring; None where no life encrypts.
        tenancy: what the present settings say of tenants.
        tenant_of: the number of the tenant of each hash that a tenant's blocks have had.
        seen: how often what has happened.
    """

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng = rng
        self.clock = ManualClock()
        self.threads = SimThreads(rng, self.clock)
        self.errors = ThreadErrors()
        self.seen: Counter[str] = Counter()
        self.life = 0
        self.shape = shape
        self._weather = Weather(rng, self.clock, self.wall_clock, self.threads)
        self._latest: list[CheckedRequest] = []
        self._num_arrived = 0
        self._num_weights = 0
        self.places: list[StormPlace] = []
        self.ring: StormRing | None = None
        self.tenancy = Tenancy()
        self.tenant_of: dict[bytes, int] = {}

    def begin(self) -> None:
        """Make the places and start the first engine; the simulated threads are installed."""
        self.places = [make(self._weather) for make in self.shape.places]
        if self.shape.has_ring:
            self.ring = StormRing(self.wall_clock)
        self._start()

    def close(self) -> None:
        """End everything."""
        self.threads.kill()
        for place in self.places:
            place.close()
        if self.ring is not None:
            self.ring.close()

    def wall_clock(self) -> float:
        """Return the simulated seconds since 1970."""
        return WALL_START_S + self.clock()

    # What happens

    def arrive(self) -> None:
        """A request comes, with a prompt that others share or with one of its own."""
        rng = self.rng
        if len(self.engine.requests) >= MAX_REQUESTS:
            return
        first = 100 * rng.randrange(NUM_STREAMS)
        tokens = list(range(first, first + HASH_TOKENS * MAX_PROMPT_BLOCKS))
        if self._latest and rng.random() < 0.5:
            tokens = self._latest[int(rng.random() * len(self._latest))].tokens
        num_shared = HASH_TOKENS * rng.randint(1, MAX_PROMPT_BLOCKS)
        num_own = HASH_TOKENS * rng.randint(1, 3) if rng.random() < 0.25 else 0
        prompt = [*tokens[:num_shared], *self.make_tokens(num_own)][: HASH_TOKENS * MAX_PROMPT_BLOCKS]
        prompt += self.make_tokens(num_own + rng.randrange(HASH_TOKENS))[num_own:]
        hints = rng.choice([None, None, None, None, {"skip_load": True}, {"max_load_tokens": 8}])
        max_tokens = len(prompt) + rng.randint(1, 12)
        self.add_request(prompt, max_tokens, self.tenancy.draw_name(rng), hints)

    def step(self) -> None:
        """The engine takes a step, beside threads and copies, or a part of one."""
        rng, engine = self.rng, self.engine
        if self._forgets_on_device:
            engine.cache.forget()
        chunk, drafts = (
            rng.choice([4, 8, 16, 64]),
            [rng.random() < 0.5 for _ in range(rng.choice([0, 0, 1, 3]))],
        )
        if rng.random() < 0.9:
            engine.step(chunk, drafts)
        else:
            parts = (lambda: engine.schedule(chunk, drafts), engine.execute, engine.process_output)
            rng.choice(parts)()
        self.router.read(engine.scheduler.take_events())
        self.router.check_host(self.manager.primary_tier.table)
        self.threads.run(rng.choice([0, 4, 20, 60, 60]))
        self.clock.advance(rng.choice([0.0, 0.01, 0.1, 0.5]))

    def copy(self) -> None:
        """Handlers copy."""
        self.engine.copy(self.rng.randint(1, 6), self.rng)

    def run_threads(self) -> None:
        """Threads of tiers run."""
        self.threads.run(self.rng.choice([1, 3, 10, 100]))

    def abort(self) -> None:
        """A client goes away."""
        alive = [request for request in self.engine.requests if request.phase is not Phase.ENDED]
        if alive:
            self.engine.abort(alive[int(self.rng.random() * len(alive))])

    def preempt(self) -> None:
        """The engine takes a request's device blocks."""
        running = self.engine.running
        if running:
            self.engine.preempt(running[int(self.rng.random() * len(running))])

    def reset(self) -> None:
        """The weights change, or the connector alone is told to forget."""
        self._num_weights += 1
        kind = self.rng.choice(list(ResetKind))
        is_done = self.engine.reset(kind, FIRST_WEIGHTS + self._num_weights)
        if is_done and self.manager.stats()["primary.held_blocks"]:
            raise BrokenLawError("a reset has left blocks in host memory")

    def purge(self) -> None:
        """An operator forgets the blocks of a tier, or of all; or those of one tenant there."""
        names = [None, ["host"], *([tier.get_tier_type()] for tier in self.tiers)]
        number = None if self.tenancy.setting is None else self.rng.choice([None, *self.tenancy.numbers()])
        with suppress(ControlError):  # a purge of other blocks is under way
            self.manager.purge(names[int(self.rng.random() * len(names))], number)

    def forget_host(self) -> None:
        """Device and host memory forget what is not in use, so that the tiers are asked."""
        self.engine.cache.forget()
        with suppress(ControlError):  # a purge of a tenant's is under way
            self.manager.purge(["host"])

    def rekey(self) -> None:
        """An operator makes a key, or drops one."""
        if self.ring is None:
            return
        self.seen[self.ring.change(self.rng)] += 1
        for tier in self.tiers:
            tier.on_ring_changed()
            tier.place.is_honest &= not tier.place.is_secret  # what was announced may be unreadable by now

    def pass_time(self) -> None:
        """Time goes by, now and then a lot of it."""
        self.clock.advance(self.rng.choice([0.5, 0.5, 2.0, 6.0, 35.0, 700.0]))

    def fail_copy(self) -> None:
        """The next copies of a handler fail, or are declined."""
        worker = self.rng.choice(self.engine.workers)
        handler = worker.loads if self.rng.random() < 0.5 else worker.stores
        if self.rng.random() < 0.5:
            handler.num_to_fail += 1
        else:
            handler.num_to_decline += 1

    def set_fault(self, allowed: Collection[str] | None = None) -> None:
        """A fault of a place becomes likely, or certain."""
        place = self._draw_place()
        names = [name for name in place.fault_names if allowed is None or name in allowed] if place else []
        name = self.rng.choice(place.fault_names) if place else ""
        ratio = self.rng.choice([0.05, 0.3, 0.3, 1.0])
        if place is not None and name in names:
            place.ratios[name] = ratio
            self.seen[f"fault {name}"] += 1

    def repair(self) -> None:
        """A place works again."""
        place = self._draw_place()
        if place is not None:
            place.ratios.clear()

    def hurt(self) -> None:
        """Something that lies in a place is damaged."""
        place = self._draw_place()
        if place is not None:
            place.hurt()
            self.seen["hurt"] += 1

    def restart(self) -> None:
        """The engine ends as it should and is started again."""
        self.manager.shutdown()
        self.router.read(self.engine.scheduler.take_events())
        left = {tier: len(blocks) for tier, blocks in self.router.believed.items() if tier and blocks}
        if left:
            raise BrokenLawError(f"the engine has ended, and a router still counts on {left}")
        self._end_life()

    def crash(self) -> None:
        """The engine is killed and started again."""
        self._end_life()

    def is_faulted(self) -> bool:
        """Return whether something may go wrong in the next operation."""
        handlers = [handler for worker in self.engine.workers for handler in (worker.loads, worker.stores)]
        return any(place.ratios for place in self.places) or any(
            handler.num_to_fail or handler.num_to_decline for handler in handlers
        )

    def num_happened(self) -> int:
        """Return how often faults of places have happened."""
        return sum(place.happened[name] for place in self.places for name in place.fault_names)

    # What must hold

    def check(self) -> dict[str, float]:
        """Check what holds at any time, and return the manager's statistics."""
        self.manager.check()
        laws = [*self.engine.broken_laws(), *self.errors.found, *self._weather.plain.broken_laws]
        laws += [law for tier in self.tiers for law in tier.broken_laws]
        if laws:
            raise BrokenLawError(laws[0])
        stats = self.manager.stats()
        require_bounded(stats, len(self.engine.requests), self.num_slots)
        self.host_watch.check_sums(stats)
        return stats

    def repair_all(self) -> None:
        """Take every fault back."""
        for place in self.places:
            place.ratios.clear()
        for worker in self.engine.workers:
            for handler in (worker.loads, worker.stores):
                handler.num_to_fail = handler.num_to_decline = 0

    def run_out(self) -> None:
        """Take steps until every request has ended and every job is reported."""
        for num_steps in range(MAX_SETTLE_STEPS):
            self.calm_step()
            is_idle = not self.engine.requests and not any(tier.open_jobs for tier in self.tiers)
            if is_idle and not self.engine.scheduler.has_open_stores():
                self.calm_step()
                return
            if num_steps > PATIENCE_STEPS and self.engine.requests:
                waiting = [f"{one.request_id} {one.phase.value}" for one in self.engine.requests]
                raise BrokenLawError(f"these wait for ever: {waiting}")
        raise BrokenLawError("jobs are open for ever")

    def calm_step(self) -> None:
        """Take a step in which all copies and threads get on."""
        self.engine.copy(1000, self.rng)
        self.engine.step(64)
        self.engine.settle()
        self.router.read(self.engine.scheduler.take_events())
        self.threads.run_until_idle()
        self.clock.advance(SETTLE_TICK_S)

    def add_request(self, prompt: list[int], max_tokens: int, name: object, hints: Params = None) -> None:
        """Let a request come.

        Args:
            prompt: its tokens.
            max_tokens: length at which it ends.
            name: its tenant, as it gives it; None for none.
            hints: what it asks for besides.
        """
        self._num_arrived += 1
        params = hints if name is None else {**(hints or {}), "tenant": name}
        is_served = self.tenancy.is_served(name)
        tenant = self.tenancy.find(name) if is_served else NO_TENANT
        for block_hash in hash_tokens(continue_tokens(prompt, max_tokens)) if tenant.number else ():
            self.tenant_of[tenant.own_hash(block_hash)] = tenant.number
        request = CheckedRequest(f"r{self._num_arrived}", prompt, max_tokens, params, tenant, is_served)
        self._latest = [*self._latest[-11:], request]
        self.engine.add(request)

    def make_tokens(self, num_tokens: int) -> list[int]:
        """Return tokens that only the next request has."""
        first = FIRST_OWN_TOKEN + 100 * self._num_arrived
        return list(range(first, first + num_tokens))

    def key_of(self, group: int, block_hash: bytes) -> OffloadKey:
        """Return the key of a block that an event names."""
        return make_offload_key(block_hash, group, self.tenant_of.get(block_hash, 0))

    # Lives

    def _draw_place(self) -> StormPlace | None:
        return self.places[int(self.rng.random() * len(self.places))] if self.places else None

    def _end_life(self) -> None:
        for place in self.places:
            place.crash()
        for tier in self.tiers:
            tier.on_killed()
        self.threads.kill()
        for place in self.places:
            place.on_killed()
        self.seen.update(self.engine.seen)
        self.errors.found.clear()
        self.life += 1
        self._start()

    def _start(self) -> None:
        rng, shape = self.rng, self.shape
        self.num_slots = rng.choice([3, 5, 8, 14, 40])
        rows = HostRows(self.num_slots, shape.num_workers, shape.factor)
        row_bytes = rows.rows.shape[1]
        config = self._make_config(row_bytes)
        ttl_s = rng.choice([None, None, None, 3.0, 30.0])
        primary = CPUPrimaryTierOffloadingManager(
            self.num_slots,
            rows,
            rng.choice(POLICIES),
            enable_events=True,
            clock=self.clock,
            ttl_s=ttl_s,
            tenants=self.tenancy.tenants,
        )
        self.host_watch = HostWatch(primary, self.tenancy.tenants, row_bytes, ttl_s, self.clock)
        self.tiers: list[WatchedTier] = []
        order = list(self.places)
        rng.shuffle(order)
        for place in order:
            self._build(place, config, primary.get_kv_memoryview())
        self.event_names = event_names(self.tiers)
        self.manager = TieringOffloadingManager(
            primary,
            self.tiers,
            enable_events=True,
            lookup_deadline_s=rng.choice([1.0, 5.0]),
            shutdown_timeout_s=rng.choice([0.0, 5.0, 60.0]),
            measures_loads=rng.random() < 0.5,
            clock=self.clock,
            make_epoch=lambda: rng.getrandbits(128).to_bytes(16, "big"),
        )
        num_groups = len(config.groups)
        self.engine = CheckedEngine(
            config,
            self.manager,
            primary.table,
            rows,
            1 + num_groups * rng.choice([16, 24, 60]),
            draw_rules(rng),
            self._model * 10_000,
            self.clock,
            self.wall_clock,
        )
        for worker in self.engine.workers:
            worker.stores.pages = self._weather.plain.pages
        self._forgets_on_device = rng.random() < 0.75
        self.router = Router()

    def _make_config(self, row_bytes: int) -> OffloadingConfig:
        rng, shape = self.rng, self.shape
        self._model = 1 if rng.random() < 0.9 else 2
        page_bytes = PAGE_BYTES
        groups = [KVGroup(HASH_TOKENS, ("layer",), page_bytes)]
        if shape.window_tokens is not None:
            groups.append(
                KVGroup(HASH_TOKENS, ("window",), page_bytes, GroupKind.WINDOW, shape.window_tokens)
            )
        extra = self._draw_extra(row_bytes)
        if shape.factor > 1:
            extra["block_size"] = HASH_TOKENS * shape.factor
        return OffloadingConfig(
            "storm",
            ModelIdentity(f"model-{self._model}"),
            tuple(groups),
            HASH_TOKENS,
            world_size=shape.num_workers,
            computes_last_token=rng.random() < 0.5,
            extra_config=extra,
        )

    def _draw_extra(self, row_bytes: int) -> dict[str, object]:
        """Draw tenants and encryption; a ring that is there has changed now and then when the engine starts."""
        keeping = {place.quota_tier: place.header_bytes for place in self.places if place.quota_tier}
        block_bytes = {HOST: row_bytes} | {tier: header + row_bytes for tier, header in keeping.items()}
        self.tenancy = draw_tenancy(self.rng, block_bytes)
        extra: dict[str, object] = {"tenant_salt": self.tenancy.salt} if self.tenancy.salt else {}
        if self.tenancy.setting is not None:
            extra["tenants"] = self.tenancy.setting
            extra["secondary_tiers"] = [{"type": name} for name in keeping]
        self._is_encrypted = self.ring is not None and self.rng.random() < 0.7
        if self.ring is not None:
            if self.rng.random() < 0.5:
                self.seen[self.ring.change(self.rng)] += 1
            if self._is_encrypted:
                extra["encryption"] = {"key_file": str(self.ring.path)}
        return extra

    def _list_keyless(self) -> frozenset[int]:
        """Return the numbers of the tenants whose keys were dropped."""
        dropped = () if self.ring is None else self.ring.dropped_tenants()
        return frozenset(tenant_number(name, self.tenancy.salt) for name in dropped)

    def _build(self, place: StormPlace, config: OffloadingConfig, view: memoryview) -> None:
        """Build a tier; one that cannot start is left out, as the spec does."""
        held, place.ratios = place.ratios, {}
        if place.ttl_s is None:  # until now each use has made a block younger
            place.stored_s = dict.fromkeys(place.stored_s, self.clock())
        settings = self._draw_settings()
        place.is_secret = place.can_encrypt and self._is_encrypted and settings.encryption
        try:
            inner = place.build(config, view, settings)
        except (ConfigError, TierError) as error:
            if isinstance(error, ConfigError) and error.setting in {"encryption", "key_file"}:
                raise BrokenLawError("a tier does not start with the ring") from error
            self.seen["left out"] += 1
            return
        finally:
            place.ratios = held
        place.is_honest = True
        self.tiers.append(WatchedTier(inner, place, self._list_keyless() if place.is_secret else frozenset()))

    def _draw_settings(self) -> TierSettings:
        rng = self.rng
        settings = TierSettings(
            emit_events=True,
            job_timeout_s=rng.choice([5.0, 30.0]),
            max_in_flight_store_bytes=rng.choice([None, 1, 4096]),
        )
        if rng.random() < 0.4:
            modes = (CascadeMode.ON_EVICT, CascadeMode.MUST_WRITE)
            settings = replace(settings, cascade=rng.choice(modes))
        if rng.random() < 0.2:
            settings = replace(settings, fill=True)
        if rng.random() < 0.2:
            settings = replace(settings, store_threshold=2)
        if rng.random() < 0.2:
            settings = replace(settings, encryption=False)
        return settings


def event_names(tiers: Sequence[WatchedTier]) -> list[str]:
    """Return what events call each tier. Pure."""
    names: list[str] = []
    for position, tier in enumerate(tiers):
        name = tier.get_tier_type()
        names.append(f"{name}.{position}" if name in names else name)
    return names
