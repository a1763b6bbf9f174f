"""What a client's error means, in words of our own.

It repeats nothing that the client or the server said but an error code: both quote requests, and a request may carry
an access key or a signed address.
"""

import re

from kvtier.errors import MissingExtraError
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.target import Service

try:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
except ImportError as error:
    raise MissingExtraError("obstore", "obj") from error

CREDENTIALS_OF = {
    Service.S3: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    Service.GCS: "GOOGLE_APPLICATION_CREDENTIALS",
    Service.AZURE: "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

MISSING_BUCKET_CODES = frozenset({"NoSuchBucket", "ContainerNotFound"})

CONNECTION_REASONS = (
    ("timed out", "no answer in time"),
    ("TimedOut", "no answer in time"),
    ("Connection refused", "connection refused"),
    ("dns error", "no such host"),
    ("InvalidCertificate", "its certificate is not trusted; ca_file names one that signs it"),
    ("InvalidContentType", "it does not speak TLS"),
    ("Connection reset", "connection reset"),
    ("connection closed", "connection closed"),
    ("IncompleteMessage", "connection closed"),
)
"""Words of the client that say why a request got no answer, and ours for them."""

METADATA_MARKS = ("/latest/api/token", "/latest/meta-data", "metadata.google.internal", "169.254.169.254")
"""Where a client without credentials asks for those of the machine it runs on."""

BEYOND_END_MARKS = ("status code: 416 ", "Wanted range starting at", "Requested range was invalid")
"""How servers, memory and directories say that an object ends before the range begins."""

MAX_SEARCHED_CHARS = 65_536
"""Characters of a client's error that are searched: a store's own answer has some hundred."""

_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_STATUS = re.compile(r"status code: ([1-5][0-9]{2}) ")


def is_bucket_missing(error: Exception) -> bool:
    """Return whether the error says that there is no such bucket. Pure."""
    return _code_of(_text_of(error)) in MISSING_BUCKET_CODES


def is_beyond_end(error: Exception) -> bool:
    """Return whether the error says that an object ends before the range that was asked for. Pure."""
    return any(mark in _text_of(error) for mark in BEYOND_END_MARKS)


def is_unanswered(error: Exception) -> bool:
    """Return whether the store has said nothing at all: it is away, hangs, or cannot be reached. Pure."""
    text = _text_of(error)
    return "error sending request" in text and _STATUS.search(text) is None


def explain_opening(settings: ObjSettings) -> str:
    """Return why a client cannot even be made. Pure."""
    remedy = f"check {CREDENTIALS_OF.get(settings.target.service, 'url')} and what else the environment sets"
    return f"no client for {_name_of(settings)}: {remedy}"


def explain(error: Exception, settings: ObjSettings) -> str:
    """Return what happened and what to do. Pure."""
    text = _text_of(error)
    name = _name_of(settings)
    code = _code_of(text)
    status = _STATUS.search(text)
    said = " ".join(word for word in (status[1] if status else "", code or "") if word)
    remedy = f"check {CREDENTIALS_OF.get(settings.target.service, 'permissions')}"
    if any(mark in text for mark in METADATA_MARKS):
        return f"no credentials for {name} in the environment: {remedy}"
    if code in MISSING_BUCKET_CODES or isinstance(error, FileNotFoundError):
        return f"{name} does not exist ({said or 'not found'}): create it, or correct url and endpoint"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        rights = "and the rights to list, get, put and delete"
        return f"{name} refuses us ({said or 'permission denied'}): {remedy} {rights}"
    if is_unanswered(error):
        reason = next((ours for theirs, ours in CONNECTION_REASONS if theirs in text), "no connection")
        return f"{name} cannot be reached ({reason}): check url, endpoint, network and timeout_s"
    reason = next((ours for theirs, ours in CONNECTION_REASONS if theirs in text), type(error).__name__)
    return f"{name} has failed ({said or reason}): see the store's own log"


def _text_of(error: Exception) -> str:
    # The client puts the whole answer into it, which a server may make as long as it likes.
    return str(error)[:MAX_SEARCHED_CHARS]


def _name_of(settings: ObjSettings) -> str:
    place = settings.target
    at = f" at {settings.endpoint}" if settings.endpoint else ""
    if place.service is Service.HTTP:
        return place.bucket
    return f"{place.service.value}://{place.bucket}{at}"


def _code_of(text: str) -> str | None:
    found = _CODE.search(text)
    return found[1] if found else None
