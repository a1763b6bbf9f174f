"""Runs the tests several times next to busy loops, and says which failed in which round.

    python -m scripts.test_loaded --rounds 3 --loops 4 -- python -m pytest -m 'not slow'

No test may depend on how threads or processes interleave, and on an idle machine hardly any interleaving but the usual
one happens. The loops run at the same niceness as the tests, 19, so that both get equal shares: next to four loops, the
three processes of ``make test`` get less than half of the machine. At niceness 19 next to loops at 0, in the same
session, they would get less than a hundredth, and no test would end. Nothing else on the machine is slowed down.

The limits of pytest that end a test that hangs are lengthened: they are guards, and no test may need them.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

AT_NICENESS = ("nice", "-n", "19")

GUARD_S = 3000
"""Seconds after which pytest ends a test that hangs: ten times the limit of an idle machine."""

GUARDS = ("-o", f"timeout={GUARD_S}", "-o", f"faulthandler_timeout={GUARD_S - 60}")

# It ends by itself when this process has ended, however it did.
BUSY_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""

INTERRUPTED = 2
"""Status with which pytest ends when it was interrupted."""

END_GUARD_S = 60.0
"""Seconds that interrupted tests get to end what they have started."""


@dataclass(frozen=True, slots=True)
class Round:
    """How one run of the tests ended.

    Attributes:
        status: of the command.
        failed: names of the tests that failed, and of those that could not begin.
        took_s: how long it took.
    """

    status: int
    failed: tuple[str, ...]
    took_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds; return 0 when every one of them passed, else the status of the first that did not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often the tests run (default 3)")
    parser.add_argument(
        "--loops", type=int, default=4, help="how many busy loops run beside them (default 4)"
    )
    parser.add_argument("command", nargs="+", help="runs pytest, after --")
    options = parser.parse_args(arguments)
    rounds: list[Round] = []
    try:
        with busy_loops(options.loops):
            while len(rounds) < options.rounds and not (rounds and rounds[-1].status == INTERRUPTED):
                rounds.append(run_round([*options.command, *GUARDS], print))
                print(describe(len(rounds), rounds[-1]), flush=True)
    except KeyboardInterrupt:
        print("interrupted: nothing of it runs any more")
        return INTERRUPTED
    print(*(describe(number, each) for number, each in enumerate(rounds, 1)), sep="\n")
    return next((each.status for each in rounds if each.status), 0)


@contextmanager
def busy_loops(num_loops: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run busy loops until the block ends, or this process."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_loops):
            command = [*AT_NICENESS, sys.executable, "-c", BUSY_LOOP, str(os.getpid())]
            loops.append(subprocess.Popen(command))  # noqa: S603  # ourselves
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_round(command: Sequence[str], on_line: Callable[[str], None]) -> Round:
    """Run the tests once; an exception on the way ends them.

    Args:
        command: runs them.
        on_line: gets each line that they print, without its end.
    """
    began_s = time.monotonic()
    failed: list[str] = []
    # In a group of its own: the terminal's interrupt besides the one below would cut its end short.
    run = subprocess.Popen(  # noqa: S603  # what the caller asked for
        [*AT_NICENESS, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        assert run.stdout is not None
        for line in run.stdout:
            on_line(line.rstrip("\n"))
            found = re.match(r"(?:FAILED|ERROR) (\S+)", line)
            if found is not None:
                failed.append(found[1])
        status = run.wait()
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            try:
                run.communicate(timeout=END_GUARD_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                run.kill()
        run.communicate()
    return Round(status, tuple(failed), time.monotonic() - began_s)


def describe(number: int, ended: Round) -> str:
    """Return how a round ended, and the tests that failed in it. Pure."""
    outcome = "passed" if ended.status == 0 else f"FAILED with status {ended.status}"
    return "\n  ".join([f"round {number}: {outcome} after {ended.took_s:.0f} s", *ended.failed])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
