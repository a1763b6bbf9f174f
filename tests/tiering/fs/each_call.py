"""Lives of a disk tier in which one system call on its files fails, or is the last one of the process.

Run as a program: ``python -m tests.tiering.fs.each_call FOLDER DURABILITY``. A first life counts the calls. Each of
them then fails in one life, and ends the process in another, in processes that are forked. After each life a new tier
looks for every block. One JSON line comes out for each: an ``Ending``.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from tests.tiering.fs.engine import HANG_GUARD_S, bytes_of_packs, start_driver, tick

from kvtier.errors import ConfigError, TierError
from kvtier.testing.tier_driver import TierDriver, key_of, make_config
from kvtier.tiering.fs import system_calls
from kvtier.tiering.fs.system_calls import SystemCalls

OS_CALLS = (
    "open", "close", "stat", "lstat", "fstat", "scandir", "fchmod", "chmod", "ftruncate", "fsync", "fdatasync", "pread",
    "preadv", "pwrite", "pwritev", "read", "write", "rename", "replace", "link", "unlink", "mkdir", "utime",
)  # fmt: skip
FCNTL_CALLS = ("flock",)

NUM_BLOCKS = 12
NUM_PACKS, NUM_SLOTS = 4, 4
JOB_BLOCKS = 2


class Fate(Enum):
    """What happens at the planned call."""

    NONE = "none"
    FAILS = "fails"
    LAST = "is the last one"


@dataclass
class Ending:
    """What came of a life.

    Attributes:
        call: which call was planned, by number and name.
        fate: what happened at it.
        stored: blocks that were reported as stored.
        found: blocks that a new tier finds and loads with the right bytes.
        wrong: blocks that came with wrong bytes, in this life or after it.
        unreadable: blocks that a new tier finds and cannot load.
        raised: errors that an engine would have met, where only refusals of a start may come.
        refused: why a start was refused.
        is_killed: whether the process ended at the call.
        num_open: files of the tier that stay open.
    """

    call: str = ""
    fate: str = Fate.NONE.value
    stored: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    is_killed: bool = False
    num_open: int = 0


class Calls:
    """Stands in front of the system's calls on files below a folder, and lets one of them end as planned.

    Args:
        folder: below it files are the tier's.
        at: number of the planned call; -1 for none.
        fate: what happens then.
    """

    def __init__(self, folder: Path, at: int, fate: Fate) -> None:
        self.names: list[str] = []
        self.fds: set[int] = set()
        self._folder = str(folder)
        self._at = at
        self._fate = fate
        for module, names in ((os, OS_CALLS), (fcntl, FCNTL_CALLS), (system_calls, ("fallocate",))):
            for name in names:
                setattr(module, name, self._around(name, getattr(module, name)))

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:  # Any: whichever call it is
        def call(*arguments: object, **named: object) -> object:
            if not self._is_own(arguments):
                return real(*arguments, **named)
            number = len(self.names)
            self.names.append(name)
            is_planned = number == self._at
            if is_planned and self._fate is Fate.FAILS:
                if name == "close":  # Linux closes whatever it says
                    self.fds.discard(cast("int", arguments[0]))
                    real(*arguments, **named)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            try:
                result = real(*arguments, **named)
            finally:
                if is_planned and self._fate is Fate.LAST:
                    os.kill(os.getpid(), signal.SIGKILL)
            if name == "open":
                self.fds.add(result)
            elif name == "close":
                self.fds.discard(cast("int", arguments[0]))
            return result

        return call

    def _is_own(self, arguments: tuple[object, ...]) -> bool:
        if not arguments:
            return False
        first = arguments[0]
        return first in self.fds if isinstance(first, int) else str(first).startswith(self._folder)


def start(folder: Path, durability: str) -> TierDriver:
    """Start a tier over the directory of a folder."""
    calls = SystemCalls(
        open=os.open,
        write=os.write,
        pread=os.pread,
        pwritev=os.pwritev,
        preadv=os.preadv,
        truncate=os.ftruncate,
        fallocate=system_calls.fallocate,
        sync=os.fdatasync,
        rename=os.rename,
        unlink=os.unlink,
    )
    driver = start_driver(
        make_config(),
        root_dir=folder / "fs",
        capacity_bytes=bytes_of_packs(NUM_PACKS, NUM_SLOTS),
        pack_bytes=bytes_of_packs(1, NUM_SLOTS),
        calls=calls,
        durability=durability,
    )
    driver.poll_until(lambda: is_indexed(driver))
    return driver


def is_indexed(driver: TierDriver) -> bool:
    """Let the tier do what is due, and return whether it knows its directory."""
    tick([driver])
    return driver.tier.wait_indexed(0.0)


def live(folder: Path, durability: str, say: Callable[[str, object], None]) -> None:
    """Store blocks in two tiers, one after the other, and load them."""
    for first in (0, NUM_BLOCKS // 2):
        driver = None
        for _ in range(2):  # the planned call fails once
            try:
                driver = start(folder, durability)
                break
            except (ConfigError, TierError, OSError) as error:
                say("refused", f"{type(error).__name__}: {error}")
        if driver is None:
            say("raised", "two starts were refused")
            return
        for number in range(first, first + NUM_BLOCKS // 2, JOB_BLOCKS):
            numbers = list(range(number, number + JOB_BLOCKS))
            result = driver.store(numbers)
            for one in numbers:
                if result.success or key_of(one) in (result.successful_keys or ()):
                    say("stored", one)
            try:
                driver.load_right(list(range(JOB_BLOCKS)))
            except AssertionError:
                say("wrong", number)
        if not driver.tier.shutdown(HANG_GUARD_S):
            say("raised", "it does not end")


def run_life(folder: Path, durability: str, at: int, fate: Fate) -> tuple[Ending, list[str]]:
    """Let one life happen in a process of its own and look for its blocks; return the calls that it made, too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        be_the_process(folder, durability, Calls(folder, at, fate), writer)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = [json.loads(line) for line in stream]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    names: list[str] = next((value for name, value in said if name == "names"), [])
    ending = Ending(fate=fate.value, is_killed=status == -signal.SIGKILL)
    for name, value in said:
        if name == "num_open":
            ending.num_open = value
        elif name != "names":
            getattr(ending, name).append(value)
    if status not in (0, -signal.SIGKILL):
        ending.raised.append(f"exit status {status}")
    look(folder, durability, ending)
    return ending, names


def be_the_process(folder: Path, durability: str, calls: Calls, pipe: int) -> None:
    """Live, say what happened, and end."""

    def say(name: str, value: object) -> None:
        os.write(pipe, json.dumps([name, value]).encode() + b"\n")

    try:
        live(folder, durability, say)
    except BaseException as error:  # noqa: BLE001  # thread top: the parent must see it
        say("raised", f"{type(error).__name__}: {error}")
    say("num_open", count_open(folder))
    say("names", calls.names)
    os._exit(0)


def count_open(folder: Path) -> int:
    """Return how many files below a folder this process has open."""
    links = list(Path("/proc/self/fd").iterdir())
    return sum(str(link.readlink()).startswith(str(folder)) for link in links if link.is_symlink())


def look(folder: Path, durability: str, ending: Ending) -> None:
    """Start a tier and load every block that it finds."""
    try:
        driver = start(folder, durability)
    except (ConfigError, TierError) as error:
        ending.raised.append(f"the next start was refused: {error}")
        return
    for number in range(NUM_BLOCKS):
        if not driver.lookup(number):
            continue
        try:
            arrived = driver.load_right([number])
        except AssertionError:
            ending.wrong.append(number)
            continue
        (ending.found if arrived else ending.unreadable).append(number)
    assert driver.store([99]).success
    assert driver.tier.shutdown(HANG_GUARD_S)


def run_all(folder: Path, durability: str) -> Iterator[Ending]:
    """Yield the ending of every life, that without a fault first."""
    first, names = run_life(folder, durability, -1, Fate.NONE)
    yield first
    for at, name in enumerate(names):
        for fate in (Fate.FAILS, Fate.LAST):
            ending, _ = run_life(folder, durability, at, fate)
            ending.call = f"{at} {name}"
            yield ending


if __name__ == "__main__":
    for each in run_all(Path(sys.argv[1]) / "life", sys.argv[2]):
        print(json.dumps(asdict(each)), flush=True)
