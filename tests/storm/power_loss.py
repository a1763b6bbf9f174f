"""What of stored blocks outlives a loss of power, measured on a file system in an image.

    python -m tests.storm.power_loss

An image lies in memory, with a file system that is mounted through a loop device. What the file system has not written
to its device yet is not in the image, and a copy of it is what a disk without a volatile cache would hold if the power
failed at that moment. A tier stores blocks there; copies are made right after some of its reports, with the tier and
the mount alive. Each copy is then mounted, which replays the journal, and another tier loads from it every block that
had been reported before. It needs the superuser, ``mkfs`` and a free loop device, in a mount namespace of its own, and
says why where it cannot run. ``docs/results/faults.md`` has the sums of its rows.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.testing.tier_driver import NUM_ROWS, TierDriver, content_of, make_config, make_rows
from kvtier.tiering.fs import FSTier

HANG_GUARD_S = 60.0
ROW_BYTES = 64 * 2**10
IMAGE_BYTES = 96 * 2**20
CAPACITY = "48MiB"
JOB_BLOCKS = 4

UNSHARE = ("unshare", "--mount", "--propagation", "private")
NO_COMMIT = ("-o", "commit=300")
"""Option of ext4: its journal is written when a program syncs, or after five minutes. By default it is after five
seconds, and what outlives a loss of power without ``fdatasync`` would depend on how fast this runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a tier stores.

    Attributes:
        tier: its type.
        durability: its setting.
        direct_io: its setting.
    """

    tier: str
    durability: str
    direct_io: bool


CASES = tuple(
    Case(tier, durability, direct_io)
    for tier in ("fs",)
    for durability in ("none", "fdatasync")
    for direct_io in (False, True)
)


@dataclass(slots=True)
class Survival:
    """What was found after cuts of power.

    Attributes:
        num_cuts: how many there were.
        num_reported: blocks that had been reported as stored, of all cuts together.
        num_whole: blocks of these that were loaded, with the right bytes.
        num_wrong: blocks that were loaded with wrong bytes.
        num_refused: cuts after which the tier refused its place.
    """

    num_cuts: int = 0
    num_reported: int = 0
    num_whole: int = 0
    num_wrong: int = 0
    num_refused: int = 0


def explain_no_mount() -> str | None:
    """Return why no file system can be mounted here, None where one can."""
    missing = [name for name in ("unshare", "mount", "mkfs.ext4") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing: apt-get install util-linux mount e2fsprogs"
    if os.geteuid() != 0:
        return "mounting a file system needs the superuser"
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image"
        _make_image(image, "ext4", 8 * 2**20)
        if _try(*UNSHARE, "mount", "-o", "loop", image, "/mnt"):
            return "no image can be mounted through a loop device"
    return None


def measure(
    case: Case, folder: Path, *, num_blocks: int, num_cuts: int, file_system: str = "ext4"
) -> Survival:
    """Store blocks, cut the power after some of the reports, and load what had been reported.

    Args:
        case: how they are stored.
        folder: an empty folder on a file system in memory, in a mount namespace of this process.
        num_blocks: how many are stored.
        num_cuts: after how many of the reports the power fails, spread evenly.
        file_system: what ``mkfs`` makes.
    """
    image, at = folder / "image", folder / "mounted"
    at.mkdir()
    _make_image(image, file_system, IMAGE_BYTES)
    jobs = [
        list(range(first, min(first + JOB_BLOCKS, num_blocks))) for first in range(0, num_blocks, JOB_BLOCKS)
    ]
    cut_after = {round((number + 1) * len(jobs) / num_cuts) - 1 for number in range(num_cuts)}
    copies: list[tuple[Path, int]] = []
    with _mounted(image, at, NO_COMMIT if file_system == "ext4" else ()):
        driver = _start(case, at)
        _run("sync", "--file-system", at)  # what is measured begins here: the place of the tier is there
        for number, blocks in enumerate(jobs):
            assert driver.store(blocks).success, f"{case}: a block was not stored"
            if number in cut_after:
                copies.append((_copy_at_rest(image, folder / f"cut-{number}"), blocks[-1] + 1))
        assert driver.tier.shutdown(HANG_GUARD_S)
    found = Survival()
    for copy, num_reported in copies:
        with _mounted(copy, at, ()):
            _count(case, at, num_reported, found)
        copy.unlink()
    image.unlink()
    at.rmdir()
    return found


def _count(case: Case, at: Path, num_reported: int, found: Survival) -> None:
    found.num_cuts += 1
    found.num_reported += num_reported
    try:
        driver = _start(case, at)
    except Exception as error:  # noqa: BLE001 - foreign state: whatever the cut has left
        sys.stderr.write(f"{case}: refused: {error}\n")
        found.num_refused += 1
        return
    for first in range(0, num_reported, NUM_ROWS):
        numbers = list(range(first, min(first + NUM_ROWS, num_reported)))
        result = driver.load(numbers)
        arrived = set(numbers) if result.success else {n for n in numbers if _has(result.successful_keys, n)}
        for slot, number in enumerate(numbers):
            if number in arrived:
                is_right = bytes(driver.rows[slot]) == bytes(content_of(number, ROW_BYTES))
                found.num_whole += is_right
                found.num_wrong += not is_right
    assert driver.tier.shutdown(HANG_GUARD_S)


def _has(keys: frozenset[bytes] | None, number: int) -> bool:
    return keys is not None and any(int.from_bytes(key[:32], "big") == number for key in keys)


def _start(case: Case, at: Path) -> TierDriver:
    """Return a tier in a folder that knows what is there."""
    rows = make_rows(row_bytes=ROW_BYTES)
    config = make_config(row_bytes=ROW_BYTES)
    tier = FSTier(
        config,
        rows,
        root_dir=at / "kvtier",
        capacity_bytes=CAPACITY,
        direct_io=case.direct_io,
        durability=case.durability,
    )
    assert tier.wait_indexed(HANG_GUARD_S), "the place was not read in time"
    return TierDriver(tier, rows)


def _copy_at_rest(image: Path, copy: Path) -> Path:
    """Copy an image while the file system is in use; again until nothing has changed during the copy."""
    before = copy.with_name("before")
    _run("cp", "--sparse=always", image, copy)
    while True:
        copy.rename(before)
        _run("cp", "--sparse=always", image, copy)
        if _try("cmp", "--silent", before, copy) == 0:
            before.unlink()
            return copy


def _make_image(image: Path, file_system: str, num_bytes: int) -> None:
    with image.open("wb") as file:
        file.truncate(num_bytes)
    _run(f"mkfs.{file_system}", "-q", image)


@contextmanager
def _mounted(image: Path, at: Path, options: Sequence[str]) -> Iterator[None]:
    _run("mount", "-o", "loop", *options, image, at)
    try:
        yield
    finally:
        _run("umount", at)


def _run(*command: str | Path) -> None:
    code = _try(*command)
    if code:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with status {code}")


def _try(*command: str | Path) -> int:
    # Programs of the system with arguments of this file's own.
    return subprocess.run([str(part) for part in command], check=False, stdout=subprocess.DEVNULL).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; exit status 1 when a block was lost or wrong, 77 when nothing can be mounted here."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm.power_loss")
    parser.add_argument("--blocks", type=int, default=96, help="blocks that are stored, of 64 KiB")
    parser.add_argument("--cuts", type=int, default=8, help="copies of the image that are made")
    parser.add_argument("--file-system", default="ext4", help="what mkfs makes: ext4, xfs, btrfs")
    parser.add_argument("--is-apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.is_apart:
        reason = explain_no_mount()
        if reason is not None:
            print(f"skipped: {reason}")
            return 77
        given = sys.argv[1:] if arguments is None else arguments
        command = [*UNSHARE, sys.executable, "-m", "tests.storm.power_loss", "--is-apart", *given]
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        _run("mount", "-t", "tmpfs", "-o", "size=3g", "none", folder)
        try:
            return _print_all(Path(folder), options)
        finally:
            _run("umount", folder)


def _print_all(folder: Path, options: argparse.Namespace) -> int:
    print("| tier | durability | I/O | cuts | reported | whole afterwards | wrong bytes | refused |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    has_failed = False
    for case in CASES:
        found = measure(
            case, folder, num_blocks=options.blocks, num_cuts=options.cuts, file_system=options.file_system
        )
        way = "direct" if case.direct_io else "page cache"
        counts = (found.num_cuts, found.num_reported, found.num_whole, found.num_wrong, found.num_refused)
        cells = (f"`{case.tier}`", f"`{case.durability}`", way, *map(str, counts))
        print(f"| {' | '.join(cells)} |", flush=True)
        has_lost = case.durability == "fdatasync" and found.num_whole < found.num_reported
        has_failed |= has_lost or found.num_wrong > 0 or found.num_refused > 0
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
