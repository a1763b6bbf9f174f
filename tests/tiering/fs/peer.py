"""Another process with a tier on the same directory: what runs in it, and how a test drives it.

    python -m tests.tiering.fs.peer ROOT CAPACITY [--pack-bytes N] [--die-at CALL:COUNT] [--model NAME]
        [--durability WORD] [--direct-io]

Each line on standard input is a command and gets one line of JSON as answer. ``--die-at pwritev:3`` kills the process
with SIGKILL at its third call of that name; ``pwritev-after:3`` just after it.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from tests.tiering.patience import be_patient

from kvtier.config import OffloadingConfig
from kvtier.testing.tier_suite import NUM_ROWS, TierDriver, content_of, make_config, make_rows
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls

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
        command = [
            sys.executable, "-m", "tests.tiering.fs.peer", str(root), str(capacity_bytes), *arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT
        )
        self.greeting = self.next_answer()

    def store(self, *numbers: int) -> list[int]:
        """Store blocks in one job each and return those that succeeded."""
        return cast("list[int]", self.call("store", *numbers))

    def call(self, command: str, *numbers: int) -> object:
        """Send a command and return its answer; None when the process died of it."""
        try:
            self.start(command, *numbers)
        except BrokenPipeError:
            return None
        return self.next_answer()

    def start(self, command: str, *numbers: int) -> None:
        """Send a command whose answers are read one by one, or never."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {' '.join(map(str, numbers))}\n")
        self.process.stdin.flush()

    def next_answer(self) -> object:
        """Return the next line of answer, None at the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

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


def make_calls(die_at: str | None) -> SystemCalls:
    """Return the system calls that the command line asks for."""
    if die_at is None:
        return REAL_CALLS
    name, _, count = die_at.partition(":")
    call = name.removesuffix("-after")
    is_after = name.endswith("-after")
    wrapped: dict[str, Callable[..., object]] = {
        call: dying(getattr(REAL_CALLS, call), int(count), is_after=is_after)
    }
    return replace(REAL_CALLS, **wrapped)  # type: ignore[arg-type]  # a call of the same name


class Commands:
    """What the process does on demand."""

    def __init__(self, config: OffloadingConfig, calls: SystemCalls, options: argparse.Namespace) -> None:
        rows = make_rows()
        self.tier = FSTier(
            config,
            rows,
            root_dir=options.root,
            capacity_bytes=options.capacity_bytes,
            pack_bytes=options.pack_bytes,
            durability=options.durability,
            direct_io=options.direct_io,
            allow_shrink=True,
            calls=calls,
        )
        assert self.tier.wait_indexed(HANG_GUARD_S)
        self.driver = TierDriver(self.tier, rows)

    def store(self, *numbers: int) -> list[int]:
        """Store blocks, one job each."""
        return [number for number in numbers if self.driver.store([number]).success]

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


def main() -> None:
    """Answer commands until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("capacity_bytes", type=int)
    parser.add_argument("--pack-bytes", type=int)
    parser.add_argument("--die-at")
    parser.add_argument("--model", default="model-a")
    parser.add_argument("--durability", default="none")
    parser.add_argument("--direct-io", action="store_true")
    options = parser.parse_args()
    be_patient()
    commands = Commands(make_config(options.model), make_calls(options.die_at), options)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(json.dumps(getattr(commands, name)(*map(int, numbers))), flush=True)
    assert commands.tier.shutdown(HANG_GUARD_S)


if __name__ == "__main__":
    main()
