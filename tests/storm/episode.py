"""Episodes of a storm: drawn from a seed, replayed exactly, made shorter when they fail.

An operation draws from a source of chance that depends on the seed and on its own number alone. Leaving out some of the
others therefore changes what it does only as far as they have changed the world.
"""

import gc
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tests.storm.buckets import ObjPlace, bucket_calls
from tests.storm.cluster import ClusterPlace, valkey_calls
from tests.storm.disks import FSPlace, file_times
from tests.storm.mooncake import MooncakePlace, adapter_loaded, mooncake_calls
from tests.storm.place import ExamplePlace
from tests.storm.secrecy import secret_calls
from tests.storm.servers import ValkeyPlace
from tests.storm.settling import Settling
from tests.storm.threads import SIMULATED_PACKAGES, installed
from tests.storm.world import PlaceMaker, Shape, World

PLACES: dict[str, PlaceMaker] = {
    "example": ExamplePlace,
    "fs": FSPlace,
    "obj": ObjPlace,
    "valkey": ValkeyPlace,
    "cluster": ClusterPlace,
    "mooncake": MooncakePlace,
}
"""The tiers of this package, by name; an author of another tier passes a mapping of his own."""

EPISODE_OPERATIONS = 400
"""Operations of an episode. More meet states that take long to reach; fewer start from other settings more often."""

WEIGHTS: tuple[tuple[str, float], ...] = (
    ("arrive", 24.0),
    ("step", 40.0),
    ("copy", 10.0),
    ("run_threads", 6.0),
    ("set_fault", 7.0),
    ("repair", 4.0),
    ("abort", 3.0),
    ("preempt", 5.0),
    ("pass_time", 2.0),
    ("fail_copy", 1.0),
    ("hurt", 3.0),
    ("forget_host", 4.0),
    ("reset", 0.6),
    ("purge", 0.4),
    ("rekey", 0.4),
    ("settle", 0.5),
    ("restart", 0.4),
    ("crash", 0.4),
)
"""What happens, and how often beside the rest."""

FAULT_OPERATIONS = frozenset({"hurt", "crash", "fail_copy", "reset", "purge", "rekey", "pass_time"})
"""What is a fault by itself. Others are done under one while a place's calls, or copies, may go wrong."""


@dataclass(frozen=True)
class Episode:
    """What replays an episode.

    Attributes:
        seed: where everything is drawn from.
        num_operations: how many there are.
        kept: numbers of the operations that are done; None for all.
        faults: names of the faults that may be set; None for all.
        tiers: names of the tiers to draw from.
    """

    seed: int
    num_operations: int = EPISODE_OPERATIONS
    kept: tuple[int, ...] | None = None
    faults: frozenset[str] | None = None
    tiers: tuple[str, ...] = tuple(PLACES)

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the operations that are done."""
        return range(self.num_operations) if self.kept is None else self.kept


@dataclass
class Outcome:
    """What an episode has shown.

    Attributes:
        num_operations: operations that were done.
        num_faulted: those of them that were a fault, or were done while one could strike.
        num_struck: those of them that were a fault, or in which one struck.
        digest: of all that was done and seen.
        error: the law that was broken, None when all hold.
        failed_at: the number of the operation after which it was.
        seen: how often what happened.
    """

    num_operations: int = 0
    num_faulted: int = 0
    num_struck: int = 0
    digest: str = ""
    error: BaseException | None = None
    failed_at: int | None = None
    seen: Counter[str] = field(default_factory=Counter)


def run_episode(
    episode: Episode,
    places: Mapping[str, PlaceMaker] = PLACES,
    packages: Sequence[str] = SIMULATED_PACKAGES,
    on_operation: Callable[[int, str], None] | None = None,
) -> Outcome:
    """Run an episode and return what it has shown; an exception of any kind is a broken law.

    Args:
        episode: which.
        places: the tiers by name.
        packages: beginnings of names of modules whose threads are simulated.
        on_operation: called before each operation with its number and name.
    """
    rng = random.Random(f"{episode.seed} shape")  # to be repeated, not to be secret
    world = World(rng, draw_shape(rng, [places[name] for name in episode.tiers]))
    outcome, trace = Outcome(), hashlib.sha256()
    names, weights = zip(*WEIGHTS, strict=True)
    with _simulated(world, packages, episode.seed):
        number = -1
        num_happened = 0
        try:
            world.begin()
            for number in episode.numbers():
                rng.seed(episode.seed * 1_000_003 + number)
                (name,) = rng.choices(names, weights)
                if on_operation is not None:
                    on_operation(number, name)
                is_fault, num_before = name in FAULT_OPERATIONS, num_happened
                outcome.num_faulted += is_fault or world.is_faulted()
                _do(world, name, episode.faults)
                stats = world.check()
                num_happened = world.num_happened()
                outcome.num_operations += 1
                outcome.num_struck += is_fault or num_happened > num_before
                trace.update(f"{number} {name} {_state_of(world, stats)}\n".encode())
            number = episode.num_operations
            Settling(world).run()
            world.check()
        except Exception as error:  # noqa: BLE001  # foreign: whatever is raised here is what the storm looks for
            outcome.error, outcome.failed_at = error, number
        finally:
            world.close()
    outcome.digest = trace.hexdigest()[:16]
    outcome.seen = world.seen + world.engine.seen
    for place in world.places:
        outcome.seen.update({f"{type(place).__name__} {name}": num for name, num in place.happened.items()})
    return outcome


def draw_shape(rng: random.Random, places: Sequence[PlaceMaker]) -> Shape:
    """Draw what stays for all lives of an engine."""
    window_tokens = rng.choice([None, None, 6])
    factor = rng.choice([1, 1, 2]) if window_tokens is None else 1
    chosen = rng.sample(list(places), k=min(len(places), rng.choice([1, 1, 2, 3])))
    has_ring = rng.random() < 0.4
    return Shape(tuple(chosen), window_tokens, rng.choice([1, 1, 2]), factor, has_ring)


def shrink(
    episode: Episode,
    outcome: Outcome,
    run: Callable[[Episode], Outcome] = run_episode,
    max_seconds: float = 60.0,
) -> Episode:
    """Return the shortest episode that was found to fail in the same way.

    Args:
        episode: fails.
        outcome: how.
        run: runs an episode.
        max_seconds: how long to look.
    """
    end_s = time.process_time() + max_seconds
    kind = kind_of(outcome.error)

    def still_fails(candidate: Episode) -> bool:
        return kind_of(run(candidate).error) == kind

    last = outcome.failed_at if outcome.failed_at is not None else episode.num_operations
    kept = [number for number in episode.numbers() if number <= last]
    best = Episode(episode.seed, episode.num_operations, tuple(kept), episode.faults, episode.tiers)
    if not still_fails(best):
        return episode
    size = max(1, len(kept) // 2)
    while size and time.process_time() < end_s:
        begin = 0
        while begin < len(kept) and time.process_time() < end_s:
            fewer = kept[:begin] + kept[begin + size :]
            candidate = Episode(best.seed, best.num_operations, tuple(fewer), best.faults, best.tiers)
            if still_fails(candidate):
                kept, best = fewer, candidate
            else:
                begin += size
        size //= 2
    return _drop_faults(best, still_fails, end_s)


def _drop_faults(best: Episode, still_fails: Callable[[Episode], bool], end_s: float) -> Episode:
    everything = frozenset(name for place in PLACES.values() for name in getattr(place, "fault_names", ()))
    faults = best.faults if best.faults is not None else everything
    for name in sorted(faults):
        fewer = faults - {name}
        candidate = Episode(best.seed, best.num_operations, best.kept, fewer, best.tiers)
        if time.process_time() < end_s and still_fails(candidate):
            faults, best = fewer, candidate
    return best


def kind_of(error: BaseException | None) -> str | None:
    """Return what two failures must have in common to be the same: the type and the words, without numbers. Pure."""
    if error is None:
        return None
    text = "".join("#" if letter.isdigit() else letter for letter in str(error).split("\n")[0][:60])
    return f"{type(error).__name__}: {text}"


def command_of(episode: Episode) -> str:
    """Return the command that replays an episode. Pure."""
    words = [f"python -m tests.storm --seed {episode.seed} --episode {episode.num_operations}"]
    if episode.tiers != tuple(PLACES):
        words.append(f"--tiers {','.join(episode.tiers)}")
    if episode.kept is not None:
        words.append(f"--keep {','.join(map(str, join_ranges(episode.kept)))}")
    if episode.faults is not None:
        words.append(f"--faults {','.join(sorted(episode.faults)) or 'none'}")
    return " ".join(words)


def join_ranges(numbers: Iterable[int]) -> Iterator[str]:
    """Yield ascending numbers as text, neighbours as ``first-last``. Pure."""
    begin = end = None
    for number in numbers:
        if end is not None and number == end + 1:
            end = number
            continue
        if begin is not None:
            yield f"{begin}" if begin == end else f"{begin}-{end}"
        begin = end = number
    if begin is not None:
        yield f"{begin}" if begin == end else f"{begin}-{end}"


def _do(world: World, name: str, faults: frozenset[str] | None) -> None:
    if name == "set_fault":
        world.set_fault(faults)
    elif name == "settle":
        Settling(world).run()
    else:
        getattr(world, name)()


def _state_of(world: World, stats: Mapping[str, float]) -> str:
    engine = world.engine
    requests = " ".join(f"{one.request_id}{one.phase.value[:4]}{one.num_computed}" for one in engine.requests)
    held = " ".join(f"{stats[name]:g}" for name in ("primary.held_blocks", "primary.evicted", "open_jobs"))
    jobs = " ".join(str(len(tier.open_jobs)) for tier in world.tiers)
    return f"{world.clock():.6f} {world.life} {requests} {held} {jobs}"


@contextmanager
def _simulated(world: World, packages: Sequence[str], seed: int) -> Iterator[None]:
    """Install simulated threads, clocks and servers, and keep what threads log; everything is put back."""
    logger = logging.getLogger("kvtier")
    level, propagate = logger.level, logger.propagate
    replaced: list[tuple[object, str, object]] = []
    with ExitStack() as stack:
        stack.enter_context(adapter_loaded())
        stack.enter_context(installed(world.threads, packages))
        logger.addHandler(world.errors)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            for module, name, substitute in [
                *file_times(world._weather),
                *bucket_calls(),
                *valkey_calls(),
                *mooncake_calls(),
                *secret_calls(seed),
            ]:
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, substitute)
            yield
        finally:
            for module, name, original in replaced:
                setattr(module, name, original)
            logger.removeHandler(world.errors)
            # Not the attribute alone: loggers below remember what they would log until this is called.
            logger.setLevel(level)
            logger.propagate = propagate
            gc.collect(0)
