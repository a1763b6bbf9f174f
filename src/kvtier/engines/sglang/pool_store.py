"""The pages of one host pool in one tier: looked up, stored and loaded by threads of SGLang's that wait.

Whatever goes wrong costs the pages that it concerns: the answer is False for them. A tier that fails again and again is
left alone for a while, so that SGLang's threads do not wait for each of its time-outs.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvtier.base import OffloadKey, make_offload_key
from kvtier.engines.sglang.pages import HostPool, Item, Pages, first_slots, is_plain
from kvtier.errors import TierError, describe_foreign
from kvtier.histogram import HistogramSnapshot
from kvtier.tiering.base import PurgeOutcome
from kvtier.tiering.breaker import CircuitBreaker
from kvtier.tiering.kit.threaded_tier import ThreadedTier

logger = logging.getLogger(__name__)

PAGE_HASH = re.compile(r"[0-9a-f]{64}")
"""The keys that SGLang makes. Others are named by their own digest, so that any text is a key."""

SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds for which the tier's threads are waited for at the end, as long as a job may take by default."""

PURGE_CHECK_S = 0.01
"""Seconds between two looks whether a purge has ended; it takes as long as the backend needs for all blocks."""

COUNTER_NAMES = ("lookups", "found", "hits", "stored_pages", "failed_loads", "failed_stores")


class PoolStore:
    """One pool's pages behind one tier.

    Mutable are the breaker, the counts, the number of calls under way and whether none may come. ``_changed`` guards
    them; no call of the tier is made under it.

    Args:
        name: of the pool.
        pool: SGLang's host pool; None where pages come as tensors only.
        pages: its pages as rows.
        tier: built on these rows.
        clock: seconds, monotonic.

    Attributes:
        name: as given.
        page_bytes: bytes of one page.
        tier_type: name of the kind of tier.
    """

    def __init__(
        self,
        name: str,
        pool: HostPool | None,
        pages: Pages,
        tier: ThreadedTier[Any],  # Any: of whatever namespace
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.page_bytes = pages.page_bytes
        self.tier_type = tier.get_tier_type()
        self._pool = pool
        self._pages = pages
        self._tier = tier
        self._changed = threading.Condition()
        self._breaker = CircuitBreaker(clock)
        self._counts = dict.fromkeys(COUNTER_NAMES, 0)
        self._num_calls = 0
        self._is_clearing = False
        self._is_closed = False

    def find_held(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its page is held, whole. Blocks."""
        names = [name_page(key) for key in keys]
        wanted = [key for name in names if name is not None for key in self._block_keys(name)]
        with self._call() as owner:
            if owner is None or not wanted:
                return [False] * len(keys)
            held = frozenset(self._tier.direct.find_held(wanted))
            self._report_lookup(owner)
        found = [name is not None and held.issuperset(self._block_keys(name)) for name in names]
        self._count(lookups=len(keys), found=sum(found))
        return found

    def store(self, keys: Sequence[str], indices: object) -> list[bool]:
        """Write pages of the pool; return for each whether it is held now. Blocks.

        Args:
            keys: of the pages.
            indices: tensor of slots, ``page_size`` for each page.
        """
        return self._move_slots(keys, indices, is_store=True)

    def load(self, keys: Sequence[str], indices: object) -> list[bool]:
        """Read pages into the pool; return for each whether its bytes are there. Blocks. Arguments as of ``store``."""
        return self._move_slots(keys, indices, is_store=False)

    def store_values(self, keys: Sequence[str], values: Sequence[object]) -> list[bool]:
        """Write tensors with the bytes of a page each; return for each whether it is held now. Blocks."""
        return self._move(keys, [self._check_value(value) for value in values], is_store=True)

    def load_values(self, keys: Sequence[str], targets: Sequence[object]) -> list[bool]:
        """Read pages into tensors; return for each whether its bytes are there. Blocks."""
        checked = (self._check_value(target) for target in targets)
        items = [item if item is not None and item.is_contiguous() else None for item in checked]
        return self._move(keys, items, is_store=False)

    def clear(self) -> bool:
        """Remove every page of this pool and rank, also those of earlier starts; return whether that worked. Blocks.

        Calls that come meanwhile answer False.
        """
        with self._changed:
            if self._is_closed or self._is_clearing:
                return False
            self._is_clearing = True
            self._changed.wait_for(lambda: self._num_calls == 0)
        try:
            outcome = self._purge()
        finally:
            with self._changed:
                self._is_clearing = False
        if outcome.error:
            logger.warning("tier %s: %s is not cleared: %s", self.tier_type, self.name, outcome.error)
        return not outcome.error

    def close(self) -> bool:
        """End the tier once the calls under way have; return whether no thread uses the pool any more."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._num_calls == 0, SHUTDOWN_TIMEOUT_S)
        return self._tier.shutdown(SHUTDOWN_TIMEOUT_S)

    def stats(self) -> dict[str, float]:
        """Return counts and gauges by name. Thread: any."""
        with self._changed:
            own = {**self._counts, "breaker_openings": self._breaker.num_openings}
            is_open = not self._breaker.is_closed
        return {**self._tier.stats(), **own, "breaker_open": float(is_open)}

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return histograms by name. Thread: any."""
        return self._tier.histograms()

    def _move_slots(self, keys: Sequence[str], indices: object, *, is_store: bool) -> list[bool]:
        if self._pool is None:
            return [False] * len(keys)
        return self._move(keys, first_slots(self._pool, indices, len(keys)), is_store=is_store)

    def _move(self, keys: Sequence[str], items: Sequence[Item | None], *, is_store: bool) -> list[bool]:
        """Move pages and return for each whether it worked; pages that are None, or have no key, are left out."""
        answers = [False] * len(keys)
        named = zip(map(name_page, keys), items, strict=False)
        left = [
            (number, name, item)
            for number, (name, item) in enumerate(named)
            if name is not None and item is not None
        ]
        while left:
            batch = _distinct(left)
            taken = {number for number, _, _ in batch}
            left = [entry for entry in left if entry[0] not in taken]
            while batch:
                moved = self._move_batch(batch, is_store=is_store)
                for (number, _, _), has_worked in zip(batch, moved, strict=False):
                    answers[number] = has_worked
                batch = batch[len(moved) :]
        num_moved = sum(answers)
        if is_store:
            self._count(stored_pages=num_moved, failed_stores=len(keys) - num_moved)
        else:
            self._count(hits=num_moved, failed_loads=len(keys) - num_moved)
        return answers

    def _move_batch(self, batch: "Sequence[_Entry]", *, is_store: bool) -> list[bool]:
        """Move the first pages of a batch, as many as rows are lent for; all of it where the tier is left alone."""
        with self._call() as owner:
            if owner is None:
                return [False] * len(batch)
            try:
                with self._pages.lend([item for _, _, item in batch], is_store=is_store) as lent:
                    keys = [self._block_keys(name) for (_, name, _), _ in zip(batch, lent, strict=False)]
                    held = self._run(owner, keys, lent, is_store=is_store)
                    moved = [held.issuperset(own) for own in keys]
                    if not is_store:
                        for (_, _, item), rows, has_worked in zip(batch, lent, moved, strict=False):
                            if has_worked:
                                self._pages.take(item, rows[0])
            except Exception as error:  # noqa: BLE001 # foreign: the pool's own code; it costs these pages
                logger.warning(
                    "pool %s: pages are neither stored nor loaded: %s", self.name, describe_foreign(error)
                )
                return [False] * len(batch)
        return moved

    def _run(
        self,
        owner: object,
        keys: Sequence[Sequence[OffloadKey]],
        rows: Sequence[Sequence[int]],
        *,
        is_store: bool,
    ) -> frozenset[OffloadKey]:
        """Run one job of the tier and return the blocks that arrived."""
        direct = self._tier.direct
        all_keys = [key for own in keys for key in own]
        all_rows = [row for own in rows for row in own]
        try:
            result = (direct.store if is_store else direct.load)(all_keys, all_rows)
        except TierError as error:
            logger.warning("%s", error)
            with self._changed:
                self._breaker.record_failure(owner)
            return frozenset()
        arrived = frozenset(all_keys) if result.success else result.successful_keys or frozenset()
        with self._changed:
            if result.is_fault and not arrived and not result.success:
                self._breaker.record_failure(owner)
            else:
                self._breaker.record_success(owner)
        return arrived

    def _purge(self) -> PurgeOutcome:
        found: PurgeOutcome | int | None = self._tier.purge()
        while not isinstance(found, PurgeOutcome):
            time.sleep(PURGE_CHECK_S)
            found = self._tier.poll_purge()
        return found

    def _report_lookup(self, owner: object) -> None:
        num_unanswered = self._tier.drain_unanswered()
        with self._changed:
            if num_unanswered:
                self._breaker.record_failure(owner)
            else:
                self._breaker.record_success(owner)

    @contextmanager
    def _call(self) -> Iterator[object | None]:
        """Count a call of the tier; yield its owner for the breaker, None where no call may be made now."""
        owner = object()
        with self._changed:
            may_call = not (self._is_closed or self._is_clearing) and self._breaker.begin(owner)
            self._num_calls += may_call
        try:
            yield owner if may_call else None
        finally:
            if may_call:
                with self._changed:
                    self._num_calls -= 1
                    self._changed.notify_all()

    def _count(self, **amounts: int) -> None:
        with self._changed:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def _block_keys(self, name: bytes) -> list[OffloadKey]:
        return [make_offload_key(name, piece) for piece in range(self._pages.num_pieces)]

    def _check_value(self, value: object) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not is_plain(value):
            return None
        return value if value.nbytes == self.page_bytes else None


_Entry = tuple[int, bytes, Item]
"""Number of a page in its call, name and place."""


def name_page(key: object) -> bytes | None:
    """Return the 32 bytes that name a page in its pool; None for what is no key. Pure."""
    if not isinstance(key, str) or not key:
        return None
    if PAGE_HASH.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _distinct(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return the first entries of each name and place: what a job does twice has no answer of its own. Pure."""
    names: set[bytes] = set()
    places: set[Item] = set()
    chosen = []
    for entry in entries:
        _, name, item = entry
        place: Item = item if isinstance(item, int) else id(item)
        if name in names or place in places:
            continue
        names.add(name)
        places.add(place)
        chosen.append(entry)
    return chosen
