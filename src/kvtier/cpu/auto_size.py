"""``"cpu_bytes_to_use": "auto"``: the host memory that the machine can spare, by arithmetic that every process repeats.

The scheduler's half and each worker's half compute the size on their own, before the region exists, and must agree. So
it follows from facts that are the same in all of them at any time: the memory of the machine or the limit of its
control group, the size of the shared-memory mount, and what the engine says it takes. What is free at the moment does
not count; a region that does not fit then is refused when it is made.

    (memory - reserve) / engines on this host - what the engine takes, at most nine tenths of the mount
"""

from dataclasses import dataclass
from pathlib import Path

from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError
from kvtier.limits import MemorySize, find_memory_size, find_mount_size

SETTING = "cpu_bytes_to_use"

PROCESS_BYTES = 2 * 2**30
"""Host memory of one process of an engine: the interpreter, torch and its libraries, a CUDA context, staging buffers.
An engine adds it to what it reports. Less risks the machine's memory, more leaves memory unused."""

RESERVE_PERCENT = 10
"""Share of the memory that stays free: for the page cache behind the fs tier, tokenizers, other programs. With zero
the first large request could end the container."""

MIN_RESERVE_BYTES = 2**30
"""The reserve of a small machine, on which a tenth is nothing."""

MOUNT_PERCENT = 90
"""Share of the shared-memory mount that a region may take; collective libraries and data loaders use it too."""


@dataclass(frozen=True, slots=True)
class AutoSize:
    """The size, and the arithmetic behind it.

    Attributes:
        memory: what the machine has, or its control group allows.
        engine_bytes: host memory that one engine takes.
        num_engines: engines on this host.
        mount: of the region; None where rows are private memory.
    """

    memory: MemorySize
    engine_bytes: int
    num_engines: int
    mount: MemorySize | None

    @property
    def reserve_bytes(self) -> int:
        """Memory that stays free."""
        return max(MIN_RESERVE_BYTES, self.memory.num_bytes * RESERVE_PERCENT // 100)

    @property
    def num_bytes(self) -> int:
        """The size of one engine's primary tier; 0 when nothing is left."""
        left = (self.memory.num_bytes - self.reserve_bytes) // self.num_engines - self.engine_bytes
        if self.mount is not None:
            left = min(left, self._mount_bytes(self.mount))
        return max(0, left)

    def __str__(self) -> str:
        """Return the arithmetic in one line."""
        terms = f"{_gib(self.memory.num_bytes)} ({self.memory.source}) - {_gib(self.reserve_bytes)} reserve"
        if self.num_engines > 1:
            terms = f"({terms}) / {self.num_engines} engines"
        bound = ""
        if self.mount is not None:
            share = f" / {self.num_engines}" if self.num_engines > 1 else ""
            bound = (
                f", at most {MOUNT_PERCENT} % of {_gib(self.mount.num_bytes)} ({self.mount.source}){share}"
                f" = {_gib(self._mount_bytes(self.mount))}"
            )
        return f"{_gib(self.num_bytes)} = {terms} - {_gib(self.engine_bytes)} for the engine{bound}"

    def _mount_bytes(self, mount: MemorySize) -> int:
        return mount.num_bytes * MOUNT_PERCENT // 100 // self.num_engines


def find_auto_size(config: OffloadingConfig, mount: Path | None, root: Path = Path("/")) -> AutoSize:
    """Return the size that "auto" stands for on this machine.

    Args:
        config: the engine's configuration.
        mount: the mount of the region; None where rows are private memory.
        root: the folder that holds /proc and /sys.

    Raises:
        ConfigError: the kernel does not report its memory, or the engine not what it takes.
    """
    memory = find_memory_size(root)
    if memory is None:
        raise ConfigError(SETTING, "auto", "the kernel reports no memory size: give a size such as 8GiB")
    if config.engine_host_bytes is None:
        remedy = (
            "this engine does not report how much host memory it takes for itself: give a size such as 8GiB"
        )
        raise ConfigError(SETTING, "auto", remedy)
    found = None if mount is None else find_mount_size(mount)
    return AutoSize(memory, config.engine_host_bytes, config.engines_per_host, found)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
