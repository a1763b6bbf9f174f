"""What of a value may stand in a message, in a field of an error, or in a log: never a credential.

Two rules. In any value, what looks like a credential is hidden: in front of a host, in a query, behind a name that says
so. And the value of a setting that takes an address is hidden as a whole unless it is plainly a host or a path: an
address that cannot be read is mostly one with a password in it, and no pattern knows every way to write that wrong.
"""

import re
from pathlib import PurePath

_TELLING = (
    r"passwords?|passwd|passphrase|pwd|secret|(?<![a-z_-])token|"
    r"(?:access|auth|session|security|refresh|api|bearer|sas|hf)[_-]?token|salt|"
    r"(?:api|access|secret|account|private|shared)[_-]?key(?:[_-]?id)?|credentials?|signature|"
    r"(?<![a-z])(?:sig|sas|connection[_-]?string)"
)
_SECRET_NAME = re.compile(f"(?:{_TELLING})$", re.IGNORECASE)
"""Names of settings whose values are never shown."""

_ADDRESS_NAME = re.compile(
    r"(?:^|[^a-z])(?:url|uri|endpoint|server|master|local_host|host|place)$", re.IGNORECASE
)
"""Names of settings that take an address."""

_SECRET_FILE_NAME = re.compile(r"(?:key|salt)[_-]file$", re.IGNORECASE)
"""Names of settings that take the path of a file with a secret, in which some write the secret itself."""

_PLAIN_ADDRESS = re.compile(
    r"(?:[a-z][a-z0-9+.-]{0,11}:/{1,3})?"  # a scheme, no longer than any is
    r"(?:\[[0-9a-f:.]*\]|[^@:?#%&;\x00-\x1f\x7f]*)(?::[0-9]{1,5})?(?:/[^@:?#%&;\x00-\x1f\x7f]*)?",
    re.IGNORECASE,
)

_CLEAR_URL = re.compile(
    r"([a-z][a-z0-9+.-]{0,11}://)[^@/?#\s%]*(@[a-z0-9.-]+(?::[0-9]{1,5})?(?:/[\w./-]*)?)", re.IGNORECASE
)
"""A URL of which it is plain where the credentials end."""

_AT = r"(?:@|%40)"
_IN_URL = re.compile(rf"(:/{{1,2}})\S+{_AT}", re.IGNORECASE)
_WITHOUT_SCHEME = re.compile(rf"[^\s'\"/=(\[{{]*(?::(?!/)|%3a)[^\s'\"]*{_AT}", re.IGNORECASE)
_USER_OF_VALUE = re.compile(rf"(?::|%3a).*{_AT}", re.IGNORECASE | re.DOTALL)
_QUERY = re.compile(r"(:/{1,2}[^\s'\"?#]*)[?#][^\s'\"]+")
_QUERY_OF_NAME = re.compile(r"\?[^\s'\"=&]+=[^\s'\"]+")
_BEARER = re.compile(r"\b(bearer|basic)\s+[^\s'\"]{8,}", re.IGNORECASE)
_NAMED = re.compile(rf"""((?:{_TELLING})['"]?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s"',;&}}]+)""", re.IGNORECASE)
"""Where secrets stand in texts: in front of a URL's host, in its query, behind a name that says so."""

HIDDEN = "***"

MAX_SHOWN_CHARS = 80
"""Characters of a value in a message: enough to recognise it, and few enough for one line of a log."""

MAX_SEARCHED_CHARS = 4096
"""Characters of a value that are searched for secrets; of a longer one with a URL in it nothing is shown."""

MAX_DEPTH = 16
"""Levels of lists and mappings that are searched; what lies deeper is not shown."""


def hide_secrets(text: str) -> str:
    """Return ``text`` without users and queries of URLs, and without what stands behind a telling name. Pure."""
    for pattern, shown in (
        (_IN_URL, rf"\1{HIDDEN}@"),
        (_WITHOUT_SCHEME, f"{HIDDEN}@"),
        (_QUERY, rf"\1?{HIDDEN}"),
        (_QUERY_OF_NAME, f"?{HIDDEN}"),
        (_BEARER, rf"\1 {HIDDEN}"),
        (_NAMED, rf"\1{HIDDEN}"),
    ):
        text = pattern.sub(shown, text)
    return text


def shorten(value: object, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return the ``repr`` of ``value`` without secrets in it, cut after ``max_chars``. Pure."""
    try:
        text = repr(redact("", value))
    except (ValueError, RecursionError):  # integers of thousands of digits, lists in lists in lists
        return f"<{type(value).__name__} too large to show>"
    if len(text) > MAX_SEARCHED_CHARS:
        if ":/" in text or "@" in text:
            return f"<{type(value).__name__} of {len(text)} characters>"
        text = text[:MAX_SEARCHED_CHARS]
    text = hide_secrets(text)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def redact(setting: str, value: object) -> object:
    """Return what may be shown of a setting's value: the value itself where nothing in it could be a secret. Pure.

    Args:
        setting: its name, as the user wrote it.
        value: what the user gave, of any type.
    """
    return _redact(setting, value, MAX_DEPTH)


def _redact(setting: str, value: object, depth: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if _SECRET_NAME.search(setting):
        return HIDDEN
    if isinstance(value, int | float):
        return value
    if _ADDRESS_NAME.search(setting):
        return _redact_address(value)
    if _SECRET_FILE_NAME.search(setting):
        return value if str(value).startswith(("/", "~/")) else HIDDEN
    return _redact_within(value, depth)


def _redact_address(value: object) -> object:
    if isinstance(value, str | PurePath) and _is_plain_address(str(value)):
        return value
    return _redact_text(value) if isinstance(value, str) and _CLEAR_URL.fullmatch(value) else HIDDEN


def _redact_within(value: object, depth: int) -> object:
    if isinstance(value, str):
        return _redact_text(value)
    if isinstance(value, bytes | bytearray | PurePath):
        text = value.decode("latin-1") if isinstance(value, bytes | bytearray) else str(value)
        return value if _redact_text(text) == text else HIDDEN
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return value
    if not depth:
        return HIDDEN
    if isinstance(value, dict):
        return {_redact("", key, depth - 1): _redact(str(key), one, depth - 1) for key, one in value.items()}
    shown = [_redact("", one, depth - 1) for one in value]
    return tuple(shown) if isinstance(value, tuple) else shown


def _is_plain_address(text: str) -> bool:
    is_plain = len(text) <= MAX_SEARCHED_CHARS and _PLAIN_ADDRESS.fullmatch(text) is not None
    return is_plain and hide_secrets(text) == text


def _redact_text(text: str) -> str:
    if clear := _CLEAR_URL.fullmatch(text):
        return f"{clear[1]}{HIDDEN}{clear[2]}"
    if len(text) <= MAX_SEARCHED_CHARS:
        # Of a whole value it is known where it ends: a password may have spaces and line ends in it.
        return HIDDEN if _USER_OF_VALUE.search(text) else hide_secrets(text)
    if ":/" in text or "@" in text:
        return f"<text of {len(text)} characters>"
    return text if hide_secrets(text[:MAX_SEARCHED_CHARS]) == text[:MAX_SEARCHED_CHARS] else HIDDEN
