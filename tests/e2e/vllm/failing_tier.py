"""An fs tier of which every third load fails, under a name of its own."""

from kvtier.tiering.base import JobMetadata
from kvtier.tiering.factory import TIERS
from kvtier.tiering.fs import FSTier

TIER_NAME = "failing-fs"
FAIL_EVERY = 3


class FailingFSTier(FSTier):
    """Keeps blocks as the fs tier does, and raises at every third load instead of starting it."""

    num_loads = 0

    def submit_load(self, job: JobMetadata) -> None:
        """Start a load, or refuse it."""
        self.num_loads += 1
        if self.num_loads % FAIL_EVERY == 0:
            raise OSError(f"load {job.job_id} fails on purpose")
        super().submit_load(job)


def register() -> None:
    """Make the tier known to configurations of this process."""
    if TIER_NAME not in TIERS:
        TIERS.register(TIER_NAME, f"{__name__}:FailingFSTier")
