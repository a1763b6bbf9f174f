"""An offloading spec on a machine whose memory a test chose, so that "auto" takes a few megabytes of the real one's.

The folder with the machine's files travels in an environment variable: the scheduler's process and each worker's
process read it on their own, as they would read /proc.
"""

import os
from pathlib import Path

from kvtier.tiering.spec import TieringOffloadingSpec

ENVIRONMENT_NAME = "KVTIER_TEST_MACHINE"


class SmallMachineSpec(TieringOffloadingSpec):
    """Tiered offloading on that machine."""

    system_root = Path(os.environ.get(ENVIRONMENT_NAME, "/"))


def write_machine(root: Path, memory_bytes: int) -> None:
    """Write the files of a machine with so much memory, and the folder of its shared-memory mount."""
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {memory_bytes // 1024} kB\n")
    (root / "dev/shm").mkdir(parents=True)
