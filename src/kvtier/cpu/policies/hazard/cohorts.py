"""The cohorts whose blocks wait to be named again, as columns that a fit reads at once.

It decides nothing. A cohort's class and time never change and stand in arrays; how many of its blocks are left changes
with every block that comes back, and stands in the cohort.
"""

from array import array
from collections.abc import Mapping
from itertools import compress
from operator import attrgetter

import numpy as np

from kvtier.cpu.policies.hazard.directory import Cohort
from kvtier.cpu.policies.hazard.model import Ints, Waits

MIN_COHORTS = 1024
"""Cohorts below which empty ones are not worth looking for."""

NUM_OF = attrgetter("num")


class CohortTable:
    """Cohorts in the order in which they were named, those without blocks until they are dropped."""

    def __init__(self) -> None:
        self._cohorts: list[Cohort] = []
        self._codes = array("q")
        self._times_s = array("d")
        self._max_cohorts = MIN_COHORTS

    def add(self, cohorts: Mapping[int, Cohort], time_s: float) -> None:
        """Add the cohorts of a request, by class."""
        self._cohorts += cohorts.values()
        self._codes.extend(cohorts)
        self._times_s.extend([time_s] * len(cohorts))

    @property
    def is_crowded(self) -> bool:
        """Whether there are twice as many as were left when the empty ones were dropped."""
        return len(self._cohorts) > self._max_cohorts

    def drop_empty(self) -> Ints:
        """Drop the cohorts without blocks; return how many blocks the others have."""
        nums = np.fromiter(map(NUM_OF, self._cohorts), np.int64, len(self._cohorts))
        has_blocks = nums > 0
        self._cohorts = list(compress(self._cohorts, has_blocks.tolist()))
        self._codes = array("q", np.array(self._codes)[has_blocks].tobytes())
        self._times_s = array("d", np.array(self._times_s)[has_blocks].tobytes())
        self._max_cohorts = 2 * len(self._cohorts) + MIN_COHORTS
        return nums[has_blocks]

    def take_stock(self, now_s: float) -> Waits:
        """Return how long the blocks of each cohort have waited by now; those without blocks are dropped."""
        nums = self.drop_empty()
        return Waits(np.array(self._codes), now_s - np.array(self._times_s), nums, np.zeros(len(nums)))

    def __len__(self) -> int:
        return len(self._cohorts)
