"""Why a block that the tiering manager was asked for is missing, and how many blocks were lost.

Each tier has a memory of what it lost, refused or failed to deliver. The manager asks in one order, the most certain
first: what is on its way, what this request could not get, a tier that is down, what a tier remembers, what host memory
remembers, and a sibling namespace last.

A block is lost to a tier when the tier was to get it and never will. What an operator or a setting keeps from a tier (a
purge, an admission, a time to live) is not lost. Losses are counted in blocks and reported in the log.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

from kvtier.base import OffloadKey
from kvtier.departed import MIN_REMEMBERED_BLOCKS, DepartedBlocks
from kvtier.misses import Miss, MissCause, NotStored, not_stored

logger = logging.getLogger(__name__)

MAX_NO_ROOM = 4096
"""Requests remembered for which host memory had no room. An engine ends its requests; beyond it none is added."""


WARNING_PERIOD_S = 60.0
"""Seconds from one warning of lost blocks to the next. More delays the warning; less fills the log where a tier is too
slow for its engine."""


class TierDeparture(IntEnum):
    """Why a block is not in a tier, as the orchestrator learns it; positions in the kinds of ``make_departures``."""

    EVICTED = 0
    DECLINED = 1
    ADMISSION = 2
    REUSE_FILTER = 3
    JOB_FAILED = 4
    NO_ROOM = 5
    LOAD_FAILED = 6
    PURGED = 7


def make_departures(tier: str, capacity_blocks: int | None, clock: Callable[[], float]) -> DepartedBlocks:
    """Return an empty memory of the blocks of one tier.

    Args:
        tier: its type.
        capacity_blocks: the most blocks that it can hold; None when it cannot say.
        clock: seconds, monotonic.
    """
    kinds = (
        Miss(MissCause.EVICTED, tier),
        not_stored(NotStored.DECLINED, tier),
        not_stored(NotStored.ADMISSION, tier),
        not_stored(NotStored.REUSE_FILTER, tier),
        not_stored(NotStored.JOB_FAILED, tier),
        not_stored(NotStored.NO_ROOM, tier),
        Miss(MissCause.LOAD_FAILED, tier),
        Miss(MissCause.PURGED, tier),
    )
    return DepartedBlocks(max(capacity_blocks or 0, MIN_REMEMBERED_BLOCKS), clock, kinds)


LOSSES = MappingProxyType(
    {
        TierDeparture.DECLINED: (
            "{num} left host memory before tier {tier} had them: {remedy}",
            'raise cpu_bytes_to_use or the tier\'s max_in_flight_store_bytes, or set its cascade to "must_write"',
        ),
        TierDeparture.JOB_FAILED: (
            "tier {tier} failed to write {num}: {remedy}",
            "the lines about this tier in the log name the error",
        ),
        TierDeparture.NO_ROOM: (
            "tier {tier} did not take {num}: {remedy}",
            "it has no room, so give it more capacity or free its disk; or another reason, which the log says",
        ),
    }
)
"""How a tier loses blocks, each with what to do about it."""

LEFT_OUT_REMEDY = "it was left out, and the lines about it in the log name its failure"
"""In place of the remedy of blocks that left before a tier had them, where host memory keeps blocks for the tier."""


class TierLosses:
    """The blocks that one tier was to get from host memory and never will.

    Args:
        tier: its type.
        departed: its memory of why blocks are missing.
        is_kept_for: whether host memory keeps blocks until the tier has them.

    Attributes:
        num_blocks: how many blocks were lost; only grows.
        num_by_reason: the same by reason.
    """

    def __init__(self, tier: str, departed: DepartedBlocks, *, is_kept_for: bool) -> None:
        self.num_blocks = 0
        self.num_by_reason: Counter[TierDeparture] = Counter()
        self._tier = tier
        self._departed = departed
        self._is_kept_for = is_kept_for

    def add(self, keys: Sequence[OffloadKey], why: TierDeparture) -> None:
        """Count ``keys`` as lost, and remember why."""
        if keys:
            self._departed.add(keys, why)
            self.num_by_reason[why] += len(keys)
            self.num_blocks += len(keys)

    def describe(self, said: Mapping[TierDeparture, int]) -> list[str]:
        """Return a sentence for each reason about the blocks that were lost beyond those in ``said``."""
        sentences = []
        for why, (text, usual_remedy) in LOSSES.items():
            num = self.num_by_reason[why] - said.get(why, 0)
            is_left_out = why is TierDeparture.DECLINED and self._is_kept_for
            remedy = LEFT_OUT_REMEDY if is_left_out else usual_remedy
            if num:
                sentences.append(text.format(num=num, tier=repr(self._tier), remedy=remedy))
        return sentences


class LossReport:
    """Reports lost blocks: in the log, at most once in WARNING_PERIOD_S, and to the caller of a drain.

    Args:
        tiers: the losses of each tier.
        clock: seconds, monotonic.

    Attributes:
        num_without_room: blocks of ended requests for which host memory had no room; the manager adds to it.
        num_said: blocks that the log has told of.
    """

    def __init__(self, tiers: Sequence[TierLosses], clock: Callable[[], float]) -> None:
        self.num_without_room = 0
        self._tiers = tuple(tiers)
        self._clock = clock
        self._num_drained = 0
        self.num_said = 0
        self._said = [Counter(tier.num_by_reason) for tier in tiers]
        self._said_without_room = 0
        self._next_s = clock()

    @property
    def num_blocks(self) -> int:
        """Blocks lost since the start."""
        return self.num_without_room + sum(tier.num_blocks for tier in self._tiers)

    def take_drained(self) -> int:
        """Return how many blocks were lost since the last call."""
        num_new, self._num_drained = self.num_blocks - self._num_drained, self.num_blocks
        return num_new

    def warn(self, *, is_last: bool = False) -> None:
        """Log the losses since the last warning, if there are any and it is long enough ago, or this is the last."""
        num_blocks = self.num_blocks
        if num_blocks == self.num_said or not (is_last or self._clock() >= self._next_s):
            return
        sentences = [
            sentence
            for tier, said in zip(self._tiers, self._said, strict=True)
            for sentence in tier.describe(said)
        ]
        num_without_room = self.num_without_room - self._said_without_room
        if num_without_room:
            sentences.append(f"host memory had no room for {num_without_room}: raise cpu_bytes_to_use")
        num_new = num_blocks - self.num_said
        logger.warning(
            "%d computed blocks will not reach a tier, %d since the start: %s",
            num_new,
            num_blocks,
            "; ".join(sentences),
        )
        self.num_said, self._said_without_room = num_blocks, self.num_without_room
        self._said = [Counter(tier.num_by_reason) for tier in self._tiers]
        self._next_s = self._clock() + WARNING_PERIOD_S


def down(tier: str, reason: str) -> Miss:
    """Return the miss of a block that a tier might hold which cannot be used now. Pure."""
    return Miss(MissCause.TIER_DOWN, tier, MappingProxyType({"reason": reason}))


def being_purged(tier: str) -> Miss:
    """Return the miss of a block of a tier that is just being purged. Pure."""
    return Miss(MissCause.PURGED, tier, MappingProxyType({"reason": "a purge is under way"}))
