"""Whether every worker has mapped the scheduler's own shared-memory region.

A stale or foreign file under the region's name would mean wrong bytes, so no transfer starts before each worker has
reported the scheduler's own identity of the region. A different identity keeps offloading off. Workers report in their
first step, and an engine makes its first step for its first request. So that request waits for the reports; otherwise
it would never find blocks of an earlier process.
"""

import logging
from collections.abc import Iterable

from kvtier.base import OffloadingSpec

logger = logging.getLogger(__name__)

MAX_AWAITED_STEPS = 100
"""Steps for which requests wait for the workers' reports, which come with the first one or two. Fewer could miss a
report that is late in a pipeline; more would hold requests for nothing when a worker never reports."""


class RegionHandshake:
    """Compares the workers' regions with the scheduler's. Used from one thread.

    Args:
        owner: maps the scheduler's region.
        identity: of that region.
        num_workers: workers that report.

    Attributes:
        is_open: whether transfers may start.
    """

    def __init__(self, owner: OffloadingSpec, identity: tuple[int, int], num_workers: int) -> None:
        self.is_open = False
        self._owner = owner
        self._identity = identity
        self._num_missing = num_workers
        self._is_refused = False
        self._num_steps = 0

    def answer(self) -> tuple[int | None, bool]:
        """Return the connector's answer to a search before it is open: ask again while reports are expected, or 0."""
        is_awaited = not self.is_open and not self._is_refused and self._num_steps < MAX_AWAITED_STEPS
        return None if is_awaited else 0, False

    def on_step(self) -> None:
        """Count a step in which the workers could report."""
        self._num_steps += 1

    def record(self, identities: Iterable[tuple[int, int]]) -> None:
        """Record the workers' identities; when all agree, open the connector and seal the region."""
        if self.is_open:
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
            "a worker mapped region (inode, random number) %s but the scheduler mapped %s: offloading stays off. "
            "Give each engine its own instance_id, and check that all its processes are on one machine and see the "
            "same /dev/shm",
            identity,
            self._identity,
        )


def make_handshake(spec: OffloadingSpec) -> RegionHandshake | None:
    """Return the handshake of the scheduler half; None when its spec has no region. Call it after ``get_manager``."""
    identity = spec.region_identity()
    return None if identity is None else RegionHandshake(spec, identity, spec.config.world_size)
