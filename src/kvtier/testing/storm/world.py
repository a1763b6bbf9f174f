"""One engine over its tiers, what may happen to it, and what must hold after each thing that has.

The places outlive the engine: it is killed and started again over what they hold, with other settings. Blocks of other
weights have other bytes, so each load proves that nothing old is served.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.testing.clock import ManualClock
from kvtier.testing.storm.engine import BLOCK_TOKENS, Phase, StormEngine, StormRequest, chain_hashes
from kvtier.testing.storm.laws import (
    BrokenLawError,
    Router,
    ThreadErrors,
    WatchedTier,
    block_of,
    require_at_rest,
    require_bounded,
)
from kvtier.testing.storm.memory import PAGE_BYTES, HostRows
from kvtier.testing.storm.place import StormPlace, Weather
from kvtier.testing.storm.threads import WALL_START_S, SimThreads
from kvtier.tiering.base import CascadeMode, TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

POLICIES = ("lru", "lru", "arc", "sieve", "s3fifo", "fifo", "mq", "hazard")
MAX_REQUESTS = 6
MAX_PROMPT_BLOCKS = 8
NUM_STREAMS = 4
RECOVERY_S = 120.0
"""Longer than any pause of a breaker, of a key whose load failed, or of a server that was away."""

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
    """

    places: tuple[PlaceMaker, ...]
    window_tokens: int | None
    num_workers: int
    factor: int


class World:
    """The engine, its tiers and their places.

    Args:
        rng: where all chance comes from.
        shape: what stays for all lives.

    Attributes:
        places: where the tiers' blocks are.
        engine: the present engine.
        seen: how often what has happened.
    """

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng = rng
        self.clock = ManualClock()
        self.threads = SimThreads(rng, self.clock)
        self.errors = ThreadErrors()
        self.seen: Counter[str] = Counter()
        self.life = 0
        self._shape = shape
        self._weather = Weather(rng, self.clock, self.wall_clock, self.threads)
        self._chains: list[list[bytes]] = []
        self._num_arrived = 0
        self._num_weights = 0
        self.places: list[StormPlace] = []

    def begin(self) -> None:
        """Make the places and start the first engine; the simulated threads are installed."""
        self.places = [make(self._weather) for make in self._shape.places]
        self._start()

    def close(self) -> None:
        """End everything."""
        self.threads.kill()
        for place in self.places:
            place.close()

    def wall_clock(self) -> float:
        """Return the simulated seconds since 1970."""
        return WALL_START_S + self.clock()

    # What happens

    def arrive(self) -> None:
        """A request comes, with a prompt that others share or with one of its own."""
        rng = self.rng
        if len(self.engine.requests) >= MAX_REQUESTS:
            return
        self._num_arrived += 1
        name = b"%d" % self._num_arrived
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
        self.engine.add(StormRequest(f"r{self._num_arrived}", hashes, num_tokens, max_tokens, hints))

    def step(self) -> None:
        """The engine takes a step, beside threads and copies."""
        rng = self.rng
        self.engine.step(rng.choice([4, 8, 16, 64]))
        self.router.read(self.engine.scheduler.take_events())
        self.router.check_host(self.manager.primary.table)
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
        """An operator forgets the blocks of a tier, or of all."""
        names = [None, ["host"], *([tier.get_tier_type()] for tier in self.tiers)]
        self.manager.purge(names[int(self.rng.random() * len(names))])

    def forget_host(self) -> None:
        """Host memory forgets what is not in use, so that the tiers are asked."""
        self.manager.purge(["host"])

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

    # What must hold

    def check(self) -> None:
        """Check what holds at any time."""
        self.manager.check()
        laws = [*self.engine.broken_laws(), *self.errors.found]
        if laws:
            raise BrokenLawError(laws[0])
        stats = self.manager.stats()
        require_bounded(stats, len(self.engine.requests), self.num_slots)

    def settle(self) -> None:
        """Repair everything: every request ends, every job is reported, every slot is free, tiers work again."""
        for place in self.places:
            place.ratios.clear()
        for worker in self.engine.workers:
            for handler in (worker.loads, worker.stores):
                handler.num_to_fail = handler.num_to_decline = 0
        self._run_out()
        self.clock.advance(RECOVERY_S)
        self._run_out()
        for request in self.engine.scheduler.records.latest:
            request.check()
        for tier in self.tiers:
            if tier.open_jobs:
                raise BrokenLawError(
                    f"{len(tier.open_jobs)} jobs of {tier.get_tier_type()} were never reported"
                )
        require_at_rest(self.engine.scheduler.stats())
        self._check_events()
        self._check_everything_is_free()
        self._check_tiers_serve()

    def _run_out(self) -> None:
        for num_steps in range(MAX_SETTLE_STEPS):
            self._calm_step()
            is_idle = not self.engine.requests and not any(tier.open_jobs for tier in self.tiers)
            if is_idle and not self.engine.scheduler.has_open_stores():
                self._calm_step()
                return
            if num_steps > PATIENCE_STEPS and self.engine.requests:
                waiting = [f"{one.request_id} {one.phase.value}" for one in self.engine.requests.values()]
                raise BrokenLawError(f"these wait for ever: {waiting}")
        raise BrokenLawError("jobs are open for ever")

    def _calm_step(self) -> None:
        self.engine.copy(self.rng, 1000)
        self.engine.step(64)
        self.router.read(self.engine.scheduler.take_events())
        self.threads.run_until_idle()
        self.clock.advance(SETTLE_TICK_S)

    def _check_events(self) -> None:
        """A block that was announced and not withdrawn is there, unless it was lost behind the tier's back."""
        for position, (tier, place) in enumerate(zip(self.tiers, self._tier_places, strict=True)):
            name = self._event_names[position]
            believed = sorted(self.router.believed.get(name, ())) if place.is_honest else ()
            for group, block_hash in believed:
                is_held = self._lookup(tier, make_offload_key(block_hash, group))
                if is_held is False and place.is_honest:  # a server sees what has expired only now
                    raise BrokenLawError(f"{name} is believed to hold a block that it does not hold")

            for group, block_hash in believed[:3] if place.is_honest else ():
                self._check_loadable(name, make_offload_key(block_hash, group))
        self._run_out()

    def _check_loadable(self, name: str, key: OffloadKey) -> None:
        """A block that is announced can be loaded, and not only found."""
        self.manager.purge(["host"])
        request = ReqContext("loadable")
        answer = None
        for _ in range(40):
            answer = self.manager.lookup(key, request)
            self.manager.end_step()
            if answer is not None:
                break
            self.threads.run_until_idle()
            self.clock.advance(0.01)
        self.manager.request_finished(request)
        self.router.read(self.engine.scheduler.take_events())
        if answer is not True and block_of(key) in self.router.believed.get(name, ()):
            raise BrokenLawError(f"{name} is believed to hold a block that cannot be loaded")

    def _check_everything_is_free(self) -> None:
        """Nothing is pinned when nothing is under way: as many new blocks as there are slots find room."""
        keys = [make_offload_key(b"filler %9d" % slot, 0) for slot in range(self.num_slots)]
        request = ReqContext("filler")
        output = self.manager.prepare_store(keys, request)
        if output is None or len(output.keys_to_store) < len(keys):
            raise BrokenLawError("slots stay pinned when nothing is under way")
        self.manager.complete_store(keys, request, success=False)
        self.manager.request_finished(request)

    def _check_tiers_serve(self) -> None:
        """What some tier holds is served, now that all of them work."""
        self._num_arrived += 1
        hashes = chain_hashes((), [b"recovery %d %d" % (self._num_arrived, block) for block in range(4)])
        length = 3 * BLOCK_TOKENS
        self._serve(hashes, length)
        self.clock.advance(RECOVERY_S)
        self._run_out()
        self.manager.purge(["host"])
        keys = [
            make_offload_key(block_hash, group)
            for block_hash in hashes[self._shape.factor - 1 : 3 : self._shape.factor]
            for group in range(len(self.engine.scheduler.layouts))
        ]
        are_held = all(any(self._lookup(tier, key) for tier in self.tiers) for key in keys)
        if are_held and keys:
            self.seen["asked again"] += 1
            num_before = self.engine.seen["load good"]
            self._serve(hashes, length)
            if len(keys) <= self.num_slots and self.engine.seen["load good"] == num_before:
                raise BrokenLawError("a tier holds the blocks of a prompt, and all of it is computed")

    def _serve(self, hashes: list[bytes], num_tokens: int) -> None:
        self._num_arrived += 1
        self.engine.add(StormRequest(f"r{self._num_arrived}", hashes, num_tokens, num_tokens + 1))
        self._run_out()

    def _lookup(self, tier: WatchedTier, key: OffloadKey) -> bool | None:
        request = ReqContext("probe")
        for _ in range(20):
            answer = tier.lookup(key, request)
            if answer is not None:
                return answer
            tier.end_step()
            self.threads.run_until_idle()
        return None

    # Lives

    def _draw_place(self) -> StormPlace | None:
        return self.places[int(self.rng.random() * len(self.places))] if self.places else None

    def _end_life(self) -> None:
        for place in self.places:
            place.crash()
        self.threads.kill()
        for place in self.places:
            place.on_killed()
        self.seen.update(self.engine.seen)
        self.errors.found.clear()
        self.life += 1
        self._start()

    def _start(self) -> None:
        rng, shape = self.rng, self._shape
        self.num_slots = rng.choice([3, 5, 8, 14, 40])
        config = self._make_config()
        rows = HostRows(self.num_slots, shape.num_workers, shape.factor)
        policy = rng.choice(POLICIES)
        primary = CPUPrimaryTierOffloadingManager(
            self.num_slots, rows, policy, enable_events=True, clock=self.clock
        )
        self.tiers: list[WatchedTier] = []
        self._tier_places: list[StormPlace] = []
        order = list(self.places)
        rng.shuffle(order)
        for place in order:
            self._build(place, config, primary.get_kv_memoryview())
        self._event_names = event_names(self.tiers)
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
        )
        self.router = Router()

    def _make_config(self) -> OffloadingConfig:
        rng, shape = self.rng, self._shape
        self._model = 1 if rng.random() < 0.9 else 2
        page_bytes = PAGE_BYTES
        groups = [KVGroup(BLOCK_TOKENS, ("layer",), page_bytes)]
        if shape.window_tokens is not None:
            groups.append(
                KVGroup(BLOCK_TOKENS, ("window",), page_bytes, GroupKind.WINDOW, shape.window_tokens)
            )
        extra: dict[str, object] = {}
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

    def _build(self, place: StormPlace, config: OffloadingConfig, view: memoryview) -> None:
        """Build a tier; one that cannot start is left out, as the spec does."""
        held, place.ratios = place.ratios, {}
        try:
            inner = place.build(config, view, self._draw_settings())
        except (ConfigError, TierError):
            self.seen["left out"] += 1
            return
        finally:
            place.ratios = held
        place.is_honest = True
        may_lie = "repeat_ratio" in place.fault_names
        self.tiers.append(WatchedTier(inner, may_lie=may_lie))
        self._tier_places.append(place)

    def _draw_settings(self) -> TierSettings:
        rng = self.rng
        settings = TierSettings(
            emit_events=True,
            job_timeout_s=rng.choice([5.0, 30.0]),
            max_in_flight_store_bytes=rng.choice([None, 1, 4096]),
        )
        if rng.random() < 0.3:
            settings = replace(settings, cascade=CascadeMode.ON_EVICT)
        if rng.random() < 0.2:
            settings = replace(settings, fill=True)
        if rng.random() < 0.2:
            settings = replace(settings, store_threshold=2)
        return settings


def event_names(tiers: Sequence[WatchedTier]) -> list[str]:
    """Return what events call each tier. Pure."""
    names: list[str] = []
    for position, tier in enumerate(tiers):
        name = tier.get_tier_type()
        names.append(f"{name}.{position}" if name in names else name)
    return names
