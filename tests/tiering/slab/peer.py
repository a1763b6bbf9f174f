"""Another process with a tier on the same file: what runs in it, and how a test drives it.

    python tests/tiering/slab/peer.py PATH CAPACITY [--die-at COUNT:BYTES] [--buffered]

It answers "ready", or why it could not start. Each line on standard input, ``FIRST COUNT``, then makes it store blocks,
sixteen in a job; it says each job's first number when the job is done. ``--die-at 3:5000`` kills the process with
SIGKILL in its third write, when 5000 bytes of that have reached the file.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kvtier.errors import KVTierError
from kvtier.testing.tier_suite import NUM_ROWS, TierDriver, make_config, make_rows
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.slab_file import Buffers, SystemCalls

HANG_GUARD_S = 60.0


class Peer:
    """The test's end of another process.

    Args:
        path: the file.
        capacity_bytes: its length.
        arguments: further options of the command line.
    """

    def __init__(self, path: Path, capacity_bytes: int, *arguments: str) -> None:
        command = [sys.executable, __file__, str(path), str(capacity_bytes), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.greeting = self.next_answer()

    def store(self, first: int, count: int) -> None:
        """Begin to store blocks; the answers are read one by one, or never."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first} {count}\n")
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


def dying(count: int, num_bytes: int) -> SystemCalls:
    """Return system calls that kill the process in the ``count``-th write of blocks."""
    numbers = itertools.count(1)

    def pwritev(fd: int, buffers: Buffers, offset: int) -> int:
        if offset == 0 or next(numbers) != count:
            return os.pwritev(fd, buffers, offset)
        path = Path(f"/proc/self/fd/{fd}")
        with path.open("r+b", buffering=0) as file:  # without direct I/O, which takes whole pages only
            os.pwrite(file.fileno(), b"".join(buffers)[:num_bytes], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    return SystemCalls(pwritev=pwritev)


def main() -> None:
    """Store what is asked for until nothing is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("capacity_bytes", type=int)
    parser.add_argument("--die-at")
    parser.add_argument("--buffered", action="store_true")
    options = parser.parse_args()
    calls = dying(*map(int, options.die_at.split(":"))) if options.die_at else SystemCalls()
    rows = make_rows()
    try:
        tier = SlabTier(
            make_config(),
            rows,
            path=options.path,
            capacity_bytes=options.capacity_bytes,
            direct_io=False if options.buffered else "auto",
            calls=calls,
        )
    except KVTierError as error:
        print(json.dumps(str(error)), flush=True)
        return
    assert tier.wait_indexed(HANG_GUARD_S)
    driver = TierDriver(tier, rows)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        first, count = map(int, line.split())
        for number in range(first, first + count, NUM_ROWS):
            driver.store(list(range(number, number + NUM_ROWS)))
            print(json.dumps(number), flush=True)
    assert tier.shutdown(HANG_GUARD_S)


if __name__ == "__main__":
    main()
