"""The objects of a store as blobs, one request each.

A store that does not answer is left alone for a moment. Some servers that speak S3 do not know a conditional write:
then it is asked first whether a block is there, as a web server is.
"""

import asyncio
import logging
import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvtier.errors import MissingExtraError, TierError
from kvtier.redaction import shorten
from kvtier.tiering.kit.blobs import (
    Blob,
    Blobs,
    FolderNames,
    Got,
    GotKind,
    Listed,
    Put,
    PutKind,
    Size,
    Target,
)
from kvtier.tiering.kit.blobs.contract import NAMESPACE_CHARS
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer
from kvtier.tiering.kit.health import BackendHealth
from kvtier.tiering.obj.client import CLIENT_ERRORS, make_private_folders, open_store
from kvtier.tiering.obj.errors import (
    Blame,
    Failure,
    has_no_condition,
    is_beyond_end,
    is_bucket_missing,
    is_held,
    judge,
)
from kvtier.tiering.obj.settings import ConditionalPut, ObjSettings
from kvtier.tiering.obj.target import Service

try:
    import obstore
    from obstore.exceptions import BaseError
except ImportError as error:
    raise MissingExtraError("obstore", "obj") from error

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

MAX_SMALL_REQUESTS = 64
"""Small requests at once for a batch of keys. Fewer make a long prefix wait for round trips; more open connections
that are used for nothing else."""

PAGE_OBJECTS = 1000
"""Objects in one answer of a listing, and in one bulk deletion: the most that S3 allows."""

PAUSE_S = 1.0
"""Seconds for which a store that did not answer is not called again; each call takes most of a second to fail."""

EARLIER_NAMES = re.compile(r"groups/[0-9a-f]{32}\.kvg")
"""Earlier versions could put several blocks into one object. Such objects are counted, evicted and purged by their
names. No block is read from them."""

PROBE_NAME = "reachable"
"""An object that need not exist: asking for it shows that the bucket is there and may be read. A writer with all rights
makes a missing bucket come into being on some servers."""

PUT_OF_BLAME = {Blame.VALUE: PutKind.REFUSED, Blame.ROOM: PutKind.NO_ROOM}
"""What becomes of an object that was not written, unless it has failed."""

NO_OBJECT = memoryview(b"")


class LoopFinder:
    """Finds that a sequence of names, which should each come once, goes round; remembers one of them.

    Source: R. P. Brent, "An improved Monte Carlo factorization algorithm", 1980: the name at each power of two is kept
    until the next, so a loop is found within three rounds of it.
    """

    def __init__(self) -> None:
        self._kept: str | None = None
        self._num_seen = 0
        self._next_kept = 1

    def is_repeated(self, name: str) -> bool:
        """Return whether ``name`` is the one that is remembered."""
        if name == self._kept:
            return True
        self._num_seen += 1
        if self._num_seen == self._next_kept:
            self._kept, self._next_kept = name, 2 * self._next_kept
        return False


class ObjBlobs(Blobs):
    """The objects below a prefix of one store.

    Mutable is whether conditional writes are sent; a stale answer costs one request.

    Args:
        settings: where it is and how long it may take.
        clock: seconds, monotonic.

    Raises:
        ConfigError: a directory or a file that the settings name cannot be used.
        TierError: the environment does not say what a client needs.
    """

    def __init__(self, settings: ObjSettings, clock: Callable[[], float] = time.monotonic) -> None:
        target = settings.target
        self.settings = settings
        self.names = self._folder_names = FolderNames(target.root, EARLIER_NAMES)
        self.where = f"{settings.url} (prefix {target.root!r})"
        self.can_list = target.service is not Service.HTTP
        self._timeout_s = settings.timeout_s
        self._obj_settings = settings
        self._root = target.root
        self._health = BackendHealth("obj", clock, pause_s=PAUSE_S)
        self._store = open_store(settings)
        self._sends_condition = self.can_list and settings.conditional_put is not ConditionalPut.NEVER
        self._is_memory = target.service is Service.MEMORY
        self._folder = Path(target.bucket) if target.service is Service.FILE else None

    def put_new(self, blobs: Sequence[Blob], end_s: float | None) -> list[Put]:
        del end_s  # the client's time-outs bound each request

        def failed(failure: Failure) -> Put:
            return Put(PUT_OF_BLAME.get(failure.blame, PutKind.FAILED), failure.words)

        return self._for_each(blobs, self._put, failed)

    def get_into(self, targets: Sequence[Target], end_s: float | None) -> list[Got]:
        del end_s

        def failed(failure: Failure) -> Got:
            kind = GotKind.REFUSED if failure.blame is Blame.VALUE else GotKind.FAILED
            return Got(kind, words=failure.words)

        return self._for_each(targets, self._get, failed)

    def sizes(self, names: Sequence[str], *, is_lookup: bool) -> dict[str, Size]:
        del is_lookup  # an object has the time of its writing, none of its use

        async def ask(name: str) -> Size:
            file = self._stat(name)
            if _is_endless(file):
                return Size(0)  # the client opens a file to tell its length
            meta = await obstore.head_async(self._store, name)
            num_disk_blocks = None if file is None else file.st_blocks
            return Size(meta["size"], meta["last_modified"].timestamp(), num_disk_blocks)

        return self._request_each(names, ask)

    def read_each(self, names: Sequence[str], max_bytes: int, start: int = 0) -> dict[str, memoryview]:
        async def ask(name: str) -> memoryview:
            if _is_endless(self._stat(name)):
                return NO_OBJECT
            try:
                found = await obstore.get_range_async(self._store, name, start=start, length=max_bytes)
                return memoryview(found)
            except BaseError as error:
                if is_beyond_end(error):
                    return NO_OBJECT
                raise

        return self._request_each(names, ask)

    def remove(
        self, names: Sequence[str], unless_used_since: Mapping[str, float] | None = None
    ) -> Collection[str]:
        del unless_used_since  # objects are created once, and tell no use
        for begin in range(0, len(names), PAGE_OBJECTS):
            with self._explained():
                self._remove_page(list(names[begin : begin + PAGE_OBJECTS]))
        return names

    def list_all(self, namespace: str | None = None) -> Iterator[Listed]:
        prefix = self._root if namespace is None else self._folder_names.folder(namespace)
        with self._explained():
            loop = LoopFinder()
            for page in obstore.list(self._store, prefix or None, chunk_size=PAGE_OBJECTS):
                for meta in page:
                    if loop.is_repeated(meta["path"]):
                        raise TierError(
                            "obj", f"its listing comes to {shorten(meta['path'])} again: it has no end"
                        )
                    yield Listed(meta["last_modified"].timestamp(), meta["path"], meta["size"])

    def list_namespaces(self) -> list[str]:
        if not self.can_list:
            return []
        with self._explained():
            found = obstore.list_with_delimiter(self._store, self._root or None)["common_prefixes"]
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        return [name for name in names if len(name) == NAMESPACE_CHARS]

    def check(self) -> None:
        name = f"{self._root}/{PROBE_NAME}" if self._root else PROBE_NAME
        self.read_each([name], ENVELOPE_BYTES)

    def _put(self, blob: Blob) -> Put:
        if self._sends_condition:
            try:
                self._create(blob)
                return Put(PutKind.WRITTEN)
            except BaseError as error:
                if is_held(error):
                    return Put(PutKind.EXISTED)
                if self._obj_settings.conditional_put is not ConditionalPut.AUTO or not has_no_condition(
                    error
                ):
                    raise
            self._forget_condition()
        # Two writers may both find nothing: both write the same block then.
        with suppress(FileNotFoundError):
            meta = obstore.head(self._store, blob.name)
            return Put(PutKind.EXISTED, num_bytes=meta["size"] if self.settings.ttl_s is None else None)
        obstore.put(self._store, blob.name, list(blob.parts), use_multipart=False)
        return Put(PutKind.WRITTEN)

    def _forget_condition(self) -> None:
        is_first, self._sends_condition = self._sends_condition, False
        if is_first:
            logger.warning(
                "tier obj: %s does not know conditional writes (If-None-Match): it is asked before each store whether "
                "the block is there",
                self._obj_settings.endpoint or self._obj_settings.url,
            )

    def _create(self, blob: Blob) -> None:
        # Sent from the rows themselves. Should a request that has timed out be sent on for a moment, from a row that is
        # used for another block, neither its signature nor the envelope fits what arrives: a miss.
        body: list[Buffer] = [b"".join(blob.parts)] if self._is_memory else list(blob.parts)
        with self._kept_private(blob.name):
            obstore.put(self._store, blob.name, body, mode="create", use_multipart=False)

    def _get(self, target: Target) -> Got:
        name = target.name
        if _is_endless(self._stat(name)):
            target.landed(0)
            return Got(GotKind.READ)
        try:
            result = obstore.get(self._store, name)
            num_bytes, written_s = result.meta["size"], result.meta["last_modified"].timestamp()
            if num_bytes <= len(target.header) + len(target.row):
                body = memoryview(result.bytes())
                num_bytes = len(body)
            else:
                body = memoryview(obstore.get_range(self._store, name, start=0, length=len(target.header)))
        except FileNotFoundError as error:
            if is_bucket_missing(error):
                raise
            return Got(GotKind.ABSENT)
        target.take(body, num_bytes)
        return Got(GotKind.READ, num_bytes, written_s)

    def _stat(self, name: str) -> os.stat_result | None:
        """Return what the system says of an object that is a file."""
        if self._folder is None:
            return None
        try:
            return (self._folder / name).stat()
        except OSError:
            return None

    @contextmanager
    def _kept_private(self, name: str) -> Iterator[None]:
        """Let an object that is a file be its owner's only: its folders from the beginning, itself from its end."""
        if self._folder is None:
            yield
            return
        file = self._folder / name
        make_private_folders(file.parent)
        yield
        with suppress(FileNotFoundError):  # another engine has evicted it
            file.chmod(0o600)

    def _remove_page(self, names: list[str]) -> None:
        try:
            obstore.delete(self._store, names)
        except FileNotFoundError:
            # A directory stops at the first that is gone; buckets do not mind.
            for name in names:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, name)

    def _for_each(
        self, items: Sequence[T], call: Callable[[T], R], failed: Callable[[Failure], R]
    ) -> list[R]:
        """Return the outcome of each item.

        Raises:
            TierError: none was answered, or all were refused for lack of access.
        """
        self._health.require_no_pause()
        outcomes: list[R] = []
        failures: list[Failure] = []
        for item in items:
            if failures and failures[-1].blame is Blame.AWAY:
                failures.append(failures[-1])  # each further call would take its time-out to fail
                outcomes.append(failed(failures[-1]))
                continue
            try:
                outcomes.append(call(item))
            except CLIENT_ERRORS as error:
                failures.append(self._judge(error))
                outcomes.append(failed(failures[-1]))
        _raise_if_whole(failures, len(items))
        return outcomes

    def _request_each(self, names: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        self._health.require_no_pause()
        answers, num_answered, errors = asyncio.run(_request_each(names, ask, self._timeout_s))
        failures = [self._judge(error) for error in errors]
        if failures and not num_answered:
            raise TierError("obj", failures[0].text)
        return answers

    def _judge(self, error: Exception) -> Failure:
        failure = judge(error, self._obj_settings)
        if failure.blame is Blame.AWAY:
            self._health.begin_pause(failure.text)
        return failure

    @contextmanager
    def _explained(self) -> Iterator[None]:
        self._health.require_no_pause()
        try:
            yield
        except CLIENT_ERRORS as error:
            # Without the cause: its text quotes the request and the answer.
            raise TierError("obj", self._judge(error).text) from None


def _is_endless(file: os.stat_result | None) -> bool:
    """Return whether a file is a pipe, a socket or a device: the client would wait for its end for ever. Pure."""
    return file is not None and not (stat.S_ISREG(file.st_mode) or stat.S_ISDIR(file.st_mode))


def _raise_if_whole(failures: Sequence[Failure], num_items: int) -> None:
    """Raise a TierError where nothing was answered, or all was refused for a reason that is no object's."""
    whole = (Blame.AWAY, Blame.ACCESS)
    if failures and len(failures) == num_items and all(failure.blame in whole for failure in failures):
        raise TierError("obj", failures[0].text)


async def _request_each(
    names: Sequence[str], ask: Callable[[str], Awaitable[T]], timeout_s: float
) -> tuple[dict[str, T], int, list[Exception]]:
    """Request ``names``, some at a time; return the answers, how many were answered or absent, and the failures."""
    answers: dict[str, T] = {}
    failures: list[Exception] = []
    num_absent = 0
    remaining = iter(names)
    end_s = time.monotonic() + timeout_s

    async def work() -> None:
        # Requests in flight are never cancelled, each ends within the client's time-outs: the client would report
        # to a loop that is gone.
        nonlocal num_absent
        for name in remaining:
            try:
                answers[name] = await ask(name)
            except FileNotFoundError as error:
                if is_bucket_missing(error):
                    failures.append(error)
                else:
                    num_absent += 1
            except CLIENT_ERRORS as error:
                failures.append(error)
            if len(failures) > len(answers) + num_absent or time.monotonic() >= end_s:
                return

    await asyncio.gather(*(work() for _ in range(min(MAX_SMALL_REQUESTS, len(names)))))
    return answers, len(answers) + num_absent, failures
