"""Keeps an engine from the blocks of another model that has the same name, where the engine computed a page.

The page (``NamespacePage``) of the first engine is kept beside the namespace's document, sealed as its blocks
are. Nothing is stored or found before it was read. Where it differs from the engine's own, the tier is not used: its
blocks are misses and nothing is stored in it. The page is read again every few seconds in which the tier is used,
because a purge, a server that lost its data or its time to live may have removed it, and another engine's be there now.
"""

import hashlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from kvtier.base import OffloadKey, make_offload_key
from kvtier.config import ModelIdentity
from kvtier.namespace import Namespace, NamespacePage, ProbedModel
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore
from kvtier.tiering.kit.block_format import format_of
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, FAILURE_OF_CHECK, HeaderCheck
from kvtier.tiering.kit.io_pool import TransferOutcome

logger = logging.getLogger(__name__)

S = TypeVar("S")

PAGE_KEY = make_offload_key(hashlib.sha256(b"kvtier page").digest(), 0)
"""Stands for the page in its header."""

CHECK_S = 5.0
"""Seconds for which a page that was read is believed. Shorter asks a server more often; for as long two models may
share a namespace whose page was removed."""

MAX_PAGE_BYTES = 2**26
"""What is longer is no page: 8 tokens of a large model are some MiB."""

ANOTHER_MODEL = "its page is another model's"
"""Why a namespace is not used whose page differs from the engine's own."""

MAX_ATTEMPTS = 3
"""Readings of a page that is absent or damaged, and is made anew, before it is left for the next call."""


class PageKeeper(ABC, Generic[S]):
    """What a block store is, too, that can keep a page beside a namespace's document.

    Each call may block, and raises a TierError where the backend cannot be reached. Thread: any of the tier's.
    """

    @abstractmethod
    def read_page(self, namespace: S) -> bytes | None:
        """Return what is kept, at most ``MAX_PAGE_BYTES`` of it; None where there is nothing."""

    @abstractmethod
    def create_page(self, namespace: S, data: bytes) -> None:
        """Keep a page, whole or not at all, unless there is one."""

    @abstractmethod
    def remove_page(self, namespace: S) -> None:
        """Remove a page that is damaged, and count it as a damaged block is counted."""


class PageCheck(Generic[S]):
    """Whether the page of one namespace is that of the engine's own model.

    Mutable are the answer, until when it holds, and what was said. ``_lock`` guards them; it is held while the page is
    read, as every other thread needs the answer, and the answer is read without it.

    Args:
        tier: the tier's type, for the log.
        page: the engine's own.
        identity: of the namespace.
        namespace: its handle.
        clock: seconds, monotonic.

    Attributes:
        is_right: whether it was at the last look; False before the first.
        refusal: what was wrong at the last look, in a few words; empty where nothing was, or there was no page.
    """

    def __init__(
        self,
        tier: str,
        page: NamespacePage,
        identity: Namespace,
        namespace: S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_right = False
        self.refusal = ""
        self._tier = tier
        self._page = page
        self._name = identity.name
        self._format = format_of(identity)
        self._namespace = namespace
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s = float("-inf")
        self._said: set[str] = set()

    def passes(self, keeper: PageKeeper[S], *, may_create: bool) -> bool:
        """Return whether blocks may be moved.

        Args:
            keeper: where the page is.
            may_create: whether the engine's own is put there where there is none; if not, that is no.

        Raises:
            TierError: the backend cannot be reached.
        """
        if self._clock() < self._until_s:
            return self.is_right
        with self._lock:
            if self._clock() >= self._until_s and self._format.serves(PAGE_KEY):
                self._look(keeper, may_create=may_create)
            return self.is_right

    def forget(self) -> None:
        """Read the page again at the next call: it was removed."""
        self._until_s = float("-inf")

    def _look(self, keeper: PageKeeper[S], *, may_create: bool) -> None:
        for _ in range(MAX_ATTEMPTS):
            kept = keeper.read_page(self._namespace)
            if kept is None:
                self._conclude("", is_right=False)
                if not may_create:
                    return
                header, payload = self._format.seal(PAGE_KEY, memoryview(self._page.data), None)
                keeper.create_page(self._namespace, b"".join((header, payload)))
                continue
            found, data = self._open(kept)
            if found is HeaderCheck.OK:
                self._judge(self._page.differs(data))
                self._until_s = self._clock() + CHECK_S
                return
            self._conclude(f"its page cannot be read ({found.value})", is_right=False)
            self._say(logging.WARNING, f"its page is {FAILURE_OF_CHECK[found].value} ({found.value})")
            if FAILURE_OF_CHECK[found] is not TierFailure.DAMAGED:
                return
            keeper.remove_page(self._namespace)

    def _open(self, kept: bytes) -> tuple[HeaderCheck, bytes]:
        if len(kept) < ENVELOPE_BYTES:
            return HeaderCheck.DAMAGED, b""
        payload = memoryview(bytearray(kept))[ENVELOPE_BYTES:]
        found = self._format.open(kept[:ENVELOPE_BYTES], payload, PAGE_KEY, payload)
        return found, bytes(payload)

    def _judge(self, difference: str) -> None:
        self._conclude(ANOTHER_MODEL if difference else "", is_right=not difference)
        if difference:
            self._say(
                logging.ERROR,
                f"{difference}: its blocks are of another model that has the same name, so it is not used: give each "
                "model a model_revision of its own, or the engine another tenant_salt",
            )

    def _conclude(self, refusal: str, *, is_right: bool) -> None:
        self.refusal, self.is_right = refusal, is_right

    def _say(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.log(level, "tier %s: namespace %s: %s", self._tier, self._name, text)


class GuardedStore(BlockStore[S]):
    """A block store that moves nothing of a namespace unless its page is right.

    Args:
        store: the backend, which also keeps the page.
        check: of the namespace.
    """

    def __init__(self, store: BlockStore[S], check: PageCheck[S]) -> None:
        assert isinstance(store, PageKeeper), "guard_with_page has seen to it"
        self._store = store
        self._keeper: PageKeeper[S] = store
        self._check = check

    @property
    def is_open(self) -> bool:
        return self._check.is_right

    @property
    def refusal(self) -> str:
        return self._check.refusal

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> S:
        return self._store.open_namespace(identity, is_new=is_new)

    def contains_batch(self, namespace: S, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        passes = self._check.passes(self._keeper, may_create=False)
        return self._store.contains_batch(namespace, keys) if passes else ()

    def store(self, namespace: S, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        passes = self._check.passes(self._keeper, may_create=True)
        return self._store.store(namespace, keys, slots) if passes else TransferOutcome(())

    def load(self, namespace: S, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        passes = self._check.passes(self._keeper, may_create=False)
        return self._store.load(namespace, keys, slots) if passes else TransferOutcome(())

    def drop(self, namespace: S, keys: Sequence[OffloadKey]) -> None:
        if self._check.passes(self._keeper, may_create=False):
            self._store.drop(namespace, keys)

    def with_deadline(self, end_s: float) -> BlockStore[S]:
        store = self._store.with_deadline(end_s)
        return self if store is self._store else GuardedStore(store, self._check)

    def on_purged(self) -> None:
        self._check.forget()
        self._store.on_purged()


def guard_with_page(
    store: BlockStore[S],
    tier: str,
    model: ModelIdentity | None,
    identity: Namespace,
    namespace: S,
    clock: Callable[[], float] = time.monotonic,
) -> BlockStore[S]:
    """Return what moves the blocks of a namespace: the store itself where it keeps no page, or the model has none.

    Args:
        store: the backend.
        tier: the tier's type, for the log.
        model: the engine's; None in a namespace to which no other engine can write.
        identity: of the namespace.
        namespace: its handle.
        clock: seconds, monotonic.
    """
    page = model.page if isinstance(model, ProbedModel) else None
    if page is None or not isinstance(store, PageKeeper):
        return store
    return GuardedStore(store, PageCheck(tier, page, identity, namespace, clock))
