"""Another process with a tier on the same directory: what runs in it, and how a test drives it.

    python -m tests.tiering.fs.peer ROOT CAPACITY [--die-at CALL:COUNT] [--named] [--model NAME] [--alice-blocks N]

Each line on standard input is a command and gets one line of JSON as answer. ``--die-at link:3`` kills the process
with SIGKILL at its third call of that name; ``link-after:3`` just after it.
"""

import argparse
import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

from tests.tiering.patience import be_patient
from tests.tiering.tenant_driver import TenantDriver, config_of_tenants

from kvtier.config import OffloadingConfig
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, content_of, make_config, make_rows
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system import REAL_CALLS, SystemCalls

HANG_GUARD_S = 60.0
PROJECT = Path(__file__).parents[3]
Call = TypeVar("Call", bound=Callable[..., object])


class Peer:
    """The test's end of another process.

    Args:
        root: the directory.
        capacity_bytes: what the other tier allows.
        arguments: further options of its command line.
    """

    def __init__(self, root: Path, capacity_bytes: int, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.tiering.fs.peer", str(root), str(capacity_bytes), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT
        )
        assert self._read() == "ready"

    def store(self, *numbers: int) -> list[int]:
        """Store blocks in one job each and return those that succeeded."""
        return cast("list[int]", self.call("store", *numbers))

    def call(self, command: str, *numbers: int) -> object:
        """Send a command and return its answer; None when the process died of it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{command} {' '.join(map(str, numbers))}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read()

    def start(self, command: str, *numbers: int) -> None:
        """Send a command whose answers are read one by one, or never."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {' '.join(map(str, numbers))}\n")
        self.process.stdin.flush()

    def next_answer(self) -> object:
        """Return the next line of answer."""
        return self._read()

    def kill(self) -> None:
        """End the process as a crash does."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Wait for the end of the process, asked for by the end of its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(HANG_GUARD_S)
        self.process.stdout.close()

    def _read(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def dying(call: Call, at: int, *, is_after: bool) -> Call:
    """Return ``call``, which kills the process at its ``at``-th use."""
    counter = itertools.count(1)

    def wrapped(*arguments: object) -> object:
        is_last = next(counter) == at
        if is_last and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return cast("Call", wrapped)


def refuse_unnamed_files(path: str, flags: int, mode: int) -> int:
    """Open like a file system without ``O_TMPFILE``."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no unnamed files", path)
    return os.open(path, flags, mode)


def make_calls(die_at: str | None, *, is_named: bool) -> SystemCalls:
    """Return the system calls that the command line asks for."""
    calls = SystemCalls(open=refuse_unnamed_files) if is_named else REAL_CALLS
    if die_at is None:
        return calls
    name, _, count = die_at.partition(":")
    is_after = name.endswith("-after")
    planted = {name.removesuffix("-after")}
    changed = {
        field: dying(getattr(calls, field), int(count), is_after=is_after)
        if field in planted
        else getattr(calls, field)
        for field in ("open", "pwritev", "preadv", "link")
    }
    return SystemCalls(**changed)


class Commands:
    """What the process does on demand."""

    def __init__(self, root: Path, capacity_bytes: int, config: OffloadingConfig, calls: SystemCalls) -> None:
        rows = make_rows()
        self.root = root
        self.tier = FSTier(
            config,
            rows,
            root_dir=root,
            capacity_bytes=capacity_bytes,
            allow_shrink=True,
            calls=calls,
            clock=ManualClock(),
        )
        assert self.tier.wait_indexed(HANG_GUARD_S)
        self.driver = TenantDriver(self.tier, rows)

    def store(self, *numbers: int) -> list[int]:
        """Store blocks, one job each."""
        return [number for number in numbers if self.driver.store([number]).success]

    def store_alice(self, *numbers: int) -> int:
        """Store blocks of a tenant, one job each, and return how many succeeded."""
        return sum(len(self.driver.store_of("alice", [number])) for number in numbers)

    def churn(self, first: int, count: int) -> list[int]:
        """Store many blocks, sixteen in a job; say each job's first number when it is done."""
        for number in range(first, first + count, NUM_ROWS):
            self.driver.store(list(range(number, number + NUM_ROWS)))
            print(json.dumps(number), flush=True)
        return []

    def load(self, number: int) -> bool:
        """Load a block and check its bytes."""
        is_loaded = self.driver.load([number]).success
        assert not is_loaded or bytes(self.driver.rows[0]) == bytes(content_of(number))
        return is_loaded

    def lookup(self, number: int) -> bool:
        """Look a block up until there is an answer."""
        return self.driver.lookup(number)

    def hold_eviction_lock(self) -> bool:
        """Take the eviction lock, and keep it until the end of the process."""
        self._lock = os.open(self.root / ".lock", os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return True

    def evict(self, number: int) -> bool:
        """Remove a block's file as an evictor does."""
        (path,) = self.root.glob(f"*/*/*/{number.to_bytes(32, 'big').hex()}*")
        path.unlink()
        return True


def main() -> None:
    """Answer commands until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("capacity_bytes", type=int)
    parser.add_argument("--die-at")
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--model", default="model-a")
    parser.add_argument("--alice-blocks", type=int, help="the quota of a tenant; bob has none")
    options = parser.parse_args()
    be_patient()
    calls = make_calls(options.die_at, is_named=options.named)
    config = make_config(options.model)
    if options.alice_blocks is not None:
        quota_bytes = options.alice_blocks * (ROW_BYTES + 4096)
        config = config_of_tenants("fs", {"alice": quota_bytes, "bob": None}, config)
    commands = Commands(options.root, options.capacity_bytes, config, calls)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(json.dumps(getattr(commands, name)(*map(int, numbers))), flush=True)
    assert commands.tier.shutdown(HANG_GUARD_S)


if __name__ == "__main__":
    main()
