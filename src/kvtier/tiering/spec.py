"""Builds both halves of tiered offloading: the shared region, the tiers and their manager, the handlers.

The scheduler's side maps the region without a rank and gives it to the secondary tiers; a worker's side maps the same
region with its rank and copies between it and the device. ``cpu/spec.py`` says how they agree on it.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from kvtier.config import LoadIf, OffloadingConfig
from kvtier.conflicts import PLACE_SETTINGS
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import ConfigError, MissingExtraError, PlaceError, TierError, describe_foreign
from kvtier.quantities import parse_bytes, size_in_words
from kvtier.redaction import redact
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.start_checks import LEFT_OUT

logger = logging.getLogger(__name__)

ROW_ALIGNMENT_BYTES = 4096
"""Rows begin on a page as soon as there is a secondary tier: direct I/O needs it, and every process of an
engine derives it from the configuration alone. Costs less than a page a row."""

INDEX_WAIT_S = 1.0
"""Seconds that the line of a tier waits until all tiers have counted what they held before the start. With zero it says
"0 blocks found so far" of any directory; more delays the start by a large one, whose blocks are found all the same."""

COUNTS = (".indexed_blocks", ".blocks")
"""Names of the numbers that say how many blocks a tier holds."""


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
        self._started: list[tuple[Mapping[str, object], SecondaryTierManager]] = []

    def describe_start(self) -> list[str]:
        end_s = time.monotonic() + INDEX_WAIT_S
        are_indexed = [_is_indexed(tier, end_s - time.monotonic()) for _, tier in self._started]
        numbers = self.get_manager().stats()
        return super().describe_start() + [
            describe_tier(position, entry, numbers, is_indexed=is_indexed)
            for position, ((entry, _), is_indexed) in enumerate(zip(self._started, are_indexed, strict=True))
        ]

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
                    logger.warning(LEFT_OUT, error)
                    continue
                _check_reachable(tiers[-1])
                self._started.append((entry, tiers[-1]))
        except BaseException:
            for tier in tiers:
                with suppress(Exception):  # the first error is raised, not one of a foreign tier's end
                    tier.shutdown(0.0)
            raise
        return tiers


def describe_tier(
    position: int, entry: Mapping[str, object], numbers: Mapping[str, float], *, is_indexed: bool
) -> str:
    """Return what an operator wants to know of a tier that has started. Pure.

    Args:
        position: its position in the order of lookups.
        entry: its settings, as the user wrote them; a password in them is not shown.
        numbers: the manager's, by dotted name.
        is_indexed: whether the tier has counted what it held before the start.
    """
    name = str(entry["type"])
    where = " ".join(str(redact(setting, entry[setting])) for setting in PLACE_SETTINGS if setting in entry)
    capacity = entry.get("capacity_bytes")
    size = (
        "no limit of its own" if capacity is None else f"at most {size_in_words(parse_bytes('', capacity))}"
    )
    prefix = f"tier.{position}."
    counts = (number for key, number in numbers.items() if key.startswith(prefix) and key.endswith(COUNTS))
    num_blocks = next(counts, None)
    if num_blocks is None:
        found = "its blocks are looked up there and not counted"
    else:
        found = f"{num_blocks:,.0f} blocks found" + ("" if is_indexed else " so far")
    return f"tier {position} {name}: {where + ', ' if where else ''}{size}, {found}"


def _is_indexed(tier: SecondaryTierManager, timeout_s: float) -> bool:
    with suppress(Exception):  # foreign: a line of the log is worth no start
        return tier.wait_indexed(max(0.0, timeout_s))
    return False


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
