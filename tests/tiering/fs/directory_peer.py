"""Another process that uses a directory of packs: what runs in it, and how a test drives it.

    python -m tests.tiering.fs.directory_peer ROOT NAME

Each line of JSON on standard input is a method of ``Commands`` and its arguments; what it returns is answered.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.tiering.fs.packed import NAMESPACE, make_directory, stored

from kvtier.tiering.fs.notes import NotesState, OwnNotes
from kvtier.tiering.fs.pack import Pack

HANG_GUARD_S = 120.0
PROJECT = Path(__file__).parents[3]


class Peer:
    """The test's end of another process.

    Args:
        root: the directory.
        name: of the process.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiering.fs.directory_peer", str(root), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROJECT,
        )

    def send(self, *command: object) -> None:
        """Have the process do something; the answer is read with ``answer``."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        """Return what the process has answered, None at its end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, *command: object) -> object:
        """Have the process do something and return its answer."""
        self.send(*command)
        return self.answer()

    def stop(self) -> None:
        """Stop the process, so that it keeps what it holds."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

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


class Commands:
    """What a test may have the process do.

    Args:
        root: the directory.
        name: of the process.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._directory = make_directory(root, process=name)
        self._packs: list[Pack] = []
        self._notes: OwnNotes | None = None

    def ready(self) -> bool:
        """Answer when the directory is ready."""
        return True

    def create(self, num_packs: int) -> list[str]:
        """Make packs with a record each; return the names of those for which there was room."""
        return self._keep(
            self._directory.create(NAMESPACE, self._directory.capacity_bytes, may_remove=True)
            for _ in range(num_packs)
        )

    def adopt(self, names: list[str]) -> list[str]:
        """Return the packs of which this process has become the owner."""
        return self._keep(self._directory.adopt(NAMESPACE, name) for name in names)

    def release(self) -> None:
        """Give all packs up."""
        for pack in self._packs:
            pack.close()
        self._packs.clear()

    def fork(self, closes: bool) -> int:
        """Fork a child that outlives this process; return its id. It closes its copies if ``closes``."""
        child = os.fork()
        if child == 0:
            if closes:
                for pack in self._packs:
                    pack.close(unlock=False)
                if self._notes is not None:
                    self._notes.close_in_child()
                self._directory.close_in_child()
            os.close(sys.stdout.fileno())
            signal.pause()
            os._exit(0)
        return child

    def lock(self) -> bool:
        """Take the lock of the directory, and keep it."""
        self._held = self._directory.locked()
        return self._held.__enter__()

    def note(self) -> None:
        """Write notes."""
        self._notes = self._notes or OwnNotes(self._directory.root, "peer")
        self._notes.update(NotesState(NAMESPACE, 2**20))

    def use(self, pack_id: str, slot: int, num_uses: int) -> None:
        """Add uses to the notes."""
        assert self._notes is not None
        self._notes.add_uses([(bytes.fromhex(pack_id), slot + number) for number in range(num_uses)])

    def _keep(self, packs: Iterable[Pack | None]) -> list[str]:
        found = [pack for pack in packs if pack is not None]
        for pack in found:
            pack.journal.append([stored(0)])
        self._packs += found
        return [pack.name for pack in found]


def main() -> None:
    """Do what is asked for until nothing is."""
    commands = Commands(Path(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
