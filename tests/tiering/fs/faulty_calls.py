"""Publishes and reads one file with calls of the system that end as planned, each way, and tells what came of it.

Run as a program in front of whose C library the calls of ``planned_calls.c`` stand; the argument is an empty directory.
One JSON line comes out for each case and way: an ``Ending``.
"""

import ctypes
import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, IntEnum
from pathlib import Path

from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.file_support import FileSupport
from kvtier.tiering.fs.system import REAL_CALLS, Buffers, FileStatus, SystemCalls, current_owner

PARTS = (b"h" * 4096, b"", bytes(range(250)) * 20)
"""A header page, nothing, and a row: where a call ends early may be in the first, in the last or between them."""

WHOLE = b"".join(PARTS)
TAKEN = b"of another"
PUBLISH, READ = "publish", "read"
ENDED_EARLY = "the file ended before its length"
TAKEN_IN_PART = "the file system took only a part of the block"


class Way(Enum):
    """How files are written and read."""

    COMPILED = "compiled"
    STEPWISE = "stepwise"
    NAMED = "named"
    COMPILED_OVER = "compiled, over a recycled file"
    STEPWISE_OVER = "stepwise, over a recycled file"

    @property
    def is_compiled(self) -> bool:
        """Whether one compiled call does it."""
        return self in (Way.COMPILED, Way.COMPILED_OVER)

    @property
    def is_over(self) -> bool:
        """Whether a recycled file is written over."""
        return self in (Way.COMPILED_OVER, Way.STEPWISE_OVER)


class Call(IntEnum):
    """What can be planned; the numbers are those of ``planned_calls.c``."""

    MOVE = 0
    OPEN = 1
    CLOSE = 2
    CHMOD = 3
    LINK = 4
    TIME = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Calls that end as planned, and the error that the file's reader or writer should get.

    Attributes:
        name: what happens, for people.
        plans: outcomes by call: at most so many bytes moved, 0, or the negative number of an error.
        error: number and text; None when the file should be whole.
        mode: permissions asked for; the umask leaves them to the owner.
        mode_found: permissions of the file.
        is_taken: whether another file has the name.
        is_old: whether the file was not used for long.
    """

    name: str
    plans: dict[Call, tuple[int, ...]]
    error: tuple[int, str] | None = None
    mode: int = 0o600
    mode_found: int = 0o600
    is_taken: bool = False
    is_old: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """What came of a case.

    Attributes:
        case: its name.
        way: its value.
        answer: whether the file was new, or the length found; None with an error.
        error: number and text of the error.
        is_named: whether the error names the file.
        bytes_found: in the published file or in the buffers: "whole", "none" (no file), "taken" or "other".
        mode: permissions of the file.
        leftovers: names of other files.
        num_open: files that are open now and were not before.
        num_left: planned outcomes that no call has met.
        is_released: whether the buffers can be resized, since nobody views them.
    """

    case: str
    way: str
    answer: bool | int | None
    error: tuple[int, str] | None
    is_named: bool
    bytes_found: str
    mode: int | None
    leftovers: list[str]
    num_open: int
    num_left: int
    is_released: bool


INTERRUPTED, BROKEN, FULL = -errno.EINTR, -errno.EIO, -errno.ENOSPC
BROKEN_ERROR = (errno.EIO, os.strerror(errno.EIO))

MOVES = (
    Case("a byte at a time", {Call.MOVE: (1,) * 30}),
    Case("the first part alone", {Call.MOVE: (4096,)}),
    Case("a byte less than the first part", {Call.MOVE: (4095, 1)}),
    Case("a byte more than the first part", {Call.MOVE: (4097, 4998)}),
    Case("interrupted before any byte", {Call.MOVE: (INTERRUPTED,) * 3}),
    Case("interrupted between bytes", {Call.MOVE: (100, INTERRUPTED, INTERRUPTED, 5000, INTERRUPTED)}),
    Case("an error after some bytes", {Call.MOVE: (100, INTERRUPTED, BROKEN)}, BROKEN_ERROR),
    Case("opening is interrupted", {Call.OPEN: (INTERRUPTED, INTERRUPTED)}),
    Case("no file can be opened", {Call.OPEN: (-errno.EMFILE,)}, (errno.EMFILE, os.strerror(errno.EMFILE))),
    Case("closing is interrupted", {Call.CLOSE: (INTERRUPTED,)}),
    Case(
        "an error after some bytes, and another of closing",
        {Call.MOVE: (100, FULL), Call.CLOSE: (BROKEN,)},
        (errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ),
)
"""What reading and writing have in common."""

PUBLISHING = (
    *MOVES,
    Case("nothing is written", {Call.MOVE: (0,)}, (errno.ENOSPC, TAKEN_IN_PART)),
    Case("nothing more is written", {Call.MOVE: (4096, 100, 0)}, (errno.ENOSPC, TAKEN_IN_PART)),
    Case("closing tells that bytes were lost", {Call.CLOSE: (BROKEN,)}, BROKEN_ERROR),
    Case("no name can be given", {Call.LINK: (BROKEN,)}, BROKEN_ERROR),
    Case("setting permissions is interrupted", {Call.CHMOD: (INTERRUPTED,)}, mode=0o660, mode_found=0o660),
    Case("permissions cannot be set", {Call.CHMOD: (-errno.EPERM,)}, mode=0o660),
    Case("the name is taken", {}, is_taken=True),
)

READING = (
    *MOVES,
    Case("the file is empty by now", {Call.MOVE: (0,)}, (errno.EIO, ENDED_EARLY)),
    Case("the file is shorter by now", {Call.MOVE: (4096, 100, 0)}, (errno.EIO, ENDED_EARLY)),
    Case("closing fails, with the bytes there", {Call.CLOSE: (BROKEN,)}),
    Case("the time of use cannot be set", {Call.TIME: (-errno.EROFS,)}, is_old=True),
)


class Planner:
    """The calls that stand before the C library's."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def plan(self, plans: dict[Call, tuple[int, ...]]) -> None:
        """Plan how the next calls of this thread end, and forget what was planned before.

        Raises:
            ValueError: more outcomes than there is room for.
        """
        for call in Call:
            outcomes = plans.get(call, ())
            if self._library.plan_calls(call, (ctypes.c_int * len(outcomes))(*outcomes), len(outcomes)):
                raise ValueError(f"{len(outcomes)} outcomes are too many")

    def take_num_left(self) -> int:
        """Forget what no call has met, and return how much that was."""
        num_left = sum(int(self._library.num_planned(call)) for call in Call)
        self.plan({})
        return num_left


def main(folder: Path) -> None:
    """Try every case in every way that this installation has."""
    os.umask(0o077)
    planner = Planner()
    ways = [way for way in Way if not way.is_compiled or REAL_CALLS.whole_files is not None]
    for way in ways:
        for case in publishing(way):
            write_ending(publish(planner, case, way, make_folder(folder / f"{way.value} {case.name}")))
        if way in (Way.COMPILED, Way.STEPWISE):
            for case in READING:
                write_ending(read(planner, case, way, make_folder(folder / f"{way.value} read {case.name}")))


def publishing(way: Way) -> list[Case]:
    """Return the cases of a way; a recycled file has its permissions, so none are set."""
    return [case for case in PUBLISHING if not (way.is_over and Call.CHMOD in case.plans)]


def write_ending(ending: Ending) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(asdict(ending)) + "\n")


def make_folder(folder: Path) -> Path:
    """Make a folder with one for temporary names."""
    (folder / "tmp").mkdir(parents=True)
    return folder


def publish(planner: Planner, case: Case, way: Way, folder: Path) -> Ending:
    """Publish a file whose calls end as planned."""
    files, path, buffers = make_files(way, folder, case.mode), folder / "a", make_buffers(PARTS)
    if case.is_taken:
        path.write_bytes(TAKEN)
    recycled_file = make_recycled(folder, case.mode) if way.is_over else None
    views = [memoryview(buffer) for buffer in buffers]
    before = count_open()
    answer, raised = None, None
    planner.plan(case.plans)
    try:
        answer = publish_one(files, str(path), views, recycled_file)
    except OSError as error:
        raised = error
    num_left = planner.take_num_left()
    found = path.read_bytes() if path.exists() else None
    return Ending(
        f"{PUBLISH}: {case.name}",
        way.value,
        answer,
        describe(raised),
        raised is not None and is_named(raised, path),
        {WHOLE: "whole", TAKEN: "taken", None: "none"}.get(found, "other"),
        path.stat().st_mode & 0o777 if path.exists() else None,
        [file.name for file in folder.rglob("*") if file.is_file() and file != path],
        count_open() - before,
        num_left,
        are_released(views, buffers),
    )


def read(planner: Planner, case: Case, way: Way, folder: Path) -> Ending:
    """Read a whole file whose calls end as planned."""
    files, path = make_files(way, folder, case.mode), folder / "a"
    path.write_bytes(WHOLE)
    if case.is_old:
        os.utime(path, (0, 0))
    buffers = make_buffers([bytes(len(part)) for part in PARTS])
    views = [memoryview(buffer) for buffer in buffers]
    before = count_open()
    answer, raised = None, None
    planner.plan(case.plans)
    try:
        answer = read_one(files, str(path), views).num_bytes
    except OSError as error:
        raised = error
    num_left = planner.take_num_left()
    return Ending(
        f"{READ}: {case.name}",
        way.value,
        answer,
        describe(raised),
        raised is not None and is_named(raised, path),
        "whole" if b"".join(buffers) == WHOLE else "other",
        path.stat().st_mode & 0o777,
        [file.name for file in folder.rglob("*") if file.is_file() and file != path],
        count_open() - before,
        num_left,
        are_released(views, buffers),
    )


def publish_one(files: BlockFiles, path: str, buffers: Buffers, recycled_file: str | None = None) -> bool:
    """Publish one file and return whether it was new.

    Raises:
        OSError: what the files answered.
    """
    (answer,) = files.publish([(path, buffers, recycled_file)])
    if isinstance(answer, OSError):
        raise answer
    return answer


def read_one(files: BlockFiles, path: str, buffers: Buffers) -> FileStatus:
    """Read one file and return what it is.

    Raises:
        OSError: what the files answered.
    """
    (status,) = files.read([(path, buffers)])
    if isinstance(status, OSError):
        raise status
    return status


def make_recycled(folder: Path, mode: int) -> str:
    """Return a file as long as the parts that may be written over."""
    recycled_file = folder / "tmp" / "recycled"
    recycled_file.write_bytes(bytes(len(WHOLE)))
    recycled_file.chmod(mode)
    return str(recycled_file)


def make_files(way: Way, folder: Path, mode: int) -> BlockFiles:
    """Return the files of a folder."""
    support = FileSupport(has_direct_io=False, has_unnamed_files=way is not Way.NAMED)
    calls = SystemCalls(whole_files=REAL_CALLS.whole_files if way.is_compiled else None)
    return BlockFiles(support, folder / "tmp", current_owner(), mode, calls, time.time)


def make_buffers(parts: Sequence[bytes]) -> list[bytearray]:
    """Return memory with these bytes."""
    return [bytearray(part) for part in parts]


def count_open() -> int:
    """Return how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def describe(error: OSError | None) -> tuple[int, str] | None:
    """Return number and text of an error."""
    return None if error is None else (error.errno or 0, error.strerror or "")


def is_named(error: OSError, path: Path) -> bool:
    """Return whether an error names this file and no other."""
    return error.filename == str(path) and error.filename2 is None


def are_released(views: Sequence[memoryview], buffers: Sequence[bytearray]) -> bool:
    """Return whether nobody but ``views``, which end here, looks at the buffers: others cannot be made longer."""
    for view in views:
        view.release()
    try:
        for buffer in buffers:
            buffer.append(0)
    except BufferError:
        return False
    return True


def read_endings(output: str) -> Iterator[Ending]:
    """Yield what the program told."""
    for line in output.splitlines():
        fields = json.loads(line)
        error = fields["error"]
        yield Ending(**fields | {"error": None if error is None else (error[0], error[1])})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
