"""Opens a client for a store, with every time-out set.

Credentials go from the environment to the client and pass nothing of ours. ``AWS_PROFILE`` is understood when no key
is given directly; boto3 reads it, as the client itself knows no profiles.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from kvtier.errors import ConfigError, KVTierError, MissingExtraError, PlaceError, TierError
from kvtier.tiering.obj.errors import explain_opening
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.target import Service

try:
    from obstore.exceptions import BaseError
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

NO_PROXY_URL = "http://127.0.0.1:0"
"""A proxy that cannot be. The client follows a redirect of a read wherever it points, and has no option against that.
With this proxy for all hosts but the store's own, a redirect to another host fails at once (obstore 0.12.1, 2026-11:
``test_a_redirect_to_another_host_is_refused``)."""

PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")

CLIENT_ERRORS = (BaseError, OSError, ValueError, NotImplementedError)
"""What a client raises."""


def open_store(settings: ObjSettings) -> Store:
    """Return a client for the place of ``settings``.

    Raises:
        ConfigError: the directory cannot be made, or the file of certificates cannot be read.
        MissingExtraError: a profile is asked for and boto3 is missing.
        TierError: the environment does not say what a client needs.
    """
    try:
        return _open(settings)
    except KVTierError:
        raise
    except CLIENT_ERRORS:
        raise TierError("obj", explain_opening(settings)) from None


def _open(settings: ObjSettings) -> Store:
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
    host = _only_host(settings)
    if host is not None:
        options["proxy_url"], options["proxy_excludes"] = NO_PROXY_URL, host
    if settings.ca_file is not None:
        try:
            options["root_certificate"] = settings.ca_file.read_bytes()
        except OSError as error:
            raise ConfigError(
                "ca_file", str(settings.ca_file), f"cannot be read: {error.strerror}"
            ) from error
    return options


def _only_host(settings: ObjSettings) -> str | None:
    """Return the host that alone is to be called; None where that is not known, or proxies of the user's are.

    A service's own endpoint may have several, and a client that asks a machine for its credentials calls others.
    """
    if any(os.environ.get(name) for name in (*PROXY_VARIABLES, *map(str.lower, PROXY_VARIABLES))):
        return None
    target = settings.target
    if target.service is Service.HTTP:
        return urlsplit(target.bucket).hostname
    has_keys = "AWS_ACCESS_KEY_ID" in os.environ or "AWS_PROFILE" in os.environ
    if target.service is Service.S3 and settings.endpoint is not None and has_keys:
        return urlsplit(settings.endpoint).hostname
    return None


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
