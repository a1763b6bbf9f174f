"""Whether every worker has mapped the scheduler's own shared-memory region.

It maps nothing. A stale or foreign file under the region's name would mean wrong bytes, so no transfer starts
before each worker has reported the identity that the scheduler has. One that differs keeps offloading off.
Workers report in their first step, and an engine makes its first step for its first request: so that one waits for
the answer, or it would never find what an earlier process has stored.
"""

import logging
from collections.abc import Iterable

from kvtier.base import OffloadingSpec
from kvtier.connector.protocols import RegionOwner

logger = logging.getLogger(__name__)

MAX_AWAITED_STEPS = 100
"""Steps for which requests wait for the workers' reports, which come with the first one or two. Fewer could miss a
report that is late in a pipeline; more would hold requests for nothing when a worker never reports."""


class RegionHandshake:
    """Compares the workers' regions with the scheduler's; open at once where there is no region.

    Args:
        spec: the scheduler's spec, whose manager has been built.

    Attributes:
        is_open: whether transfers may start.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        self._owner = spec if isinstance(spec, RegionOwner) else None
        self._identity = region_identity_of(spec)
        self._num_missing = spec.config.world_size
        self._is_refused = False
        self._num_steps = 0
        self.is_open = self._identity is None

    @property
    def is_awaited(self) -> bool:
        """Whether reports are missing and still to be expected."""
        return not self.is_open and not self._is_refused and self._num_steps < MAX_AWAITED_STEPS

    def on_step(self) -> None:
        """Count a step in which the workers could report."""
        self._num_steps += 1

    def record(self, identities: Iterable[tuple[int, int]]) -> None:
        """Take what workers reported; the last one that agrees opens the connector and seals the region."""
        if self.is_open or self._owner is None:
            return
        for identity in identities:
            self._num_missing -= 1
            if identity != self._identity:
                self._refuse(identity)
        if self._num_missing == 0 and not self._is_refused:
            self._owner.seal_region()
            self.is_open = True

    def _refuse(self, identity: tuple[int, int]) -> None:
        self._is_refused = True
        logger.error(
            "a worker mapped region (device, inode) %s but the scheduler mapped %s: offloading stays off. "
            "Give each engine its own instance_id, and check that all its processes see the same /dev/shm",
            identity,
            self._identity,
        )


def region_identity_of(spec: OffloadingSpec) -> tuple[int, int] | None:
    """Return the identity of the region that ``spec`` has mapped in this process, or None without one."""
    return spec.region_identity() if isinstance(spec, RegionOwner) else None
