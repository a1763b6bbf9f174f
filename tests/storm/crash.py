"""Kills a process that writes into a tier on a disk, again and again, and checks what the next process finds.

    python -m tests.storm.crash --tier fs --kills 10000

Each process opens the place with settings drawn anew. It looks for every block that the process before it has
acknowledged, loads and compares them, and looks for blocks that were never stored. Then it stores until it is killed.
A block is acknowledged when its job was reported. What must hold:

- no loaded block has other bytes than it was stored with, and none that was never stored is found;
- where the place has room for all of them, each acknowledged block is found and loaded;
- no start fails, whatever the process before it was doing.

A seed gives the same settings, blocks and instants again, as far as the machine's own timing allows.
"""

import argparse
import os
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvtier.errors import InvariantError
from kvtier.testing.tier_driver import (
    NUM_ROWS,
    ROW_BYTES,
    TierDriver,
    content_of,
    key_of,
    make_config,
    make_rows,
)
from kvtier.tiering.base import TierSettings
from kvtier.tiering.fs.pack_header import PackGeometry, disk_bytes_of
from kvtier.tiering.fs.tier import FSTier

PAGE_BYTES = 4096
BLOCK_BYTES = ROW_BYTES + PAGE_BYTES

LIFE_RUNS = 40
"""Processes that use one place, one after another. More let it grow; fewer find less of what only builds up."""

MAX_ACKNOWLEDGED = 240
"""Blocks that a process acknowledges before it is killed, at most."""

MAX_DELAY_S = 0.004
"""A job takes about a millisecond: the kill comes anywhere within the next ones."""

NUM_PHANTOMS = 8
"""Blocks that were never stored and are looked for by each process."""

FIRST_PHANTOM = 10**12

PACK_SLOTS = (8, 32, 128)
"""Slots of the packs that a process makes."""

SMALL_BLOCKS = 96
"""Room of a place that evicts all the time."""

HANG_S = 120.0
"""Without a word for so long a process is stuck, which is a finding too."""

_MESSAGE = struct.Struct("<BQ")


class Word(IntEnum):
    """What a process says, each with a number."""

    STORED = 1
    RIGHT = 2
    LOST = 3
    WRONG = 4
    PHANTOM = 5
    DAMAGED = 6
    CHECKED = 7
    FAILED = 8


class Say(Protocol):
    """Sends a word once for each number."""

    def __call__(self, word: Word, *numbers: int) -> None:
        """Send it."""


FINDINGS = {
    Word.LOST: "acknowledged and not found",
    Word.WRONG: "wrong bytes",
    Word.PHANTOM: "found and never stored",
    Word.DAMAGED: "damaged blocks seen",
    Word.FAILED: "starts or calls that failed",
}


@dataclass(frozen=True)
class Run:
    """What one process does.

    Attributes:
        settings: of the tier.
        expected: numbers of the blocks to look for.
        must_be_found: whether each of them has to be there.
        first: number of the first block to store.
        seed: of its own draws.
    """

    settings: Mapping[str, Any]  # Any: as a user writes them
    expected: Sequence[int]
    must_be_found: bool
    first: int
    seed: int


@dataclass
class Totals:
    """Sums over all processes.

    Attributes:
        kills: processes that were killed.
        acknowledged: blocks whose store was reported.
        right: blocks that were loaded and compared.
        findings: how often each of FINDINGS was seen.
    """

    kills: int = 0
    acknowledged: int = 0
    right: int = 0
    findings: Counter[Word] = field(default_factory=Counter)

    def __str__(self) -> str:
        sums = f"{self.kills:,} kills, {self.acknowledged:,} blocks acknowledged, {self.right:,} loaded and right"
        return "; ".join([sums, *(f"{name}: {self.findings[word]}" for word, name in FINDINGS.items())])


def run_kills(tier: str, kills: int, seed: int, folder: Path) -> Iterator[Totals]:
    """Kill that many processes and yield the sums after each place's life.

    Args:
        tier: "fs".
        kills: how many.
        seed: of all draws.
        folder: where places are made; each is removed at the end of its life unless it has a finding.
    """
    totals = Totals()
    for life in range(-(-kills // LIFE_RUNS)):
        before = sum(totals.findings.values())
        place = Path(tempfile.mkdtemp(prefix=f"life-{life}-", dir=folder))
        choose = random.Random(f"{seed} {tier} {life}")  # a seed repeats the run, nothing is secret
        _live(tier, place, choose, min(LIFE_RUNS, kills - life * LIFE_RUNS), totals)
        if sum(totals.findings.values()) == before:
            shutil.rmtree(place)
        yield totals


def _live(tier: str, place: Path, choose: random.Random, num_runs: int, totals: Totals) -> None:
    """Run some processes on one place and kill each."""
    is_small = choose.random() < 0.3
    num_blocks = SMALL_BLOCKS if is_small else LIFE_RUNS * (MAX_ACKNOWLEDGED + 4 * NUM_ROWS)
    stored: list[int] = []
    first = 0
    for _ in range(num_runs):
        recent = stored[-MAX_ACKNOWLEDGED:]
        older = choose.sample(stored, min(len(stored), 40))
        run = Run(
            draw_settings(tier, place, num_blocks, choose),
            list(dict.fromkeys([*older, *recent])),
            must_be_found=not is_small,
            first=first,
            seed=choose.randrange(2**32),
        )
        new = _run_and_kill(tier, run, choose, totals)
        stored += new
        # Numbers that were not acknowledged may have been stored all the same: they are not used again.
        first += MAX_ACKNOWLEDGED + 8 * NUM_ROWS


def draw_settings(tier: str, place: Path, num_blocks: int, choose: random.Random) -> dict[str, Any]:
    """Return settings of a tier that may change from one start to the next."""
    common: dict[str, Any] = {
        "direct_io": choose.choice([True, False]),
        "num_threads": choose.randrange(1, 9),
    }
    assert tier == "fs", "there is one tier on disks"
    pack_bytes = disk_bytes_of(PackGeometry(ROW_BYTES, choose.choice(PACK_SLOTS)))
    # Half of it is room for headers and journals of short packs.
    return common | {
        "root_dir": str(place / "fs"),
        "capacity_bytes": num_blocks * BLOCK_BYTES * 2,
        "pack_bytes": pack_bytes,
        "allow_shrink": True,
    }


def make_tier(tier: str, settings: Mapping[str, Any], rows: memoryview) -> FSTier:
    """Open a tier and wait until it knows what its place has.

    Raises:
        KVTierError: it cannot be opened, or does not come to know it.
    """
    opened = FSTier(make_config(), rows, TierSettings(), **settings)
    if not opened.wait_indexed(HANG_S):
        raise InvariantError(f"tier {tier!r} has not read its place within {HANG_S} s")
    return opened


def _run_and_kill(tier: str, run: Run, choose: random.Random, totals: Totals) -> list[int]:
    """Run one process until the drawn instant, kill it, and return the numbers that it has acknowledged."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os._exit(_be_the_process(tier, run, theirs))
    os.close(theirs)
    is_early = choose.random() < 0.1
    num_wanted = choose.randrange(MAX_ACKNOWLEDGED)
    reader = _Reader(ours)
    try:
        if is_early:
            reader.read_for(choose.random() * 0.05)
        else:
            reader.read_until(num_wanted)
            reader.read_for(choose.random() * MAX_DELAY_S)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    reader.read_rest()
    os.close(ours)
    totals.kills += 1
    totals.acknowledged += len(reader.stored)
    totals.right += reader.counts[Word.RIGHT]
    for word in FINDINGS:
        totals.findings[word] += reader.counts[word]
    return reader.stored


class _Reader:
    """The parent's end of a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._left = b""
        self.stored: list[int] = []
        self.counts: Counter[Word] = Counter()
        self._is_open = True

    def read_until(self, num_stored: int) -> None:
        """Read until so many blocks were acknowledged, or the process ended or fell silent."""
        while self._is_open and len(self.stored) < num_stored and not self.counts[Word.FAILED]:
            if not self._read(HANG_S):
                self.counts[Word.FAILED] += 1

    def read_for(self, wait_s: float) -> None:
        """Read for that long."""
        end_s = time.monotonic() + wait_s
        while self._is_open and (left_s := end_s - time.monotonic()) > 0:
            self._read(left_s)

    def read_rest(self) -> None:
        """Read what the ended process had said."""
        while self._is_open:
            self._read(HANG_S)

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._fd], [], [], wait_s)[0]:
            return False
        found = os.read(self._fd, 2**16)
        self._is_open = bool(found)
        data = self._left + found
        end = len(data) - len(data) % _MESSAGE.size
        self._left = data[end:]
        for word, number in _MESSAGE.iter_unpack(data[:end]):
            if word == Word.STORED:
                self.stored.append(number)
            else:
                self.counts[Word(word)] += number if word in (Word.RIGHT, Word.DAMAGED) else 1
        return True


def _be_the_process(tier: str, run: Run, fd: int) -> int:
    """Check, then store until the end comes; return an exit status only after a failure."""

    def say(word: Word, *numbers: int) -> None:
        os.write(fd, b"".join(_MESSAGE.pack(word, number) for number in numbers))

    try:
        rows = make_rows()
        driver = TierDriver(make_tier(tier, run.settings, rows), rows, HANG_S)
        for at in range(0, len(run.expected), NUM_ROWS):
            _check(driver, run.expected[at : at + NUM_ROWS], run, say)
        for number in range(FIRST_PHANTOM, FIRST_PHANTOM + NUM_PHANTOMS):
            if driver.lookup(number):
                say(Word.PHANTOM, number)
        say(Word.DAMAGED, int(driver.tier.stats().get("damaged", 0)))
        say(Word.CHECKED, len(run.expected))
        _store_for_ever(driver, run, say)
    except Exception:  # noqa: BLE001  # thread top: whatever it is, the parent must see it
        traceback.print_exc()
        say(Word.FAILED, 0)
    return 1


def _check(driver: TierDriver, numbers: Sequence[int], run: Run, say: Say) -> None:
    found = [number for number in numbers if driver.lookup(number)]
    arrived: set[int] = set()
    if found:
        result = driver.load(list(found))
        keys = set(result.successful_keys or ())
        arrived = {number for number in found if result.success or key_of(number) in keys}
    wrong = [
        number
        for slot, number in enumerate(found)
        if number in arrived and not np.array_equal(driver.rows[slot], content_of(number))
    ]
    if wrong:
        say(Word.WRONG, *wrong)
    say(Word.RIGHT, len(arrived) - len(wrong))
    lost = [number for number in numbers if number not in arrived]
    if lost and run.must_be_found:
        say(Word.LOST, *lost)


def _store_for_ever(driver: TierDriver, run: Run, say: Say) -> None:
    """Keep up to three jobs in flight, of drawn lengths; ``run.first`` and what follows are the numbers."""
    choose = random.Random(run.seed)  # the same
    number, last = run.first, run.first + MAX_ACKNOWLEDGED + 8 * NUM_ROWS
    slots = list(range(NUM_ROWS))
    open_jobs: dict[int, tuple[list[int], list[int]]] = {}
    while True:
        while len(open_jobs) < 3 and number < last and slots:
            count = min(choose.randrange(1, 9), len(slots), last - number)
            taken, slots = slots[:count], slots[count:]
            numbers = list(range(number, number + count))
            number += count
            driver.place(numbers, taken)
            open_jobs[driver.submit(numbers, taken, is_promotion=False)] = numbers, taken
        driver.tier.end_step()
        driver.tier.drain(0.001)
        driver.poll()
        for job_id in [one for one in open_jobs if one in driver.results]:
            numbers, taken = open_jobs.pop(job_id)
            result = driver.results.pop(job_id)
            keys = set(result.successful_keys or ())
            say(Word.STORED, *(one for one in numbers if result.success or key_of(one) in keys))
            slots += taken


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill processes and print the sums; the status is 1 when there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=["fs"], default="fs")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=None, help="a number that repeats a run; drawn when it is left out"
    )
    parser.add_argument(
        "--dir", type=Path, default=None, help="folder on the disk to try; a temporary one otherwise"
    )
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    print(f"tier {given.tier}, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=given.dir, ignore_cleanup_errors=True) as folder:
        totals = Totals()
        for totals in run_kills(given.tier, given.kills, seed, Path(folder)):
            print(totals, flush=True)
    if sum(totals.findings.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
