"""A client's error is said in words of our own, with nothing in them that it quotes."""

from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import LocalStore, MemoryStore

from kvtier.settings import parse_settings
from kvtier.tiering.obj.errors import explain, is_beyond_end, is_bucket_missing
from kvtier.tiering.obj.settings import ObjSettings

SIGNATURE = "sig=s1gnature"


def settings(url: str) -> ObjSettings:
    """Return the settings of a tier there."""
    return parse_settings(
        ObjSettings,
        {
            "url": url,
            "prefix": "",
            "timeout_s": 1.0,
            "num_threads": 1,
            "allow_http": False,
        },
    )


@pytest.mark.parametrize(
    ("error", "url", "expected"),
    [
        (
            GenericError(f"PUT https://h/x?{SIGNATURE}: error sending request: operation timed out"),
            "az://con",
            "in time",
        ),
        (GenericError(f"PUT https://h/x?{SIGNATURE}: error sending request"), "az://con", "no connection"),
        (
            PermissionDeniedError(f"{SIGNATURE} status code: 403 Forbidden"),
            "az://con",
            "AZURE_STORAGE_ACCOUNT_KEY",
        ),
        (PermissionDeniedError(f"{SIGNATURE}"), "gs://buc", "GOOGLE_APPLICATION_CREDENTIALS"),
        (PermissionDeniedError(f"{SIGNATURE}"), "file:///dir", "check permissions"),
        (FileNotFoundError(f"{SIGNATURE} <Code>ContainerNotFound</Code>"), "az://con", "ContainerNotFound"),
        (
            GenericError(f"{SIGNATURE} status code: 503 Slow <Code>SlowDown</Code>"),
            "s3://buc",
            "503 SlowDown",
        ),
        (GenericError(f"metadata.google.internal {SIGNATURE}"), "gs://buc", "no credentials"),
        (ValueError(SIGNATURE), "s3://buc", "ValueError"),
    ],
)
def test_an_error_is_named_and_not_quoted(error: Exception, url: str, expected: str) -> None:
    message = explain(error, settings(url))
    assert expected in message
    assert url in message
    assert SIGNATURE not in message


def test_a_missing_bucket_is_told_from_a_missing_object() -> None:
    assert is_bucket_missing(FileNotFoundError("404 <Code>NoSuchBucket</Code>"))
    assert not is_bucket_missing(FileNotFoundError("404 <Code>NoSuchKey</Code>"))


def test_a_range_beyond_the_end_is_told_from_other_errors(tmp_path: Path) -> None:
    for store in (MemoryStore(), LocalStore(tmp_path)):
        obstore.put(store, "short", b"abc")
        with pytest.raises(GenericError) as caught:
            obstore.get_range(store, "short", start=10, length=5)
        assert is_beyond_end(caught.value)
    assert is_beyond_end(GenericError("status code: 416 Range Not Satisfiable"))
    assert not is_beyond_end(GenericError("status code: 500 Internal"))
