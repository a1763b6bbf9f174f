"""Keeps tenants within their quotas in a place that has no capacity of its own: a server, a bucket.

There a quota is a bound: nothing says when room is short. A thread of its own lists the place when a tenant has stored
an eighth of its quota since the last time, and deletes the blocks that were used longest ago of each tenant beyond its
quota. No store waits for it and none is declined. Engines do not talk: each finds what all have stored, and two that
delete at once delete the same blocks.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import TierError, describe_foreign
from kvtier.namespace import Namespace
from kvtier.tiering.kit.block_format import format_of
from kvtier.tiering.kit.place import Place, PlaceBlock
from kvtier.tiering.kit.quota_counts import (
    MAX_VICTIMS,
    Candidate,
    QuotaCounts,
    choose_victims,
    plan_shares,
)

logger = logging.getLogger(__name__)

PAUSE_FACTOR = 10
"""After a pass the next waits this many times as long as it took, so that a large place is not listed all the time."""

RETRY_S = 5.0
"""Seconds until a pass that failed is tried again."""

LOOK_S = 60.0
"""Seconds between two looks at whether a listing is due by its age alone."""

BATCH_BLOCKS = 500
"""Blocks deleted between two looks at whether the tier shuts down."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the thread is waited for. It touches no row: nothing depends on its end."""


class TenantNames:
    """Tells the tenant in a block's name. Mutable is the namespace, set on the scheduler's thread, read by others.

    Names of encrypted blocks tell it in the engine's own namespace alone.
    """

    def __init__(self) -> None:
        self._namespace: Namespace | None = None

    def on_opened(self, namespace: Namespace) -> None:
        """Read the names of this namespace from now on, where it is encrypted."""
        self._namespace = namespace

    def key_of(self, namespace_name: str, name: bytes | None) -> OffloadKey | None:
        """Return the block that is called so; None where its name does not tell."""
        own = self._namespace
        if name is None or own is None:
            return None
        own_format = format_of(own)
        if not own_format.is_encrypted:
            return OffloadKey(name)
        return own_format.key(name) if namespace_name == own.name else None


class QuotaKeeper:
    """A daemon thread that lists and deletes, begun by the first store.

    Mutable are the thread, the end and the count of failures. ``_changed`` guards them; the place is used outside it.

    Args:
        tier: type of the tier, for messages.
        counts: what tenants keep.
        open_place: opens the place for one pass.
        clock: seconds, monotonic.
        needed: what a user must be allowed to do there, for the refusal of one that may not.

    Attributes:
        names: tells the tenants of blocks.
        num_passes: how many have ended well.
    """

    def __init__(
        self,
        tier: str,
        counts: QuotaCounts,
        open_place: Callable[[], Place],
        clock: Callable[[], float] = time.monotonic,
        needed: str = "list it",
    ) -> None:
        self._needed = needed
        self.names = TenantNames()
        self._tier = tier
        self._counts = counts
        self._open_place = open_place
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_failing = False
        self._num_failed = 0
        self.num_passes = 0
        self._num_evicted = 0

    def on_stored(self, keys: Iterable[OffloadKey], block_bytes: int) -> None:
        """Count blocks that were written, and begin a pass where one is due. Thread: any; does not block."""
        self._counts.on_stored(keys, block_bytes)
        if self._counts.is_due:
            with self._changed:
                self._start_thread()
                self._changed.notify_all()

    def check(self) -> None:
        """List the beginning of the place once.

        Raises:
            TierError: it cannot be listed, so quotas cannot be kept.
        """
        try:
            place = self._open_place()
            try:
                next(iter(place.blocks()), None)
            finally:
                place.close()
        except TierError as error:
            remedy = f"let the user {self._needed}, or leave the tier out of quota_bytes"
            raise TierError(self._tier, f"quota_bytes cannot be kept ({error}): {remedy}") from None

    def stats(self) -> dict[str, float]:
        """Return what tenants keep, and what passes did. Thread: any."""
        with self._changed:
            passes = {
                "failed_passes": float(self._num_failed),
                "evicted": float(self._num_evicted),
            }
        return self._counts.stats() | passes

    def close(self) -> None:
        """End the thread, or at least its deleting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def run_pass(self) -> None:
        """List the place and delete what is beyond quotas. Thread: the keeper's; blocks.

        Raises:
            TierError: the place cannot be listed or changed.
        """
        place = self._open_place()
        try:
            while self._run_round(place):
                pass
        finally:
            place.close()
        self._counts.end_pass()
        with self._changed:
            self.num_passes += 1

    def _start_thread(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(
                target=self._work, name=f"kvtier-{self._tier}-quotas", daemon=True
            )
            self._thread.start()

    def _work(self) -> None:
        pause_s = 0.0
        while self._wait_due(pause_s):
            begun_s = self._clock()
            try:
                self.run_pass()
            except TierError as error:
                self._note_failed(str(error))
                pause_s = RETRY_S
            except Exception as error:  # noqa: BLE001  # thread top
                # Not its text: a client's may quote a request, and a request may carry a password.
                self._note_failed(describe_foreign(error))
                pause_s = RETRY_S
            else:
                self._note_passed()
                pause_s = PAUSE_FACTOR * (self._clock() - begun_s)

    def _wait_due(self, pause_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, pause_s)
            while not self._is_closed and not self._counts.is_due:
                self._changed.wait(LOOK_S)
            return not self._is_closed

    def _note_failed(self, reason: str) -> None:
        with self._changed:
            self._num_failed += 1
            was_failing, self._is_failing = self._is_failing, True
        if not was_failing:
            logger.warning("tier %s: quota_bytes cannot be kept for now: %s", self._tier, reason)

    def _note_passed(self) -> None:
        with self._changed:
            was_failing, self._is_failing = self._is_failing, False
        if was_failing:
            logger.warning("tier %s: quota_bytes is kept again", self._tier)

    def _run_round(self, place: Place) -> bool:
        """Delete the oldest of tenants beyond their quotas; return whether there is more to do."""
        found = self._counts.begin_listing()
        for block in place.blocks():
            found.add_found(self.names.key_of(block.namespace, block.name), block.num_bytes)
        self._counts.end_listing(found)
        excesses = self._counts.excesses()
        if not excesses:
            return False
        most_bytes = min(sum(excesses.values()), MAX_VICTIMS * found.mean_bytes())
        victims = choose_victims(self._candidates(place), plan_shares(excesses, most_bytes))
        num_removed = 0
        place.begin_removal()
        for number, candidates in victims.items():
            for begin in range(0, len(candidates), BATCH_BLOCKS):
                if self._is_closed:
                    return False
                batch = [one.item for one in candidates[begin : begin + BATCH_BLOCKS]]
                removed = place.remove(batch, unless_changed=True)
                self._counts.on_removed(number, removed.num, removed.num_bytes)
                num_removed += removed.num
                with self._changed:
                    self._num_evicted += removed.num
        place.end_removal(())
        # What was used meanwhile stays: without progress the next pass has to do.
        return num_removed > 0 and most_bytes < sum(excesses.values())

    def _candidates(self, place: Place) -> Iterator[tuple[int, Candidate[PlaceBlock]]]:
        for block in place.blocks():
            key = self.names.key_of(block.namespace, block.name)
            if key is not None:
                candidate = Candidate(block.used_s or 0.0, block.address, block.num_bytes, block)
                yield get_offload_tenant(key), candidate
