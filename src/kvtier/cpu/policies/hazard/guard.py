"""Which of two policies to follow: whichever found more of the recent requests' blocks.

It knows neither; what they hold is kept by shadows. The counts fade, so that old merits are forgotten.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.base import OffloadKey

WINDOW_REQUESTS = 1000
"""Requests after which a hit counts 1/e. A shorter window follows luck, a longer one clings to what works no more."""


class Guard:
    """Two faded counts of hits.

    Attributes:
        num_lru_hits: blocks that LRU would have found.
        num_hazard_hits: blocks that the hazard policy would have found.
    """

    def __init__(self) -> None:
        self.num_lru_hits = self.num_hazard_hits = 0.0

    @property
    def prefers_hazard(self) -> bool:
        """Whether the hazard policy is ahead; LRU is followed until then."""
        return self.num_hazard_hits > self.num_lru_hits

    def count(self, num_lru_hits: int, num_hazard_hits: int) -> None:
        """Count the hits of one request."""
        kept = 1 - 1 / WINDOW_REQUESTS
        self.num_lru_hits = kept * self.num_lru_hits + num_lru_hits
        self.num_hazard_hits = kept * self.num_hazard_hits + num_hazard_hits


class LRUShadow:
    """What LRU would hold, the tail of a prefix leaving before its head: keys alone.

    Args:
        num_blocks: its capacity.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[OffloadKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def serve(self, keys: Sequence[OffloadKey]) -> int:
        """Serve a request of distinct ``keys``, head first; return the length of its held prefix before it."""
        held = self._held
        num_hits = next((number for number, key in enumerate(keys) if key not in held), len(keys))
        self.renew(islice(reversed(keys), max(0, len(keys) - self._num_blocks), None))
        return num_hits

    def renew(self, keys: Iterable[OffloadKey]) -> None:
        """Make ``keys`` the most recent, the last of them most, held before or not."""
        held = self._held
        for key in keys:
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
        while len(held) > self._num_blocks:
            held.popitem(last=False)
