"""The client for a store: opens it with every time-out set, calls it, and leaves it alone when it does not answer.

Credentials go from the environment to the client and pass nothing of ours. ``AWS_PROFILE`` is understood when no key
is given directly; boto3 reads it, as the client itself knows no profiles.
"""

import asyncio
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from kvtier.errors import ConfigError, KVTierError, MissingExtraError, PlaceError, TierError
from kvtier.redaction import shorten
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer
from kvtier.tiering.kit.health import BackendHealth
from kvtier.tiering.obj.errors import (
    explain,
    explain_opening,
    is_beyond_end,
    is_bucket_missing,
    is_unanswered,
)
from kvtier.tiering.obj.expiry import ObjectExpiry
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.target import Service

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
    from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store
except ImportError as error:
    raise MissingExtraError("obstore", "obj") from error

if TYPE_CHECKING:
    from obstore.store import AzureConfig, BackoffConfig, ClientConfig, RetryConfig, S3Config, S3Credential

Store: TypeAlias = AzureStore | GCSStore | HTTPStore | LocalStore | MemoryStore | S3Store

CONNECT_TIMEOUT_S = 1.0
"""Seconds until a connection stands, TLS included. Longer keeps lookups waiting for a server that is off; shorter
fails on a busy one. Across oceans it is too short, and so is every deadline of a request."""

MAX_RETRIES = 2
RETRY_WITHIN_S = 1.0
"""Seconds from the start of a request within which it is repeated after a quick failure such as 503 SlowDown. A
request that has timed out is older than that, so time-outs are not multiplied."""


T = TypeVar("T")

MAX_SMALL_REQUESTS = 64
"""Small requests at once for a batch of keys. Fewer make a long prefix wait for round trips; more open connections
that are used for nothing else."""

PAGE_OBJECTS = 1000
"""Objects in one answer of a listing, and in one bulk deletion: the most that S3 allows."""

PAUSE_S = 1.0
"""Seconds for which a store that did not answer is not called again; each call takes most of a second to fail."""

OVER = -1
"""The length of an object whose time to live is over: that of no block."""

CLIENT_ERRORS = (BaseError, OSError, ValueError, NotImplementedError)


class Fetched(NamedTuple):
    """An object as it was read.

    Attributes:
        num_bytes: length of the whole object.
        body: the bytes that were asked for; only the first few when the object is longer than was allowed.
    """

    num_bytes: int
    body: memoryview


class Listed(NamedTuple):
    """An object in a listing; sorts by age.

    Attributes:
        modified: when it was written, by the store's clock.
        path: its name.
        num_bytes: its length.
    """

    modified: datetime
    path: str
    num_bytes: int


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


class Client:
    """Calls one store, and leaves it alone for a moment when it does not answer; several threads may use it at once.

    Args:
        settings: where it is and how long it may take.
        clock: seconds, monotonic.
        expiry: which objects are over; they count as absent. None: none ever is.

    Raises:
        ConfigError: a directory or a file that the settings name cannot be used.
        TierError: the environment does not say what a client needs.
    """

    def __init__(
        self,
        settings: ObjSettings,
        clock: Callable[[], float] = time.monotonic,
        expiry: ObjectExpiry | None = None,
    ) -> None:
        self._expiry = expiry
        self._settings = settings
        self._health = BackendHealth("obj", clock, pause_s=PAUSE_S)
        try:
            self._store = open_store(settings)
        except KVTierError:
            raise
        except CLIENT_ERRORS:
            raise TierError("obj", explain_opening(settings)) from None
        self._can_create = settings.target.service is not Service.HTTP
        self._is_memory = settings.target.service is Service.MEMORY
        self._folder = Path(settings.target.bucket) if settings.target.service is Service.FILE else None

    def put_new(self, path: str, buffers: Sequence[Buffer]) -> bool:
        """Write an object unless there is one of that name; False when there is.

        Raises:
            TierError: the store cannot be reached, or refuses.
        """
        with self._explained():
            try:
                if not self._can_create:
                    return self._put_unless_seen(path, buffers)
                # Sent from the rows themselves. Should a request that has timed out be sent on for a moment, from
                # a row that is used anew, neither its signature nor the envelope fits what arrives: a miss.
                body = [b"".join(buffers)] if self._is_memory else list(buffers)
                with self._kept_private(path):
                    obstore.put(self._store, path, body, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return self._expiry is not None and self._replace_if_over(path, buffers)
            return True

    def get(self, path: str, max_bytes: int, *, is_lasting: bool = False) -> Fetched | None:
        """Read an object, or only its beginning when it is longer than ``max_bytes``; None when there is none.

        One that is over is none either, unless it is lasting.
        """
        if self._is_endless(path):
            return Fetched(0, memoryview(b""))
        with self._explained():
            try:
                result = obstore.get(self._store, path)
                expiry = None if is_lasting else self._expiry
                if expiry is not None and expiry.is_over(result.meta["last_modified"]):
                    return None
                num_bytes = result.meta["size"]
                if num_bytes <= max_bytes:
                    return Fetched(num_bytes, memoryview(result.bytes()))
                head = obstore.get_range(self._store, path, start=0, length=ENVELOPE_BYTES)
                return Fetched(num_bytes, memoryview(head))
            except FileNotFoundError as error:
                if is_bucket_missing(error):
                    raise
                return None

    def count_disk_blocks(self, path: str) -> int | None:
        """Return how many blocks of 512 bytes an object takes on this machine's disk; None when it is not there."""
        if self._folder is None:
            return None
        try:
            return (self._folder / path).stat().st_blocks
        except OSError:
            return None

    def get_range(self, path: str, start: int, num_bytes: int) -> memoryview | None:
        """Read part of an object; fewer bytes when it ends before, None when there is none."""
        if self._is_endless(path):
            return memoryview(b"")
        with self._explained():
            try:
                return memoryview(obstore.get_range(self._store, path, start=start, length=num_bytes))
            except FileNotFoundError:
                return None
            except BaseError as error:
                if is_beyond_end(error):
                    return memoryview(b"")
                raise

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        """Return the lengths of those objects that exist, OVER for one whose time to live is over.

        What got no answer in time counts as absent.
        """

        async def ask(path: str) -> int:
            if self._is_endless(path):
                return 0  # the client opens a file to tell its length
            meta = await obstore.head_async(self._store, path)
            is_over = self._expiry is not None and self._expiry.is_over(meta["last_modified"])
            return OVER if is_over else meta["size"]

        return self._request_each(paths, ask)

    def get_each(self, paths: Sequence[str], max_bytes: int) -> dict[str, memoryview]:
        """Return the beginnings of those objects that exist, likewise."""

        async def ask(path: str) -> memoryview:
            if self._is_endless(path):
                return memoryview(b"")
            return memoryview(await obstore.get_range_async(self._store, path, start=0, length=max_bytes))

        return self._request_each(paths, ask)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, in bulk where the store can; those that are gone already are no matter."""
        for begin in range(0, len(paths), PAGE_OBJECTS):
            with self._explained():
                self._remove_page(list(paths[begin : begin + PAGE_OBJECTS]))

    def list_all(self, root: str) -> Iterator[Listed]:
        """Yield every object whose name begins with ``root``, a page at a time in memory.

        Raises:
            TierError: the store cannot be reached, or lists the same objects again and again.
        """
        with self._explained():
            loop = LoopFinder()
            for page in obstore.list(self._store, root or None, chunk_size=PAGE_OBJECTS):
                for meta in page:
                    if loop.is_repeated(meta["path"]):
                        raise TierError(
                            "obj", f"its listing comes to {shorten(meta['path'])} again: it has no end"
                        )
                    yield Listed(meta["last_modified"], meta["path"], meta["size"])

    def list_folders(self, root: str) -> list[str]:
        """Return the next parts of the names below ``root``, one level down; what is deeper is not listed."""
        with self._explained():
            found = obstore.list_with_delimiter(self._store, root or None)["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def require_bucket(self, path: str) -> None:
        """Ask for one small object, which need not exist.

        Raises:
            TierError: there is no bucket, no server, or no leave to read.
        """
        # A writer with all rights makes a missing bucket come into being on some servers: this reads instead.
        self.get(path, ENVELOPE_BYTES)

    def _replace_if_over(self, path: str, buffers: Sequence[Buffer]) -> bool:
        """Write an object in place of one that is over; False when that is not."""
        if self._is_endless(path):
            return False
        with suppress(FileNotFoundError):
            meta = obstore.head(self._store, path)
            if self._expiry is None or not self._expiry.is_over(meta["last_modified"]):
                return False
            obstore.put(self._store, path, [b"".join(buffers)], use_multipart=False)
            return True
        return False  # deleted just now: the next store of the block writes it

    def _is_endless(self, path: str) -> bool:
        """Return whether a file is a pipe, a socket or a device: the client would wait for its end for ever."""
        if self._folder is None:
            return False
        try:
            mode = (self._folder / path).stat().st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    @contextmanager
    def _kept_private(self, path: str) -> Iterator[None]:
        """Let an object that is a file be its owner's only: its folders from the beginning, itself from its end."""
        if self._folder is None:
            yield
            return
        file = self._folder / path
        make_private_folders(file.parent)
        yield
        with suppress(FileNotFoundError):  # another engine has evicted it
            file.chmod(0o600)

    def _put_unless_seen(self, path: str, buffers: Sequence[Buffer]) -> bool:
        # WebDAV has no conditional create here: two writers may both write, and both write the same block.
        with suppress(FileNotFoundError):
            obstore.head(self._store, path)
            return False
        obstore.put(self._store, path, list(buffers), use_multipart=False)
        return True

    def _remove_page(self, paths: list[str]) -> None:
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError:
            # A directory stops at the first that is gone; buckets do not mind.
            for path in paths:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, path)

    def _request_each(self, paths: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        with self._explained():
            return asyncio.run(_request_each(paths, ask, self._settings.timeout_s))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        self._health.require_no_pause()
        try:
            yield
        except CLIENT_ERRORS as error:
            why = explain(error, self._settings)
            if is_unanswered(error):
                self._health.begin_pause(why)
            # Without the cause: its text quotes the request and the answer.
            raise TierError("obj", why) from None


def open_store(settings: ObjSettings) -> Store:
    """Return a client for the place of ``settings``.

    Raises:
        ConfigError: the directory cannot be made, or the file of certificates cannot be read.
        MissingExtraError: a profile is asked for and boto3 is missing.
    """
    place = settings.target
    if place.service is Service.MEMORY:
        return MemoryStore()
    if place.service is Service.FILE:
        return LocalStore(_make_directory(Path(place.bucket)))
    client_options = _client_options(settings)
    retry_config = _retry_config(settings)
    if place.service is Service.HTTP:
        return HTTPStore.from_url(place.bucket, client_options=client_options, retry_config=retry_config)
    if place.service is Service.GCS:
        return GCSStore(place.bucket, client_options=client_options, retry_config=retry_config)
    if place.service is Service.AZURE:
        config: AzureConfig = {} if settings.endpoint is None else {"endpoint": settings.endpoint}
        return AzureStore(
            place.bucket, config=config, client_options=client_options, retry_config=retry_config
        )
    return _open_s3(settings, client_options, retry_config)


class ProfileCredentials:
    """Credentials of the profile that ``AWS_PROFILE`` names; read at the first request, not before."""

    def __init__(self) -> None:
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError as error:
            raise MissingExtraError("boto3", "obj") from error
        self._provider_class = Boto3CredentialProvider
        self._provider: Boto3CredentialProvider | None = None

    def __call__(self) -> "S3Credential":
        """Return the credentials as the client wants them. Thread: the client's; may block."""
        if self._provider is None:
            self._provider = self._provider_class()
        return self._provider()


def _open_s3(settings: ObjSettings, client_options: "ClientConfig", retry_config: "RetryConfig") -> Store:
    config: S3Config = {}
    if settings.endpoint is not None:
        config["endpoint"] = settings.endpoint
    if settings.region is not None:
        config["region"] = settings.region
    has_profile = "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ
    return S3Store(
        settings.target.bucket,
        config=config,
        client_options=client_options,
        retry_config=retry_config,
        credential_provider=ProfileCredentials() if has_profile else None,
    )


def _client_options(settings: ObjSettings) -> "ClientConfig":
    options: ClientConfig = {
        "allow_http": settings.allow_http,
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, settings.timeout_s)),
        "timeout": timedelta(seconds=settings.timeout_s),
        "pool_max_idle_per_host": str(settings.num_threads),
    }
    if settings.ca_file is not None:
        try:
            options["root_certificate"] = settings.ca_file.read_bytes()
        except OSError as error:
            raise ConfigError(
                "ca_file", str(settings.ca_file), f"cannot be read: {error.strerror}"
            ) from error
    return options


def _retry_config(settings: ObjSettings) -> "RetryConfig":
    within = timedelta(seconds=min(RETRY_WITHIN_S, settings.timeout_s / 2))
    first, longest = timedelta(milliseconds=100), timedelta(milliseconds=500)
    backoff: BackoffConfig = {"init_backoff": first, "max_backoff": longest, "base": 2}
    return {"max_retries": MAX_RETRIES, "retry_timeout": within, "backoff": backoff}


def _make_directory(path: Path) -> Path:
    try:
        make_private_folders(path)
    except OSError as error:
        remedy = f"cannot be made ({error.strerror}): give a directory that this user may write"
        raise PlaceError("url", f"file://{path}", remedy) from error
    return path


def make_private_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, each for its owner only; one that is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    make_private_folders(path.parent)  # mkdir(parents=True) would make them for everybody
    path.mkdir(mode=0o700, exist_ok=True)


async def _request_each(
    paths: Sequence[str], ask: Callable[[str], Awaitable[T]], timeout_s: float
) -> dict[str, T]:
    """Request ``paths``, some at a time; return the answers, less what is absent or got none in time."""
    answers: dict[str, T] = {}
    failures: list[Exception] = []
    remaining = iter(paths)
    end_s = time.monotonic() + timeout_s

    async def work() -> None:
        # Requests in flight are never cancelled, each ends within the client's time-outs: the client would report
        # to a loop that is gone.
        for path in remaining:
            try:
                answers[path] = await ask(path)
            except FileNotFoundError:
                pass
            except CLIENT_ERRORS as error:
                failures.append(error)
            if failures or time.monotonic() >= end_s:
                return

    await asyncio.gather(*(work() for _ in range(min(MAX_SMALL_REQUESTS, len(paths)))))
    if failures:
        raise failures[0]
    return answers
