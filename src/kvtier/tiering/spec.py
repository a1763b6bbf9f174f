"""Builds both halves of tiered offloading: the shared region, the tiers and their manager, the handlers.

The scheduler's side maps the region without a rank and gives it to the secondary tiers; a worker's side maps the same
region with its rank and copies between it and the device. ``cpu/spec.py`` says how they agree on it.
"""

import logging
from contextlib import suppress
from typing import ClassVar

from kvtier.config import LoadIf, OffloadingConfig
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import ConfigError, MissingExtraError, PlaceError, TierError, describe_foreign
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.manager import TieringOffloadingManager

logger = logging.getLogger(__name__)

ROW_ALIGNMENT_BYTES = 4096
"""Rows begin on a page as soon as there is a secondary tier: direct I/O needs it, and every process of an
engine derives it from the configuration alone. Costs less than a page a row."""


class TieringOffloadingSpec(CPUOffloadingSpec):
    """Offloading to host memory and on to secondary tiers. One half of it is built in each process, or object.

    Args:
        config: what the engine said of itself; its ``secondary_tiers`` is a list of tiers.

    Raises:
        ConfigError: ``secondary_tiers`` is not a list, or a size cannot work.
    """

    row_alignment_bytes: ClassVar[int] = ROW_ALIGNMENT_BYTES
    needs_region: ClassVar[bool] = True

    def __init__(self, config: OffloadingConfig) -> None:
        if "secondary_tiers" not in config.extra_config:
            raise ConfigError("secondary_tiers", None, 'must be a list such as [{"type": "fs", ...}]')
        super().__init__(config)

    def build_manager(self, region: SharedOffloadRegion | None) -> TieringOffloadingManager:
        assert region is not None, "this spec needs a region"
        primary = CPUPrimaryTierOffloadingManager(
            self.num_blocks,
            region,
            self.eviction_policy,
            self.config.enable_events,
            self.store_threshold,
            self.max_tracker_size,
            ttl_s=self.config.settings.ttl_s,
            tenants=self.tenants,
        )
        return TieringOffloadingManager(
            primary,
            self._make_tiers(primary.get_kv_memoryview()),
            self.config.enable_events,
            lookup_deadline_s=self.config.settings.lookup_deadline_s,
            measures_loads=self.config.settings.load_if is LoadIf.FASTER,
        )

    def _make_tiers(self, primary_kv_view: memoryview) -> list[SecondaryTierManager]:
        """Build every tier that can start; one that cannot and is not required is left out.

        A tier whose backend is unreachable starts, unless it is required: the backend may come back.
        """
        tiers: list[SecondaryTierManager] = []
        try:
            for entry in self.config.settings.secondary_tiers:
                try:
                    tiers.append(create_secondary_tier(entry, primary_kv_view, self.config))
                except (TierError, PlaceError, MissingExtraError) as error:
                    if entry.get("required"):
                        raise
                    logger.warning("secondary tier left out, the engine starts without it: %s", error)
                    continue
                _check_reachable(tiers[-1])
        except BaseException:
            for tier in tiers:
                with suppress(Exception):  # the first error is raised, not one of a foreign tier's end
                    tier.shutdown(0.0)
            raise
        return tiers


def _check_reachable(tier: SecondaryTierManager) -> None:
    """Check that a tier's backend can be reached; the tier logs its own errors, what else it raises is logged here.

    Raises:
        TierError: it cannot, and the tier is required.
    """
    try:
        tier.check_reachable()
    except TierError:
        if tier.settings.required:
            raise
    except Exception as error:  # noqa: BLE001  # foreign: whatever it raises, the tier is away
        failure = TierError(tier.get_tier_type(), f"cannot be reached: {describe_foreign(error)}")
        if tier.settings.required:
            raise failure from None
        logger.warning("%s (until it answers its blocks are misses)", failure)
