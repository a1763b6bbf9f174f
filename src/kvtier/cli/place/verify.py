"""``kvtier verify PLACE``: read whole blocks at a bounded rate and compare each with its header and checksum."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from kvtier.cli.place.options import (
    JsonOption,
    KeyFileOption,
    PlaceArgument,
    advance,
    counted,
    duration_in_words,
    encrypted_names,
    opened,
    parse_duration,
    progress_bar,
)
from kvtier.errors import ConfigError
from kvtier.quantities import parse_bytes, size_in_words
from kvtier.tiering.kit.place import DAMAGE, FAULTS_OF_PLACE, NOTHING, Amount, BlockState, Place, PlaceBlock

DEFAULT_RATE = "200MiB"
"""Bytes read in a second, a tenth of what a solid-state disk gives and of a fast network. More is taken from the
engines that use the place; less takes hours for a large one."""

MAX_NAMED = 20
"""Blocks with a fault that are named; ``--json`` has as many. More of them are one fault of the disk."""

WORDS = {
    BlockState.WHOLE: "whole",
    BlockState.DAMAGED: "damaged: the checksum or the header is wrong",
    BlockState.MOVED: "under a name that is not theirs",
    BlockState.UNREADABLE: "not readable",
    BlockState.OTHER_FORMAT: "of another version or encoding, left to the engines that know it",
    BlockState.ENCRYPTED: "encrypted, header and name right: --key-file checks their bytes",
    BlockState.NO_KEY: "encrypted with a key that is not in the ring: nothing here reads them",
    BlockState.BEING_WRITTEN: "being written",
    BlockState.GONE: "gone meanwhile",
}


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """How much is read, and how fast.

    Attributes:
        ratio: share of the blocks that are read, 1 for all.
        rate_bytes: bytes in a second, at most.
        expected_s: how long that takes where the place can give as much.
    """

    ratio: float
    rate_bytes: int
    expected_s: float


def plan_reading(there: Amount, ratio: float, rate_bytes: int, max_duration_s: float | None) -> ReadingPlan:
    """Return how much of a place is read so that it takes no longer than it may. Pure.

    Args:
        there: what is in the place.
        ratio: share that was asked for.
        rate_bytes: bytes in a second.
        max_duration_s: the time that it may take, None without a limit.
    """
    if max_duration_s is not None and there.num_bytes:
        ratio = min(ratio, max_duration_s * rate_bytes / there.num_bytes)
    return ReadingPlan(ratio, rate_bytes, there.num_bytes * ratio / rate_bytes)


@dataclass(slots=True)
class Verification:
    """What was found.

    Attributes:
        states: blocks by what was found of them.
        read_bytes: bytes of the blocks that were read.
        removed: damaged blocks that were removed.
        faulty: some of those with a fault, with the state of each.
        is_cut: whether the time ended before the blocks did.
        took_s: how long it took.
    """

    states: Counter[BlockState] = field(default_factory=Counter)
    read_bytes: int = 0
    removed: Amount = NOTHING
    faulty: list[tuple[BlockState, str]] = field(default_factory=list)
    is_cut: bool = False
    took_s: float = 0.0

    @property
    def num_faults(self) -> int:
        """Blocks with a fault of the place."""
        return sum(num for state, num in self.states.items() if state in FAULTS_OF_PLACE)

    def note(self, block: PlaceBlock, state: BlockState) -> None:
        """Count a block."""
        self.states[state] += 1
        self.read_bytes += block.num_bytes
        if state in FAULTS_OF_PLACE and len(self.faulty) < MAX_NAMED:
            self.faulty.append((state, block.address))


class Pace:
    """Keeps to a number of bytes a second, over the whole and not for each block.

    Args:
        rate_bytes: bytes in a second.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.
    """

    def __init__(self, rate_bytes: int, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._rate_bytes = rate_bytes
        self._clock = clock
        self._sleep = sleep
        self._begun_s = clock()
        self._num_bytes = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._begun_s

    def spend(self, num_bytes: int) -> None:
        """Wait until so many further bytes are within the rate."""
        self._num_bytes += num_bytes
        ahead_s = self._num_bytes / self._rate_bytes - self.elapsed_s
        if ahead_s > 0:
            self._sleep(ahead_s)


def verify(
    place: PlaceArgument,
    max_duration: Annotated[
        str | None,
        typer.Option(help='Read no more than fits into this time, such as "10m"; chosen at random.'),
    ] = None,
    sample: Annotated[float, typer.Option(help="Read this share of the blocks, chosen at random.")] = 1.0,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the damaged ones.")] = False,
    max_bytes_per_s: Annotated[str, typer.Option(help="Read no faster than this.")] = DEFAULT_RATE,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read blocks wholly and compare each with its checksum; exit status 1 when one is not what was stored.

    Engines may use the place meanwhile: a block that is replaced while it is read is read again.

    Raises:
        KVTierError: the place cannot be read.
    """
    if not 0 < sample <= 1:
        raise ConfigError("--sample", sample, "must be a share above 0 and up to 1, such as 0.01")
    rate_bytes = parse_bytes("--max-bytes-per-s", max_bytes_per_s)
    max_duration_s = None if max_duration is None else parse_duration("--max-duration", max_duration)
    with opened(place, key_file) as found:
        if delete:
            found.begin_removal()
        there = measure(found)
        plan = plan_reading(there, sample, rate_bytes, max_duration_s)
        typer.echo(announce(there, plan), err=True)
        with progress_bar("reading", lambda: there.num_bytes * plan.ratio) as progress:
            result = read_all(
                found,
                plan,
                max_duration_s,
                Pace(rate_bytes, time.monotonic, time.sleep),
                random.random,
                is_deleting=delete,
                on_read=lambda num_bytes: advance(progress, num_bytes),
            )
        if delete:
            found.end_removal(())
    typer.echo(
        json.dumps(to_json(result), indent=1) if as_json else "\n".join(to_lines(result, is_deleting=delete))
    )
    if result.num_faults:
        raise typer.Exit(1)


def measure(place: Place) -> Amount:
    """Return what there is to read."""
    amount = Amount()
    for block in place.blocks():
        amount = amount.plus(1, block.num_bytes)
    return amount


def read_all(
    place: Place,
    plan: ReadingPlan,
    max_duration_s: float | None,
    pace: Pace,
    draw: Callable[[], float],
    *,
    is_deleting: bool,
    on_read: Callable[[int], None] = lambda _: None,
) -> Verification:
    """Read the blocks of a place as planned.

    Damaged blocks of an encrypted namespace of which the ring opens none count as blocks of another ring, and stay,
    unless the ring made their names.

    Args:
        place: the place; ready for removals where ``is_deleting``.
        plan: how much and how fast.
        max_duration_s: seconds after which it ends, whatever is left; None: never.
        pace: keeps to the rate.
        draw: a random number from 0 to below 1.
        is_deleting: whether damaged blocks are removed.
        on_read: called with the bytes of each block.

    Raises:
        TierError: the place cannot be read.
    """
    result = Verification()
    doubts = _Doubts(place)

    def note(block: PlaceBlock, state: BlockState) -> None:
        result.note(block, state)
        if is_deleting and state in DAMAGE:
            removed = place.remove([block], unless_changed=False)
            result.removed = result.removed.plus(*removed)

    for block in place.blocks():
        if draw() >= plan.ratio:
            continue
        if max_duration_s is not None and pace.elapsed_s >= max_duration_s:
            result.is_cut = True
            break
        state = place.check(block)
        for judged in doubts.judge(block, state):
            note(*judged)
        on_read(block.num_bytes)
        pace.spend(block.num_bytes)
    for judged in doubts.judge_unopened():
        note(*judged)
    result.took_s = pace.elapsed_s
    return result


class _Doubts:
    """Blocks that a ring did not open, in namespaces of which it has opened none yet.

    Rings number their entries alike, so with another ring every block of a namespace looks damaged, and none is. So a
    block is damaged only where another of its namespace was opened, or where the ring made most of the names of those
    that were not.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._unproven = set(encrypted_names(place.namespaces())) if place.opener is not None else set()
        self._blocks: dict[str, list[PlaceBlock]] = {}

    def judge(self, block: PlaceBlock, state: BlockState) -> list[tuple[PlaceBlock, BlockState]]:
        """Return what is known now that a block was found so: of it, and of those before it."""
        if block.namespace not in self._unproven:
            return [(block, state)]
        if state is BlockState.DAMAGED:
            self._blocks.setdefault(block.namespace, []).append(block)
            return []
        if state is not BlockState.WHOLE:
            return [(block, state)]
        self._unproven.remove(block.namespace)
        return [(block, state), *self._read_again(self._blocks.pop(block.namespace, []))]

    def judge_unopened(self) -> Iterator[tuple[PlaceBlock, BlockState]]:
        """Yield the blocks of namespaces of which none was opened, with what is known of each in the end."""
        for blocks in self._blocks.values():
            if 2 * sum(map(self._is_of_ring, blocks)) > len(blocks):
                yield from self._read_again(blocks)
            else:
                yield from ((block, BlockState.NO_KEY) for block in blocks)

    def _read_again(self, blocks: Sequence[PlaceBlock]) -> list[tuple[PlaceBlock, BlockState]]:
        """Check blocks once more: an engine may have replaced them meanwhile."""
        return [(block, self._place.check(block)) for block in blocks]

    def _is_of_ring(self, block: PlaceBlock) -> bool:
        opener, name = self._place.opener, block.name
        if opener is None or name is None:
            return False
        return opener.is_of_ring(bytes.fromhex(block.namespace), name)


def announce(there: Amount, plan: ReadingPlan) -> str:
    """Return what is said before it begins. Pure."""
    share = "" if plan.ratio == 1 else f"a random {plan.ratio:.2%} of "
    return (
        f"reading {share}{counted(there.num, 'block')}, {size_in_words(there.num_bytes * plan.ratio)} at no more than "
        f"{size_in_words(plan.rate_bytes)}/s: takes about {duration_in_words(plan.expected_s)}"
    )


def to_lines(result: Verification, *, is_deleting: bool) -> list[str]:
    """Return what is printed. Pure."""
    num_read = sum(result.states.values())
    lines = [
        f"read {counted(num_read, 'block')}, {size_in_words(result.read_bytes)}, in {duration_in_words(result.took_s)}"
    ]
    lines += [f"{num:8,} {WORDS[state]}" for state in BlockState if (num := result.states[state])]
    lines += [f"  {state.value}: {address}" for state, address in result.faulty]
    if result.num_faults > len(result.faulty):
        lines.append(f"  and {result.num_faults - len(result.faulty):,} more")
    if result.is_cut:
        lines.append("the time ended before every chosen block was read: give more time or a higher rate")
    if is_deleting:
        lines.append(f"removed {counted(result.removed.num, 'damaged block')}")
    elif any(result.states[state] for state in DAMAGE):
        lines.append("engines take damaged blocks for misses; --delete removes them")
    return lines


def to_json(result: Verification) -> dict[str, Any]:  # Any: JSON
    """Return the same for programs. Pure."""
    return {
        "blocks_read": sum(result.states.values()),
        "bytes_read": result.read_bytes,
        "took_s": result.took_s,
        "is_cut": result.is_cut,
        "states": {state.value: result.states[state] for state in BlockState},
        "num_faults": result.num_faults,
        "removed": result.removed.num,
        "faulty": [{"state": state.value, "address": address} for state, address in result.faulty],
    }
