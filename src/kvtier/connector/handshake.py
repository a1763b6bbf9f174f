"""Whether every worker has mapped the scheduler's own shared-memory region.

It maps nothing. A stale or foreign file under the region's name would mean wrong bytes, so no transfer starts
before each worker has reported the identity that the scheduler has. One that differs keeps offloading off.
"""

import logging
from collections.abc import Iterable

from kvtier.base import OffloadingSpec
from kvtier.connector.protocols import RegionOwner

logger = logging.getLogger(__name__)


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
        self.is_open = self._identity is None

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
