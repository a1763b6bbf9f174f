"""What a client's error means: what is to blame, in words of our own.

It repeats nothing that the client or the server said but an error code: both quote requests, and a request may carry
an access key or a signed address.
"""

import re
from enum import Enum
from typing import NamedTuple

from kvtier.errors import MissingExtraError
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.target import Service

try:
    from obstore.exceptions import (
        AlreadyExistsError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
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

ELSEWHERE_MARK = "127.0.0.1:0,"
"""What the client says of a redirect to another host, for which it has a proxy that cannot be."""

BEYOND_END_MARKS = ("status code: 416 ", "Wanted range starting at", "Requested range was invalid")
"""How servers, memory and directories say that an object ends before the range begins."""

VALUE_CODES = frozenset({"InvalidObjectState"})
"""Codes of refusals that look like missing rights and are about one object, here one in a slow class of storage."""

ROOM_MARKS = (
    "status code: 507 ",
    "InsufficientStorage",
    "QuotaExceeded",
    "StorageFull",
    "No space left on device",
)
"""How stores say that there is no room."""

CONFLICT = 409
HELD_CODES = frozenset({"BlobAlreadyExists"})
"""What a conflict means where an object of that name is there; any other is a second writer, a lock or a retention."""

BUSY_STATUSES = frozenset({408, 425, 429})
"""Statuses that ask for another try, and say nothing about the value."""

MAX_SEARCHED_CHARS = 65_536
"""Characters of a client's error that are searched: a store's own answer has some hundred."""

_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_STATUS = re.compile(r"status code: ([1-5][0-9]{2}) ")


class Blame(Enum):
    """What a failure speaks against: the object, the room in the store, the store, our access, or the way there."""

    VALUE = "value"
    ROOM = "room"
    NODE = "node"
    ACCESS = "access"
    AWAY = "away"


class Failure(NamedTuple):
    """Why a request has failed.

    Attributes:
        blame: what it speaks against.
        words: the server's status and code, or ours for the reason.
        text: what happened and what to do.
    """

    blame: Blame
    words: str
    text: str


def judge(error: Exception, settings: ObjSettings) -> Failure:
    """Return what a client's error means. Pure."""
    text = _text_of(error)
    return Failure(_blame_of(error, text), _words_of(error, text), explain(error, settings))


def is_held(error: Exception) -> bool:
    """Return whether a write was refused because there is an object of that name. Pure."""
    if not isinstance(error, AlreadyExistsError | PreconditionError):
        return False
    text = _text_of(error)
    return _status_of(text) != CONFLICT or _code_of(text) in HELD_CODES


def has_no_condition(error: Exception) -> bool:
    """Return whether a server says that it does not know conditional writes. Pure."""
    text = _text_of(error)
    return _status_of(text) == 501 or _code_of(text) == "NotImplemented"


def is_bucket_missing(error: Exception) -> bool:
    """Return whether the error says that there is no such bucket. Pure."""
    return _code_of(_text_of(error)) in MISSING_BUCKET_CODES


def is_beyond_end(error: Exception) -> bool:
    """Return whether the error says that an object ends before the range that was asked for. Pure."""
    return any(mark in _text_of(error) for mark in BEYOND_END_MARKS)


def is_unanswered(error: Exception) -> bool:
    """Return whether the store has said nothing at all: it is away, hangs, or cannot be reached. Pure."""
    text = _text_of(error)
    return "error sending request" in text and _STATUS.search(text) is None and ELSEWHERE_MARK not in text


def explain_opening(settings: ObjSettings) -> str:
    """Return why a client cannot even be made. Pure."""
    remedy = f"check {CREDENTIALS_OF.get(settings.target.service, 'url')} and what else the environment sets"
    return f"no client for {_name_of(settings)}: {remedy}"


def explain(error: Exception, settings: ObjSettings) -> str:
    """Return what happened and what to do. Pure."""
    text = _text_of(error)
    name = _name_of(settings)
    code = _code_of(text)
    said = _said_by(text)
    remedy = f"check {CREDENTIALS_OF.get(settings.target.service, 'permissions')}"
    if any(mark in text for mark in METADATA_MARKS):
        return f"no credentials for {name} in the environment: {remedy}"
    if code in MISSING_BUCKET_CODES or isinstance(error, FileNotFoundError):
        return f"{name} does not exist ({said or 'not found'}): create it, or correct url and endpoint"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        rights = "and the rights to list, get, put and delete"
        return f"{name} refuses us ({said or 'permission denied'}): {remedy} {rights}"
    if _is_redirect(text):
        return f"{name} redirects us ({said or 'to another host'}), which is not followed: correct endpoint and region"
    if is_unanswered(error):
        reason = next((ours for theirs, ours in CONNECTION_REASONS if theirs in text), "no connection")
        return f"{name} cannot be reached ({reason}): check url, endpoint, network and timeout_s"
    return f"{name} has failed ({_words_of(error, text)}): see the store's own log"


def _blame_of(error: Exception, text: str) -> Blame:
    status = _status_of(text)
    if is_unanswered(error):
        return Blame.AWAY
    if any(mark in text for mark in ROOM_MARKS):
        return Blame.ROOM
    if _code_of(text) in VALUE_CODES:
        return Blame.VALUE
    is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError | FileNotFoundError)
    if is_refused or any(mark in text for mark in METADATA_MARKS) or _is_redirect(text):
        return Blame.ACCESS
    is_of_value = status is not None and status < 500 and status not in BUSY_STATUSES
    return Blame.VALUE if is_of_value else Blame.NODE


def _words_of(error: Exception, text: str) -> str:
    reason = next((ours for theirs, ours in CONNECTION_REASONS if theirs in text), type(error).__name__)
    return _said_by(text) or ("redirected to another host" if _is_redirect(text) else reason)


def _is_redirect(text: str) -> bool:
    status = _status_of(text)
    return ELSEWHERE_MARK in text if status is None else 300 <= status < 400


def _said_by(text: str) -> str:
    """Return the status and the code of a server's answer, empty where there was none."""
    status = _STATUS.search(text)
    return " ".join(word for word in (status[1] if status else "", _code_of(text) or "") if word)


def _text_of(error: Exception) -> str:
    # The client puts the whole answer into it, which a server may make as long as it likes.
    return str(error)[:MAX_SEARCHED_CHARS]


def _status_of(text: str) -> int | None:
    found = _STATUS.search(text)
    return None if found is None else int(found[1])


def _name_of(settings: ObjSettings) -> str:
    place = settings.target
    at = f" at {settings.endpoint}" if settings.endpoint else ""
    if place.service is Service.HTTP:
        return place.bucket
    return f"{place.service.value}://{place.bucket}{at}"


def _code_of(text: str) -> str | None:
    found = _CODE.search(text)
    return found[1] if found else None
