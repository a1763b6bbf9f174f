"""Blocks that travel through one secondary tier while its server is killed, restarted and hung at random.

It knows no server; ``tier_servers`` does. Several requests at a time search, load, give up and store through the
manager, as an engine would, on the real clock. What must hold is checked as it goes: the bytes of each load follow
from its key, each search is answered, the manager's invariants hold after each call, what failed to be stored is never
served, memory stays bounded, and after each outage the tier serves again.
"""

import itertools
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.e2e.tier_servers import TierServer

from kvtier.base import ReqContext
from kvtier.testing.tier_suite import ROW_BYTES, content_of, key_of, make_config, make_rows
from kvtier.testing.tiering_driver import ArrayRegion, TieringDriver
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

NUM_SLOTS = 96
"""Of the primary: little, so that blocks leave it soon and must come back from the tier."""

BLOCKS_PER_BATCH = 8
NUM_SEARCHES = 6
LOOKUP_DEADLINE_S = 2.0
JOB_TIMEOUT_S = 10.0
HANG_GUARD_S = 120.0
"""For what ends in seconds: longer than breaker, back-off and the slowest server's start together."""

ANSWER_GUARD_S = 60.0
"""Thirty times the deadline of a search: only a hang lasts so long, on a busy machine too."""

MAX_GROWTH_BYTES = 48 * 2**20
"""What the process may gain after the first quarter of the run. All blocks of the large run have 80 MiB."""

BLOCKS_PER_OUTAGE = 500
MIN_OUTAGES = 2
MAX_DOWN_S = 1.0
MAX_HANG_S = 1.5
MAX_DELAY_S = 0.03
PAUSE_S = 0.01
"""How long a step of an outage waits for its end: a tier that is left out gives nothing to wait for."""

FAILED_STORE_RATIO = 0.05
GIVE_UP_RATIO = 0.01
RECENT_RATIO = 0.7
NUM_RECENT = 24
"""Batches, twice what the primary holds: most searches ask for one that has just left it."""

NUM_PROOF_BLOCKS = 2 * NUM_SLOTS
"""New blocks until the first of them comes up after an outage: more than the primary holds, so that they leave it."""


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """What a run did.

    Attributes:
        num_blocks: blocks that were given to the primary for the first time.
        num_kills: kills of the server.
        num_hangs: hangs of the server.
        num_searches: searches that were answered.
        num_loaded: blocks that were loaded and compared.
        num_promoted: those of them that came from the tier.
        num_missed: blocks that were searched and not found.
        num_given_up: requests that ended while they waited.
        slowest_search_s: seconds until the slowest answer.
        growth_bytes: memory of the process that was gained since the first quarter.
        rss_bytes: memory of the process at the end.
        seconds: how long it took.
    """

    num_blocks: int
    num_kills: int
    num_hangs: int
    num_searches: int
    num_loaded: int
    num_promoted: int
    num_missed: int
    num_given_up: int
    slowest_search_s: float
    growth_bytes: int
    rss_bytes: int
    seconds: float


class LongRegion(ArrayRegion):
    """Rows as long as those of the tiers' peers, which share what is stored."""

    def __init__(self) -> None:
        self.rows = make_rows(NUM_SLOTS, ROW_BYTES)
        self.is_cleaned = False


class ChaosDriver(TieringDriver):
    """An engine's part on the real clock.

    Args:
        server: where the tier keeps its blocks.
    """

    def __init__(self, server: TierServer) -> None:  # not the parent's, whose clock is moved by hand
        budget = {"max_in_flight_store_bytes": NUM_SLOTS // 2 * ROW_BYTES, "job_timeout_s": JOB_TIMEOUT_S}
        self.region = LongRegion()
        self.primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, self.region, store_threshold=0)
        view = self.primary.get_kv_memoryview()
        self.tier: SecondaryTierManager = create_secondary_tier(
            dict(server.config) | budget, view, make_config()
        )
        self.tiers = [self.tier]
        self.manager = TieringOffloadingManager(
            self.primary,
            self.tiers,
            lookup_deadline_s=LOOKUP_DEADLINE_S,
            shutdown_timeout_s=0.0 if server.ends_engine else HANG_GUARD_S,
        )
        self.rows = np.asarray(self.region.rows)
        self.generation = 0

    def content(self, number: int) -> npt.NDArray[np.int8]:
        """Return the bytes that belong under block ``number``, whichever process wrote it."""
        return content_of(number, ROW_BYTES)

    def close(self) -> None:
        """End the manager and wait for the tier's threads."""
        self.manager.shutdown()
        assert self.tier.shutdown(HANG_GUARD_S)


class Outage(threading.Thread):
    """One death or hang of a server and its return, beside the engine's thread.

    Args:
        server: the server.
        choose: where chance comes from.
        is_kill: whether it dies; it hangs otherwise.
    """

    def __init__(self, server: TierServer, choose: random.Random, *, is_kill: bool) -> None:
        super().__init__(name="outage")
        self.is_kill = is_kill
        self._delay_s = choose.uniform(0.0, MAX_DELAY_S)
        self._down_s = choose.uniform(0.0, MAX_DOWN_S if is_kill else MAX_HANG_S)
        kill, hang = (server.kill, server.start), (server.hang, server.wake)
        self._begin, self._end = kill if is_kill else hang
        self._is_recovered = threading.Event()
        self.is_back = threading.Event()

    def run(self) -> None:
        """Hurt the server, bring it back, and wait until the engine knows that the tier serves again."""
        self._is_recovered.wait(self._delay_s)
        assert self._begin is not None
        self._begin()
        self._is_recovered.wait(self._down_s)
        self._end()
        self.is_back.set()
        self._is_recovered.wait(2 * HANG_GUARD_S)

    def close(self) -> None:
        """Tell that the tier serves again."""
        self._is_recovered.set()
        self.join()


@dataclass(slots=True, eq=False)
class Search:
    """A request for a batch of blocks.

    Attributes:
        numbers: the blocks.
        req_context: the request.
        began_s: when it was first asked.
        loading: the blocks of its load that is under way.
        slots: their slots.
    """

    numbers: Sequence[int]
    req_context: ReqContext
    began_s: float = field(default_factory=time.monotonic)
    loading: Sequence[int] = ()
    slots: Sequence[int] = ()


class ChaosRun:
    """One run.

    Args:
        server: the tier's server, running.
        num_blocks: blocks that are stored, at least; some of each outage's proof may come on top.
        choose: where chance comes from.
    """

    def __init__(self, server: TierServer, num_blocks: int, choose: random.Random) -> None:
        self._server = server
        self._num_blocks = num_blocks
        self._choose = choose
        self._driver = ChaosDriver(server)
        num_outages = max(MIN_OUTAGES, num_blocks // BLOCKS_PER_OUTAGE)
        self._due_outages = sorted(choose.sample(range(num_blocks // 4, num_blocks), num_outages))
        self._outage: Outage | None = None
        self._ids = itertools.count()
        self._num_stored = 0
        self._batches: list[range] = []
        self._searches: list[Search] = []
        self._num_outages = {True: 0, False: 0}
        self._num_searches = self._num_loaded = self._num_promoted = self._num_missed = 0
        self._num_given_up = 0
        self._newest_promoted = -1
        # The first block since the server's return, until one of those has come up.
        self._proof_from: int | None = None
        self._proof_end_s = 0.0
        self._slowest_s = 0.0
        self._first_rss_bytes = 0

    def run(self) -> ChaosReport:
        """Store, search and load until all blocks have been stored and all outages are over; report."""
        began_s = time.monotonic()
        try:
            while self._num_stored < self._num_blocks or self._is_disturbed or self._due_outages:
                self._begin_outage()
                self._step()
                self._end_outage()
            self._settle()
        finally:
            if self._outage is not None:
                self._outage.close()
            self._driver.close()
        return self._report(time.monotonic() - began_s)

    @property
    def _is_disturbed(self) -> bool:
        return self._outage is not None or self._proof_from is not None

    def _begin_outage(self) -> None:
        if self._first_rss_bytes == 0 and self._num_stored >= self._num_blocks // 4:
            self._first_rss_bytes = rss_bytes()
        if self._is_disturbed or not self._due_outages or self._num_stored < self._due_outages[0]:
            return
        self._due_outages.pop(0)
        # The last one is a kill: what is proven afterwards is the return after a restart.
        is_last = not self._due_outages
        is_kill = is_last or self._server.hang is None or sum(self._num_outages.values()) % 2 == 1
        self._num_outages[is_kill] += 1
        if self._server.ends_engine:
            self._restart_engine()
        else:
            self._outage = Outage(self._server, self._choose, is_kill=is_kill)
            self._outage.start()

    def _restart_engine(self) -> None:
        """Drop the engine in the middle of its work, hurt what it leaves, and start another on that."""
        self._driver.close()
        self._searches.clear()
        self._server.kill()
        self._server.start()
        self._driver = ChaosDriver(self._server)
        self._begin_proof()

    def _begin_proof(self) -> None:
        self._proof_from = self._num_stored
        self._proof_end_s = time.monotonic() + HANG_GUARD_S

    def _end_outage(self) -> None:
        """Go on undisturbed once a block that was stored after the server's return has come up."""
        if self._outage is not None:
            assert self._outage.is_alive(), "the server did not return"
            self._outage.join(PAUSE_S)
            if self._outage.is_back.is_set() and self._proof_from is None:
                self._begin_proof()
        if self._proof_from is None:
            return
        assert time.monotonic() < self._proof_end_s, f"it serves no new block: {self._driver.manager.stats()}"
        if self._newest_promoted >= self._proof_from:
            self._proof_from = None
            if self._outage is not None:
                self._outage.close()
                self._outage = None

    def _may_store_new(self) -> bool:
        """Return whether a new block is worth storing: what is stored during an outage is lost to the tier."""
        if self._proof_from is not None:
            return self._num_stored < self._proof_from + NUM_PROOF_BLOCKS
        return self._outage is None

    def _step(self) -> None:
        self._store_batch()
        for search in list(self._searches):
            self._advance(search)
        while len(self._searches) < NUM_SEARCHES:
            self._searches.append(Search(self._choose_batch(), self._new_context("search")))
        self._driver.step()
        self._driver.manager.drain(0.01)
        self._driver.manager.check()

    def _store_batch(self) -> None:
        is_new = self._may_store_new()
        first = self._num_stored
        numbers = range(first, first + BLOCKS_PER_BATCH) if is_new else self._choose_batch()
        req_context = self._new_context("store")
        store = self._driver.begin_store(numbers, req_context)
        if store is None:
            return
        self._driver.end_store(store, success=self._choose.random() >= FAILED_STORE_RATIO)
        self._driver.manager.request_finished(req_context)
        if is_new:
            self._batches.append(numbers)
            self._num_stored += BLOCKS_PER_BATCH

    def _advance(self, search: Search) -> None:
        """Take a request one step further: to its answer, through its load, or to its end."""
        waited_s = time.monotonic() - search.began_s
        assert waited_s < ANSWER_GUARD_S, f"the search for {search.numbers} is not answered"
        if search.loading:
            self._compare(search)
            self._driver.end_load(search.loading, search.req_context)
            self._end(search)
        elif self._choose.random() < GIVE_UP_RATIO:
            self._num_given_up += 1
            self._end(search)
        elif not self._driver.manager.is_waiting(search.req_context):
            num_hits = self._driver.search(search.numbers, search.req_context)
            if num_hits is not None:
                self._slowest_s = max(self._slowest_s, waited_s)
                self._take_answer(search, num_hits)

    def _take_answer(self, search: Search, num_hits: int) -> None:
        self._num_searches += 1
        self._num_missed += len(search.numbers) - num_hits
        if not num_hits:
            self._end(search)
            return
        promoted = self._driver.manager.promoted_for(search.req_context)
        search.loading = search.numbers[:num_hits]
        search.slots = self._driver.begin_load(search.loading, search.req_context)
        self._num_loaded += num_hits
        came = [number for number in search.loading if key_of(number) in promoted]
        self._num_promoted += len(came)
        self._newest_promoted = max([self._newest_promoted, *came])

    def _compare(self, search: Search) -> None:
        """Check that nobody has written into the slots of a load under way."""
        for number, slot in zip(search.loading, search.slots, strict=True):
            assert np.array_equal(self._driver.rows[slot], self._driver.content(number))

    def _end(self, search: Search) -> None:
        self._driver.manager.request_finished(search.req_context)
        self._driver.manager.check()
        self._searches.remove(search)

    def _settle(self) -> None:
        """End the requests and the jobs; nothing may be left open."""
        end_s = time.monotonic() + HANG_GUARD_S
        manager = self._driver.manager
        while self._searches or manager.stats()["open_jobs"] or manager.has_pending_work():
            for search in list(self._searches):
                self._advance(search)
            self._driver.step()
            manager.drain(0.01)
            manager.check()
            assert time.monotonic() < end_s, f"jobs are open: {manager.stats()}"
        stats = manager.stats()
        assert stats["waiting_requests"] == stats["unknown_results"] == 0

    def _choose_batch(self) -> range:
        if not self._batches:
            return range(BLOCKS_PER_BATCH)
        is_recent = self._choose.random() < RECENT_RATIO
        return self._choose.choice(self._batches[-NUM_RECENT:] if is_recent else self._batches)

    def _new_context(self, word: str) -> ReqContext:
        return ReqContext(f"{word}-{next(self._ids)}")

    def _report(self, seconds: float) -> ChaosReport:
        now_bytes = rss_bytes()
        growth_bytes = now_bytes - self._first_rss_bytes
        assert growth_bytes < MAX_GROWTH_BYTES, f"the process has grown by {growth_bytes} bytes"
        return ChaosReport(
            num_blocks=self._num_stored,
            num_kills=self._num_outages[True],
            num_hangs=self._num_outages[False],
            num_searches=self._num_searches,
            num_loaded=self._num_loaded,
            num_promoted=self._num_promoted,
            num_missed=self._num_missed,
            num_given_up=self._num_given_up,
            slowest_search_s=round(self._slowest_s, 2),
            growth_bytes=growth_bytes,
            rss_bytes=now_bytes,
            seconds=round(seconds, 1),
        )


def rss_bytes() -> int:
    """Return the memory that the process has in use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
