"""Keeps what a tier's blobs take below a capacity, by deleting the oldest of a listing.

It knows no key and no job. A pass lists every blob and deletes our own from the oldest on until an
eighth of the capacity is free; at most that much is written from the beginning of one pass to the end of the next,
and stores beyond it are declined. What was still being written when a pass began may be missing in its listing, so it
counts until the next one. One writer therefore never exceeds the capacity, and each further one by an eighth at most;
only a write that failed here and took effect later may be missing in the count.

Instances do not talk and do not fight: each deletes a beginning of the same order, age and then name, down to the
same mark, so that two passes at once delete what one would, but for blobs of the last second that only one of them
has listed: stores tell ages in seconds. Where uses leave no trace, the order is that of writing.

Where tenants have quotas, the oldest blobs of those beyond theirs leave first. Without a capacity quotas are bounds:
a pass deletes what is beyond them, and is due when a tenant has written an eighth of its own. Where blobs have a time
to live, those that are over leave whatever the capacity, and a pass is due every eighth of that time.
"""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from kvtier.base import OffloadKey
from kvtier.errors import TierError, describe_foreign
from kvtier.namespace import Namespace
from kvtier.tiering.kit.backend import Counters
from kvtier.tiering.kit.blobs.contract import BlobKind, BlobNames, Blobs, Listed
from kvtier.tiering.kit.blobs.quotas import BlobQuotas
from kvtier.tiering.kit.lifetime import Lifetime
from kvtier.tiering.kit.quota_counts import MAX_VICTIMS

logger = logging.getLogger(__name__)

FREE_SHARE = 8
"""A pass leaves this part of the capacity free. A smaller part lists more often; a larger one keeps less."""

PAGE_BLOBS = 1000
"""Blobs deleted between two looks at whether the tier shuts down."""

MIN_PASS_S = 60.0
MAX_PASS_S = 3600.0
"""Bounds of the pause between two passes that delete what is over, an eighth of the time to live within them. A pass
lists every blob, which costs requests; lookups and loads need none."""

PASSES_PER_LIFETIME = 8

RETRY_S = 5.0
"""Seconds until a pass that failed is tried again; meanwhile stores may be declined."""

PAUSE_FACTOR = 10
"""After a pass for quotas alone the next waits this many times as long as it took: a large bucket is not listed all the
time."""

LOOK_S = 60.0
"""Seconds between two looks at whether a pass for quotas is due by the age of the last one alone."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the deleting thread is waited for. It touches no row: nothing depends on its end."""


class Evictor:
    """Counts what is written and deletes the oldest blobs in a thread of its own, begun by the first store.

    Mutable are two counts, the thread and three flags. ``_changed`` guards them; the backend is called outside it.

    Args:
        tier: type of the tier, for messages.
        blobs: the backend.
        capacity_bytes: the most that blobs may take.
        counters: where evictions are counted.
        lifetime: how long blobs live; None: they have no time to live, or the backend keeps it.
        quotas: which of the others go before those that are oldest; None: tenants have no quotas here.
        wall_clock: seconds since 1970; the backend's own clock may differ by some minutes.
    """

    def __init__(
        self,
        tier: str,
        blobs: Blobs,
        capacity_bytes: int,
        counters: Counters,
        lifetime: Lifetime | None = None,
        quotas: BlobQuotas | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._tier = tier
        self._blobs = blobs
        self._lifetime = lifetime
        self._quotas = quotas
        self._wall_clock = wall_clock
        self._allowance_bytes = capacity_bytes // FREE_SHARE
        self._mark_bytes = capacity_bytes - self._allowance_bytes
        self._counters = counters
        self._changed = threading.Condition()
        # Admitted since the last pass began, or under way then; of these, the bytes whose write has ended.
        self._written_bytes = self._ended_bytes = 0
        self._is_pass_due = False
        self._is_failing = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pass_s: float | None = None if quotas is None else LOOK_S
        if lifetime is not None:
            self._pass_s = min(MAX_PASS_S, max(MIN_PASS_S, lifetime.ttl_s / PASSES_PER_LIFETIME))

    def admit(self, num_bytes: int) -> bool:
        """Count bytes that are about to be written; False when they must not be. ``end_write`` follows."""
        with self._changed:
            written_bytes = self._written_bytes + num_bytes
            has_room = written_bytes <= self._allowance_bytes
            if has_room:
                self._written_bytes = written_bytes
            if self._thread is None or written_bytes > self._allowance_bytes // 2:
                self._request_pass()
            return has_room

    def check(self) -> None:
        """List the beginning of what is there once, where tenants have quotas.

        Raises:
            TierError: it cannot be listed, so quotas cannot be kept.
        """
        if self._quotas is None:
            return
        try:
            next(iter(self._blobs.list_all()), None)
        except TierError as error:
            remedy = "let the user list it, or leave the tier out of quota_bytes"
            raise TierError(self._tier, f"quota_bytes cannot be kept ({error}): {remedy}") from None

    def on_opened(self, namespace: Namespace) -> None:
        """Read the tenants in the names of this namespace from now on, where they are encrypted."""
        if self._quotas is not None:
            self._quotas.names.on_opened(namespace)

    def on_stored(self, keys: Iterable[OffloadKey], block_bytes: int) -> None:
        """Count blocks that were written for their tenants, where these have quotas."""
        if self._quotas is None:
            return
        self._quotas.on_stored(keys, block_bytes)
        if self._quotas.is_due:
            with self._changed:
                self._request_pass()

    def end_write(self, num_bytes: int, *, has_written: bool) -> None:
        """Note that the write of admitted bytes has ended.

        Args:
            num_bytes: as they were admitted.
            has_written: False when nothing was written for certain.
        """
        with self._changed:
            if has_written:
                self._ended_bytes += num_bytes
            else:
                self._written_bytes -= num_bytes

    def close(self) -> None:
        """End the thread, or at least its deleting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def stats(self) -> dict[str, float]:
        """Return what tenants keep, where they have quotas."""
        return {} if self._quotas is None else self._quotas.stats()

    def _request_pass(self) -> None:
        self._is_pass_due = True
        self._start_thread()
        self._changed.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None and not self._is_closed:
            name = f"kvtier-{self._tier}-capacity"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while self._wait_due():
            begun_s = time.monotonic()
            try:
                self._run_pass()
            except TierError as error:
                self._note_failed(str(error))
            except Exception as error:  # noqa: BLE001  # thread top
                # Not its text: the client's quotes requests, and a request may carry a key.
                self._note_failed(describe_foreign(error))
            else:
                self._note_passed()
            if self._quotas is not None and self._quotas.is_bound:
                pause_s = PAUSE_FACTOR * (time.monotonic() - begun_s)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, pause_s)

    def _wait_due(self) -> bool:
        with self._changed:
            while not self._changed.wait_for(lambda: self._is_pass_due or self._is_closed, self._pass_s):
                if self._lifetime is not None or (self._quotas is not None and self._quotas.is_due):
                    break
            self._is_pass_due = False
            return not self._is_closed

    def _note_failed(self, reason: str) -> None:
        is_bound = self._quotas is not None and self._quotas.is_bound
        effect = (
            "quota_bytes cannot be kept" if is_bound else "capacity_bytes cannot be kept, stores are declined"
        )
        with self._changed:
            was_failing, self._is_failing = self._is_failing, True
        if not was_failing:
            logger.warning("tier %s: %s for now: %s", self._tier, effect, reason)
        self._counters.add(failed_passes=1)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, RETRY_S)
            self._is_pass_due = True

    def _note_passed(self) -> None:
        with self._changed:
            was_failing, self._is_failing = self._is_failing, False
        if was_failing:
            logger.warning("tier %s: what is there can be listed and deleted again", self._tier)

    def _run_pass(self) -> None:
        with self._changed:
            seen_bytes = self._ended_bytes
        while not self._run_round():
            pass
        if self._quotas is not None and not self._is_closed:
            self._quotas.end_pass()
        with self._changed:
            self._written_bytes -= seen_bytes
            self._ended_bytes -= seen_bytes

    def _run_round(self) -> bool:
        """Delete the oldest; return whether the mark is reached or nothing is left to do.

        Raises:
            TierError: more has to leave than one round takes, and this one has freed nothing.
        """
        listing = OwnListing(self._blobs.list_all(), self._blobs.names)
        counted = listing if self._quotas is None else self._quotas.counted(listing)
        oldest = heapq.nsmallest(MAX_VICTIMS, counted)
        excess_bytes = listing.total_bytes - self._mark_bytes
        # From the oldest on: those from a future that a clock was set back from leave by the capacity.
        over = [] if self._lifetime is None else list(takewhile(self._is_over, oldest))
        if self._quotas is None:
            victims = max(plan_victims(oldest, excess_bytes), over, key=len)
            is_all = len(victims) < MAX_VICTIMS
        else:
            victims, is_all = self._quotas.plan(oldest, over, excess_bytes, self._list_own)
        num_removed = 0
        for begin in range(0, len(victims), PAGE_BLOBS):
            if self._is_closed:
                return True
            page = victims[begin : begin + PAGE_BLOBS]
            # One that was over may have been written anew since it was listed.
            removed = frozenset(
                self._blobs.remove(
                    [victim.name for victim in page], {victim.name: victim.used_s for victim in page}
                )
            )
            page = [victim for victim in page if victim.name in removed]
            num_removed += len(page)
            if self._quotas is not None:
                self._quotas.on_removed(page)
            self._counters.add(evicted=len(page), evicted_bytes=sum(victim.num_bytes for victim in page))
        if not (is_all or num_removed):
            raise TierError(self._tier, f"none of {len(victims)} blobs could be removed")
        return is_all

    def _list_own(self) -> Iterable[Listed]:
        return OwnListing(self._blobs.list_all(), self._blobs.names)

    def _is_over(self, listed: Listed) -> bool:
        return self._lifetime is not None and self._lifetime.is_over(listed.used_s, self._wall_clock())


class OwnListing:
    """Our own blobs of a listing, passed on one by one, and how much they take together.

    Args:
        listing: every blob.
        names: tells which are ours.
    """

    def __init__(self, listing: Iterable[Listed], names: BlobNames) -> None:
        self._listing = listing
        self._names = names
        self.total_bytes = 0

    def __iter__(self) -> Iterator[Listed]:
        for listed in self._listing:
            parsed = self._names.parse(listed.name)
            if parsed is not None and parsed.kind in (BlobKind.BLOCK, BlobKind.EARLIER):
                self.total_bytes += listed.num_bytes
                yield listed


def plan_victims(oldest: Iterable[Listed], excess_bytes: int) -> list[Listed]:
    """Return the first of ``oldest`` that together take ``excess_bytes``. Pure."""
    victims = []
    for listed in oldest:
        if excess_bytes <= 0:
            break
        excess_bytes -= listed.num_bytes
        victims.append(listed)
    return victims
