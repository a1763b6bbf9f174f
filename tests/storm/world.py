"""One engine over its tiers, what may happen to it, and what must hold after each thing that has.

The places outlive the engine: it is killed and started again over what they hold, with other settings. Blocks of other
weights have other bytes, so each load proves that nothing old is served.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.storm.engine import (
    BLOCK_TOKENS,
    Params,
    Phase,
    StormEngine,
    StormRequest,
    chain_hashes,
)
from tests.storm.laws import BrokenLawError, Router, ThreadErrors, WatchedTier, require_bounded
from tests.storm.memory import PAGE_BYTES, HostRows
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

FIRST_WEIGHTS = 1_000_000
"""Numbers of weights after resets begin here; those of a model as it was started are far below."""

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
        self._chains: list[list[bytes]] = []
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
        name = b"%d" % (self._num_arrived + 1)
        if self._chains and rng.random() < 0.5:
            chain = self._chains[int(rng.random() * len(self._chains))]
            hashes = chain[: rng.randint(1, MAX_PROMPT_BLOCKS)]
        else:
            stream = b"stream %d" % rng.randrange(NUM_STREAMS)
            labels = [b"%b %d" % (stream, block) for block in range(rng.randint(1, MAX_PROMPT_BLOCKS))]
            hashes = chain_hashes((), labels)
        if rng.random() < 0.25:
            own = [b"%b own %d" % (name, block) for block in range(rng.randint(1, 3))]
            hashes = chain_hashes(hashes, own)
        hashes = hashes[:MAX_PROMPT_BLOCKS]
        num_tokens = len(hashes) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
        hashes = chain_hashes(hashes, [b"%b answer %d" % (name, block) for block in range(4)])
        self._chains = [*self._chains[-11:], hashes]
        hints = rng.choice([None, None, None, None, {"skip_load": True}, {"max_load_tokens": 8}])
        max_tokens = num_tokens + rng.randint(1, 12)
        self.add_request(hashes, num_tokens, max_tokens, self.tenancy.draw_name(rng), hints)

    def step(self) -> None:
        """The engine takes a step, beside threads and copies."""
        rng = self.rng
        self.engine.step(rng.choice([4, 8, 16, 64]))
        self.router.read(self.engine.scheduler.take_events())
        self.router.check_host(self.manager.primary_tier.table)
        self.threads.run(rng.choice([0, 4, 20, 60, 60]))
        self.clock.advance(rng.choice([0.0, 0.01, 0.1, 0.5]))

    def copy(self) -> None:
        """Handlers copy."""
        self.engine.copy(self.rng, self.rng.randint(1, 6))

    def run_threads(self) -> None:
        """Threads of tiers run."""
        self.threads.run(self.rng.choice([1, 3, 10, 100]))

    def abort(self) -> None:
        """A client goes away."""
        alive = [request for request in self.engine.requests.values() if request.phase is not Phase.ENDED]
        if alive:
            self.engine.end(alive[int(self.rng.random() * len(alive))])

    def preempt(self) -> None:
        """The engine takes a request's device blocks."""
        running = self.engine.in_phase(Phase.RUNNING)
        if running:
            self.engine.preempt(running[int(self.rng.random() * len(running))])

    def reset(self) -> None:
        """The weights change."""
        self._num_weights += 1
        self.engine.reset(FIRST_WEIGHTS + self._num_weights, is_keeping=self.rng.random() < 0.5)
        if self.manager.stats()["primary.held_blocks"]:
            raise BrokenLawError("a reset has left blocks in host memory")

    def purge(self) -> None:
        """An operator forgets the blocks of a tier, or of all; or those of one tenant there."""
        names = [None, ["host"], *([tier.get_tier_type()] for tier in self.tiers)]
        number = None if self.tenancy.setting is None else self.rng.choice([None, *self.tenancy.numbers()])
        with suppress(ControlError):  # a purge of other blocks is under way
            self.manager.purge(names[int(self.rng.random() * len(names))], number)

    def forget_host(self) -> None:
        """Host memory forgets what is not in use, so that the tiers are asked."""
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
                waiting = [f"{one.request_id} {one.phase.value}" for one in self.engine.requests.values()]
                raise BrokenLawError(f"these wait for ever: {waiting}")
        raise BrokenLawError("jobs are open for ever")

    def calm_step(self) -> None:
        """Take a step in which all copies and threads get on."""
        self.engine.copy(self.rng, 1000)
        self.engine.step(64)
        self.router.read(self.engine.scheduler.take_events())
        self.threads.run_until_idle()
        self.clock.advance(SETTLE_TICK_S)

    def add_request(
        self, hashes: list[bytes], num_tokens: int, max_tokens: int, name: object, hints: Params = None
    ) -> None:
        """Let a request come.

        Args:
            hashes: of all blocks that it may have.
            num_tokens: length of its prompt.
            max_tokens: length at which it ends.
            name: its tenant, as it gives it; None for none.
            hints: what it asks for besides.
        """
        self._num_arrived += 1
        params = hints if name is None else {**(hints or {}), "tenant": name}
        is_served = self.tenancy.is_served(name)
        tenant = self.tenancy.find(name) if is_served else NO_TENANT
        for block_hash in hashes if tenant.number else ():
            self.tenant_of[tenant.own_hash(block_hash)] = tenant.number
        self.engine.add(
            StormRequest(
                f"r{self._num_arrived}",
                hashes,
                num_tokens,
                max_tokens,
                params,
                tenant=tenant.name.encode(),
                is_served=is_served,
            )
        )

    def name_blocks(self, label: bytes, num_blocks: int) -> list[bytes]:
        """Return what a prompt's blocks are called that no request had before."""
        return [b"%b %d %d" % (label, self._num_arrived + 1, block) for block in range(num_blocks)]

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
        self.engine = StormEngine(
            config,
            self.manager,
            rows,
            1 + num_groups * rng.choice([16, 24, 60]),
            self._model * 10_000,
            (self.clock, self.wall_clock),
            self._weather.plain.pages,
        )
        self.router = Router()

    def _make_config(self, row_bytes: int) -> OffloadingConfig:
        rng, shape = self.rng, self.shape
        self._model = 1 if rng.random() < 0.9 else 2
        page_bytes = PAGE_BYTES
        groups = [KVGroup(BLOCK_TOKENS, ("layer",), page_bytes)]
        if shape.window_tokens is not None:
            groups.append(
                KVGroup(BLOCK_TOKENS, ("window",), page_bytes, GroupKind.WINDOW, shape.window_tokens)
            )
        extra = self._draw_extra(row_bytes)
        if shape.factor > 1:
            extra["block_size"] = BLOCK_TOKENS * shape.factor
        return OffloadingConfig(
            "storm",
            ModelIdentity(f"model-{self._model}"),
            tuple(groups),
            BLOCK_TOKENS,
            world_size=shape.num_workers,
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
