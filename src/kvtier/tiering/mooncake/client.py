"""The connection to the store: joined when it is first needed, left alone for a while when it fails.

A call that the master did not answer is a TierError, and for a while each further call is one at once. Then ``knock``
checks that the master answers before the library is called again, which itself would block for more than four seconds.
What single names lack stays in the answer.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from kvtier.errors import TierError
from kvtier.tiering.kit.health import BackendHealth
from kvtier.tiering.mooncake.errors import MASTER_AWAY, Code, name_of
from kvtier.tiering.mooncake.memory import address_of
from kvtier.tiering.mooncake.native import (
    TIER_TYPE,
    NativeStore,
    knock,
    make_replica_options,
    open_native,
)
from kvtier.tiering.mooncake.settings import MooncakeSettings

PAUSE_S = 1.0
"""Seconds after a call that the master did not answer in which none is tried. Shorter knocks more often for each
waiting job; longer finds a restarted master later. The manager's breaker pauses for longer."""

UNCERTAIN_AFTER_S = 50.0
"""A transfer that failed after so many seconds may still be going on. The library returns after 60 without stopping
what it has begun; less than that with room for clocks."""


@dataclass(slots=True)
class _Session:
    """A client that has joined, and who uses it."""

    native: NativeStore
    num_calls: int = 0
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class ScatterLists:
    """Where the bytes of values come from or go to.

    Attributes:
        addresses: of the pieces of each value in their order, in registered memory or in ``own``.
        lengths: of the same pieces.
        own: memory of the call's own, which is registered as long as the call lasts; None: there is none.
    """

    addresses: list[list[int]]
    lengths: list[list[int]]
    own: memoryview | None = None

    @classmethod
    def over(cls, memory: memoryview, lengths: Sequence[int]) -> "ScatterLists":
        """Return lists for values that stand one after another in memory of the call's own."""
        ends = list(accumulate(lengths, initial=address_of(memory)))
        return cls([[begin] for begin in ends[:-1]], [[length] for length in lengths], memory)


class MooncakeClient:
    """Calls of the store, each with a time limit and no retry.

    Mutable are the session, the pause and the doubt. ``_changed`` guards them; no call is made under it.

    Args:
        settings: which store.
        memories: what to register: all memory that values come from or go to.
        clock: seconds, monotonic.
        open_store: joins the store.
    """

    def __init__(
        self,
        settings: MooncakeSettings,
        memories: Sequence[memoryview],
        clock: Callable[[], float],
        open_store: Callable[[MooncakeSettings], NativeStore] = open_native,
    ) -> None:
        self._settings = settings
        self._memories = [memory for memory in memories if len(memory)]
        self._clock = clock
        self._open_store = open_store
        self._replicas = make_replica_options(settings.num_replicas)
        self._changed = threading.Condition()
        self._session: _Session | None = None
        self._is_joining = False
        self._is_doubtful = False
        self._is_closed = False
        self._health = BackendHealth(TIER_TYPE, clock, pause_s=PAUSE_S)

    def exist(self, names: list[str]) -> list[int]:
        """Return 1 for each of ``names`` that has a whole value, 0 for others.

        Raises:
            TierError: the master does not answer.
        """
        return self._call(lambda native: native.batch_is_exist(names))

    def put(self, names: list[str], scatter_lists: ScatterLists) -> list[int]:
        """Write a value under each name; one that is there stays as it is. Raises as ``exist``."""
        addresses, lengths = scatter_lists.addresses, scatter_lists.lengths
        return self._call(
            lambda native: native.batch_put_from_multi_buffers(names, addresses, lengths, self._replicas),
            scatter_lists.own,
        )

    def get(self, names: list[str], scatter_lists: ScatterLists) -> list[int]:
        """Read each name's value; return its length, or why not. Raises as ``exist``."""
        addresses, lengths = scatter_lists.addresses, scatter_lists.lengths
        return self._call(
            lambda native: native.batch_get_into_multi_buffers(names, addresses, lengths), scatter_lists.own
        )

    def get_part(self, name: str, start: int, memory: memoryview) -> int:
        """Fill memory of the call's own from byte ``start`` of a value; return its length, or why not.

        Raises as ``exist``.
        """
        address, length = address_of(memory), len(memory)
        return self._call(
            lambda native: native.get_into_ranges([address], [[name]], [[[0]]], [[[start]]], [[[length]]])[0][
                0
            ],
            memory,
        )[0]

    def remove(self, names: list[str]) -> list[int]:
        """Remove values that are not leased. Raises as ``exist``."""
        return self._call(lambda native: native.batch_remove(names))

    def remove_by_pattern(self, pattern: str) -> int:
        """Remove every value whose name fits a regular expression and that is not leased.

        Return how many, or why none could be. Raises as ``exist``.
        """
        return self._call(lambda native: [native.remove_by_regex(pattern)])[0]

    def size(self, name: str) -> int:
        """Return the length of a value, or why it is not known. Raises as ``exist``."""
        return self._call(lambda native: [native.get_size(name)])[0]

    def close(self) -> None:
        """Leave the store, and take the contributed memory with it; called when no call runs any more."""
        with self._changed:
            self._is_closed = True
            session = self._session
        if session is not None:
            self._retire(session)

    def _call(self, ask: Callable[[NativeStore], list[int]], memory: memoryview | None = None) -> list[int]:
        session = self._enter()
        began_s = self._clock()
        try:
            if memory is None:
                answers = ask(session.native)
            else:
                with _registered(session.native, memory):
                    answers = ask(session.native)
        finally:
            with self._changed:
                session.num_calls -= 1
                self._changed.notify_all()
        if Code.TRANSFER_FAIL in answers and self._clock() - began_s >= UNCERTAIN_AFTER_S:
            # The caller reports its slots as free after this: a late answer must find no one to write for.
            self._retire(session)
        away = next((code for code in answers if code in MASTER_AWAY), None)
        if away is not None:
            raise self._pause(f"the master at {self._settings.master} does not answer: {name_of(away)}")
        return answers

    def _enter(self) -> _Session:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_joining)
            if self._is_closed:
                raise TierError(TIER_TYPE, "the tier is shut down")
            self._health.require_no_pause()
            if self._session is not None and not self._is_doubtful:
                self._session.num_calls += 1
                return self._session
            self._is_joining = True
            session = self._session
        return self._join(session)

    def _join(self, session: _Session | None) -> _Session:
        """Make sure that the master answers; the caller has set ``_is_joining``."""
        try:
            if session is None:
                session = _Session(self._register_all(self._open_store(self._settings)))
            else:
                knock(self._settings.master, self._settings.timeout_s)
        except TierError as error:
            self._pause(str(error).removeprefix(f"tier {TIER_TYPE!r}: "))
            raise
        else:
            with self._changed:
                self._session = session
                self._is_doubtful = False
                session.num_calls += 1
            return session
        finally:
            with self._changed:
                self._is_joining = False
                self._changed.notify_all()

    def _register_all(self, native: NativeStore) -> NativeStore:
        try:
            for memory in self._memories:
                _register(native, memory)
        except TierError:
            native.close()
            raise
        return native

    def _pause(self, reason: str) -> TierError:
        with self._changed:
            self._is_doubtful = True
            self._health.begin_pause(reason)
        return TierError(TIER_TYPE, reason)

    def _retire(self, session: _Session) -> None:
        """Close a client when no call uses it any more; returns when it is closed."""
        with self._changed:
            is_first = self._session is session
            if not is_first:
                self._changed.wait_for(lambda: session.is_closed)
                return
            self._session = None
            self._changed.wait_for(lambda: session.num_calls == 0)
        session.native.close()
        with self._changed:
            session.is_closed = True
            self._changed.notify_all()


def _register(native: NativeStore, memory: memoryview) -> None:
    code = native.register_buffer(address_of(memory), len(memory))
    if code != Code.OK:
        remedy = "with rdma, is the limit of locked memory (ulimit -l) high enough?"
        failure = f"registering {len(memory)} bytes of memory failed: {name_of(code)}; {remedy}"
        raise TierError(TIER_TYPE, failure)


@contextmanager
def _registered(native: NativeStore, memory: memoryview) -> Iterator[None]:
    _register(native, memory)
    try:
        yield
    finally:
        native.unregister_buffer(address_of(memory))
