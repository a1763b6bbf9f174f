"""Files of evicted blocks that are written over, and what a task of a job has reserved to write into.

To remove a file and to make another is most of what a file system does for a block; a recycled one has its inode and
its place on the disk already. Recycled files have temporary names, so those of a process that died are removed like any
other half-written file, and count as bytes on the disk. They are used in the order in which they came: another host
takes a process without a sign of life for dead, and a file's time is one.

Each is written over by a block of its own namespace only. Should the disk lose the bytes and keep the name, a reader
finds an older block of the same namespace, whose header has another key than its name: that is damage and is removed,
where a block of another namespace would be left alone for ever.
"""

import logging
import os
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.shared_usage import SharedUsage, UsageRecord

logger = logging.getLogger(__name__)

SLACK_SHARE = 32
"""One part in so many of the capacity is kept free, in whole blocks, so that a writer rarely has to wait for an
eviction. A larger share of room would be wasted; none at all in directories of a few blocks."""

MAX_RECYCLED_FILES = 256
"""Files of evicted blocks that are kept to be written over, where the slack has room for them. More would lie unused,
and take long to remove at the end; fewer are used up by one long prompt, and new files are made."""


class RecycledFile(NamedTuple):
    """A file that may be written over.

    Attributes:
        path: its temporary name.
        namespace_name: whose block it was.
    """

    path: str
    namespace_name: str


class RecycledFiles:
    """The recycled files of one tier.

    Mutable is the deque of them, where appending and taking are atomic.

    Args:
        files: unpublishes them.
        file_mode: permissions that they must have.
        block_bytes: length that they must have.

    Attributes:
        waiting: the files, in the order in which they came.
    """

    def __init__(self, files: BlockFiles, file_mode: int, block_bytes: int) -> None:
        self._files = files
        self._file_mode = file_mode
        self._block_bytes = block_bytes
        self.waiting: deque[RecycledFile] = deque()

    def can_keep(self, status: os.stat_result) -> bool:
        """Return whether a file could be written over: a block's, this user's, under no other name."""
        return (
            stat.S_ISREG(status.st_mode)
            and stat.S_IMODE(status.st_mode) == self._file_mode
            and status.st_size == self._block_bytes
            and status.st_nlink == 1
            and status.st_uid == os.geteuid()
        )

    def keep(self, path: str, namespace_name: str) -> bool:
        """Unpublish the file of an evicted block and keep it; False when that failed and nothing has changed."""
        try:
            self.waiting.append(RecycledFile(self._files.unpublish(path), namespace_name))
        except OSError:
            return False  # gone meanwhile, or the folder for temporary files is
        return True

    def take(self, num_files: int, namespace_name: str) -> list[RecycledFile]:
        """Return up to ``num_files`` of them, which are the caller's now; others than the namespace's are removed.

        Thread: any; may block.
        """
        taken: list[RecycledFile] = []
        try:
            while len(taken) < num_files:
                recycled_file = self.waiting.popleft()
                if recycled_file.namespace_name == namespace_name:
                    taken.append(recycled_file)
                else:
                    self.discard(recycled_file)
        except IndexError:
            pass
        return taken

    def give_back(self, recycled: Iterable[RecycledFile]) -> None:
        """Take back what was not written over. Thread: any."""
        self.waiting.extend(recycled)

    def drop_missing(self) -> None:
        """Forget those whose files another program has removed. Thread: the evictor's; blocks."""
        present = []
        with suppress(IndexError):
            while True:
                recycled_file = self.waiting.popleft()
                if os.path.lexists(recycled_file.path):
                    present.append(recycled_file)
        self.waiting.extendleft(reversed(present))

    def discard(self, recycled_file: RecycledFile) -> None:
        """Remove a file that is of no use, if it is there. Thread: any; may block.

        Its bytes stay in the shared count until the next recount: a walk over the directory that is under way would
        otherwise count them out a second time.
        """
        with suppress(OSError):
            Path(recycled_file.path).unlink()

    def remove_all(self, usage: SharedUsage) -> None:
        """Remove every one and count them out, while others may be counting. Thread: the evictor's; blocks."""
        num_bytes = len(self.waiting) * self._block_bytes
        usage.begin_removal(num_bytes)
        usage.end_removal(num_bytes, self.trim(0))

    def trim(self, num_files: int) -> int:
        """Remove the oldest beyond ``num_files`` and return the bytes that this gave. Thread: the evictor's; blocks."""
        freed_bytes = 0
        while len(self.waiting) > num_files:
            try:
                recycled_file = self.waiting.popleft()
                Path(recycled_file.path).unlink()
            except (IndexError, FileNotFoundError):
                continue
            except OSError as error:
                logger.warning("tier fs: recycled file %s cannot be removed: %s", recycled_file.path, error)
                continue
            freed_bytes += self._block_bytes
        return freed_bytes


Target = RecycledFile | None
"""Where one block may be written: over a recycled file, or into a new one."""


class StoreOutcome(Enum):
    """Outcome of storing one block; ``NO_RECYCLED``: the file to be written over was gone."""

    WRITTEN = "written"
    EXISTED = "existed"
    NO_ROOM = "no_room"
    NO_RECYCLED = "no_recycled"
    FAILED = "failed"


@dataclass(slots=True)
class Reservation:
    """Where the blocks of one task of a job may be written; used by one thread.

    The bytes of recycled files are in the shared count already. One that is written over stays there under its new
    name; one that was used up in vain stays until the next recount, which is too much and never too little. A target
    that is taken and not completed, because an exception came in between, counts as written: its file may be there.

    Attributes:
        recycled: where recycled files come from, and go when they were not used.
        block_bytes: length of a block's file.
        targets: what is left, recycled files first.
        num_reserved: new files for which there is room in the shared count.
        in_use: recycled files that are taken and not completed.
        has_met_full_disk: whether the disk had no room for a block, although the count had.
    """

    recycled: RecycledFiles
    block_bytes: int
    targets: deque[Target] = field(default_factory=deque)
    num_reserved: int = 0
    in_use: set[RecycledFile] = field(default_factory=set)
    has_met_full_disk: bool = False

    def add(self, recycled: Sequence[RecycledFile], num_reserved: int) -> None:
        """Have more targets: recycled files, and room for so many new ones."""
        self.targets.extendleft(reversed(recycled))
        self.targets.extend([None] * num_reserved)
        self.num_reserved += num_reserved

    def take(self, num_blocks: int) -> list[Target]:
        """Return up to ``num_blocks`` targets, each of which is to be completed whatever becomes of its block."""
        taken = [self.targets.popleft() for _ in range(min(num_blocks, len(self.targets)))]
        self.in_use.update(target for target in taken if target is not None)
        return taken

    def complete(self, target: Target, outcome: StoreOutcome) -> None:
        """Record the outcome of the block that was to be written there."""
        if target is not None:
            self.in_use.remove(target)
        if outcome is StoreOutcome.WRITTEN:
            return
        self.has_met_full_disk |= outcome is StoreOutcome.NO_ROOM
        if target is None:
            self.targets.append(None)
        elif outcome is StoreOutcome.EXISTED:
            self.targets.appendleft(target)
        else:
            self.recycled.discard(target)

    def end(self, usage: SharedUsage) -> UsageRecord | None:
        """Give back what was not used, record the rest in the shared count, and return that where it has changed."""
        for target in self.in_use:
            self.recycled.discard(target)
        unused = [target for target in self.targets if target is not None]
        if unused:
            self.recycled.give_back(unused)
        num_written = self.num_reserved - (len(self.targets) - len(unused))
        return usage.end_reservation(self.num_reserved * self.block_bytes, num_written * self.block_bytes)


def plan_excess(record: UsageRecord, block_bytes: int, recycled_bytes: int) -> int:
    """Return by how many bytes a directory is beyond where it should be, negative when below. Pure.

    Args:
        record: the shared count.
        block_bytes: length of a block's file.
        recycled_bytes: what of the count waits to be written over by this tier.
    """
    limit_bytes = record.limit_bytes
    slack_bytes = limit_bytes // SLACK_SHARE // block_bytes * block_bytes
    return record.used_bytes - recycled_bytes - (limit_bytes - slack_bytes)


def plan_num_recycled(record: UsageRecord, block_bytes: int) -> int:
    """Return how many recycled files one tier may keep: those of all together fit into the slack. Pure."""
    slack_blocks = record.limit_bytes // SLACK_SHARE // block_bytes
    return min(MAX_RECYCLED_FILES, slack_blocks // max(1, len(record.members)))
